"""Names that other trainers give to a run's keys, and how their values are read.

SAME        names of a key whose values mean the same
READ        names whose values are translated: alias_values.py
NO_EFFECT   names that change no number of a run: read, reported, and left out
NOT_HERE    names that would change it: refused with a reason, unless they are switched off
"""

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from ..formatting import hint, shown
from ..trace import notice
from .alias_values import READ, Values, is_off


def _names(table: Mapping[str, str]) -> dict[str, str]:
    """Return {name: entry} of a table {entry: names with spaces between}."""
    return {name: entry for entry, names in table.items() for name in names.split()}


SAME = _names({
    "lr": "learning_rate max_lr peak_lr",
    "micro_batch": "per_device_train_batch_size micro_batch_size batch_size train_batch_size device_batch_size",
    "accumulate": "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches grad_accumulation_steps",
    "seq": "max_seq_length max_seq_len max_length seq_len seq_length sequence_len block_size cutoff_len context_length "
    "model_max_length",
    "steps": "num_steps train_steps num_training_steps",
    "epochs": "num_epochs max_epochs n_epochs",
    "out": "output_dir out_dir save_dir",
    "model": "model_name_or_path base_model model_name model_id",
    "data": "dataset datasets dataset_name dataset_path train_file train_files train_data train_dataset data_path",
    "eval_data": "validation_file validation_files validation_data eval_file eval_dataset val_data test_datasets",
    "tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "text_key": "dataset_text_field text_column text_field",
    "chat_template": "chat_template_path",
    "weight_decay": "wd adam_weight_decay",
    "eps": "adam_epsilon adam_eps optimizer_eps",
    "betas": "adam_betas optimizer_betas",
    "eval_every": "evaluate_every eval_interval evaluation_interval val_check_interval run_val_every_n_steps",
    "eval_batches": "max_eval_batches limit_val_batches max_eval_steps eval_iters",
    "save_every": "save_interval checkpoint_interval ckpt_interval checkpointing_steps",
    "keep": "save_total_limit keep_last_n_checkpoints",
    "patience": "early_stopping_patience",
    "final": "min_lr_ratio min_lr_rate",
    "decay": "decay_ratio",
    "validation": "eval_fraction validation_split test_size valid_fraction",
    "seed": "random_seed data_seed",
    "vocabulary": "vocab_size",
    "gpus": "num_processes nproc_per_node n_gpus num_gpus",
    "export": "export_dir save_model_to",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target_modules target_modules lora_modules",
    "lora.rslora": "use_rslora lora_use_rslora peft_use_rslora",
    "lora.dora": "use_dora lora_use_dora peft_use_dora",
})  # fmt: skip

LORA_SAME = _names({
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules lora_target_modules",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "init": "init_lora_weights",
})  # fmt: skip
"""Names of the keys in the section lora."""

NO_EFFECT = _names({
    "every step is recorded": "logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level "
    "log_every_n_steps log_interval disable_tqdm run_name wandb_run_name log_peak_memory_stats include_tokens_per_second "
    "include_num_input_tokens_seen log_level_replica log_on_each_node",
    "tokens are on the device, and no worker reads them": "dataloader_num_workers dataloader_pin_memory num_workers pin_memory "
    "dataloader_prefetch_factor dataloader_persistent_workers preprocessing_num_workers dataset_num_proc dataset_processes "
    "dataset_prepared_path overwrite_cache dataset_kwargs remove_unused_columns skip_prepare_dataset",
    "data is shuffled anew in each epoch": "shuffle shuffle_dataset",
    "rows have one length, and short examples are packed": "group_by_length length_column_name pad_to_sequence_len "
    "pad_to_max_length pad_to_multiple_of padding_free eval_packing packing_strategy eval_sample_packing",
    "steps are captured as CUDA graphs": "torch_compile compile torch_compile_backend torch_compile_mode",
    "attention uses the fastest kernel that fits": "flash_attention attn_implementation use_flash_attention_2 sdp_attention "
    "xformers_attention flash_attn",
    "the best weights are kept and exported": "load_best_model_at_end metric_for_best_model greater_is_better save_safetensors "
    "save_only_model overwrite_output_dir eval_on_start",
    "recompute needs no setting": "gradient_checkpointing_kwargs",
    "replicas need no setting": "ddp_find_unused_parameters ddp_timeout ddp_bucket_cap_mb ddp_backend local_rank fsdp_config "
    "average_tokens_across_devices ddp_broadcast_buffers",
    "evaluations have the rows of training": "per_device_eval_batch_size eval_batch_size eval_accumulation_steps "
    "eval_do_concat_batches",
    "gpubound train trains": "do_train do_eval do_predict prediction_loss_only",
    "task_type is that of the model": "task_type lora_task_type peft_type",
    "fused products and losses are used where they fit": "use_liger_kernel liger use_liger_loss",
})  # fmt: skip

NOT_HERE = _names({
    "nothing is uploaded; --export writes a folder that transformers loads": "push_to_hub hub_model_id hub_token hub_strategy "
    "push_to_hub_model_id hub_private_repo",
    "give parallel: ddp or fsdp, and --gpus": "deepspeed zero_stage tensor_parallel pipeline_parallel context_parallel_size "
    "tensor_parallel_size strategy",
    "code of a model folder is not run": "trust_remote_code",
    "no such noise is added": "neftune_noise_alpha noisy_embedding_alpha",
    "the loss is that of the labels as they are": "label_smoothing_factor label_smoothing",
    "adapters are matrices of linear layers alone": "modules_to_save lora_modules_to_save layers_to_transform rank_pattern "
    "alpha_pattern layers_pattern loftq_config",
    "the rate is the same for all weights": "lr_groups embedding_lr layerwise_lr_decay loraplus_lr_ratio embedding_lr_scale",
    "models are read from a folder": "model_revision revision",
    "give a config of LLaMA-Factory with --from, which reads all of it": "stage finetuning_type",
    "give each path of data its weight, as in data: [{path: a.jsonl, weight: 2}]": "dataset_weights sampling_strategy "
    "dataset_mixture interleave_probs mix_strategy",
})  # fmt: skip

ALIASES = frozenset({*SAME, *READ, *NO_EFFECT, *NOT_HERE})


def normal(name: Any) -> str:
    return str(name).lower().replace("-", "_")


def is_alias(name: Any, known: Collection[str]) -> bool:
    return name not in known and normal(name) in ALIASES


def read(values: Mapping[Any, Any], known: Collection[str], where: str = "config") -> dict[str, Any]:
    """Return `values` under our keys, and print one line of the names that were read as others.

    Keys that neither `known` nor the tables have stay as they are. Two names of one key must have the same value.
    """
    ours, renamed, dropped, refused = read_all(values, known)
    if refused:
        raise ValueError(f"{where}: {refused[0]}.")
    lines = [f"read {', '.join(renamed)}"] if renamed else []
    lines += [f"left out {', '.join(names)}: {reason}" for reason, names in dropped.items()]
    if lines and os.environ.get("RANK", "0") == "0":  # of several processes, each of which reads the config
        notice(f"{where}: {'; '.join(lines)}.")
    return ours


def read_all(
    values: Mapping[Any, Any], known: Collection[str]
) -> tuple[dict[str, Any], list[str], dict[str, list[str]], list[str]]:
    """Return (the values under our keys, what was read as what, the names left out by reason, what is refused and why)."""
    found: dict[Any, tuple[str, Any]] = {}  # our key -> the name it was given under, its value
    renamed, dropped, refused = list[str](), dict[str, list[str]](), list[str]()
    theirs = {normal(name): value for name, value in values.items()}

    def give(key: Any, name: str, value: Any) -> None:
        before, other = found.setdefault(key, (name, value))
        if before != name and other != value:
            raise ValueError(f"it and {before} are one key, {key!r}, got {shown(value)} and {shown(other)}; give one of them")

    for name, value in values.items():
        try:
            if not is_alias(name, known):
                give(name, str(name), _section(name, value, known))
                continue
            for key, own in _read_one(normal(name), value, theirs, dropped).items():
                if key.partition(".")[0] not in known:
                    raise ValueError(f"it is {key!r} of gpubound train, and has no meaning here")
                give(key, str(name), own)
                renamed.append(f"{name} as {key.replace('.', ': ')} = {shown(own)}")
        except ValueError as error:
            refused.append(f"{name}: {error}")
    return _joined({key: value for key, (_, value) in found.items()}), renamed, dropped, refused


def _read_one(name: str, value: Any, theirs: Values, dropped: dict[str, list[str]]) -> dict[str, Any]:
    if name in SAME:
        return {} if value is None else {SAME[name]: value}
    if name in READ:
        return READ[name](value, theirs)
    if name in NOT_HERE and not is_off(value):
        raise ValueError(f"got {shown(value)}, and it is not supported: {NOT_HERE[name]}; leave it out")
    reason = NO_EFFECT.get(name, "it is off")
    dropped.setdefault(reason, []).append(name)
    return {}


def _section(key: Any, value: Any, known: Collection[str]) -> Any:
    """Return the value of one of our keys; the sections lora and phases have keys themselves."""
    if key == "lora" and isinstance(value, Mapping):
        return {LORA_SAME.get(normal(name), name): own for name, own in value.items()}
    if key == "phases" and isinstance(value, list):
        return [read(phase, known, "phases") if isinstance(phase, Mapping) else phase for phase in value]
    return value


def _joined(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with dotted keys put into their sections."""
    joined = {key: value for key, value in values.items() if "." not in str(key)}
    for key, value in values.items():
        section, dot, name = str(key).partition(".")
        if dot and section == "betas":
            betas = list(joined.get("betas", (0.9, 0.95)))
            betas[int(name)] = value
            joined["betas"] = tuple(betas)
        elif dot and isinstance(joined.setdefault(section, {}), Mapping):
            joined[section] = {name: value} | dict(joined[section])
    return joined


def advice(name: Any, known: Collection[str]) -> str:
    """Return the end of a refusal of an unknown key: the one that means it or is most like it, else where all are listed."""
    if normal(name) in LORA_SAME.values() and "lora" in known:
        return f"it is a key of the section lora, as in lora: {{{normal(name)}: ...}}."
    if "objective_options" in known:
        from .objectives import OBJECTIVES, objective_class

        classes = {objective: objective_class(objective) for objective in OBJECTIVES}
        having = [of for of, kind in classes.items() if kind.of_corpus and normal(name) in getattr(kind, "__match_args__", ())]
        if having:
            return f"it is an option of {' and '.join(having)}, as in objective_options: {{{normal(name)}: ...}}."
    others = [alias for alias in ALIASES if alias not in known and SAME.get(alias, "").partition(".")[0] in ("", *known)]
    close = difflib.get_close_matches(normal(name)[:40], [*known, *others], n=1, cutoff=0.7)
    if not close or close[0] in known:
        return hint(name, known, "gpubound train --help lists the keys.")
    alias = close[0]
    ours = SAME.get(alias)
    if ours is None and alias in READ:
        return f"did you mean {alias!r}?"
    if ours is None:
        return f"did you mean {alias!r}? It can be left out: {NO_EFFECT.get(alias) or NOT_HERE[alias]}."
    return f"did you mean {alias!r}, here {ours.replace('.', ': ')!r}?"
