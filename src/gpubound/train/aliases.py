"""Keys and values as YAML, JSON or Python give them, as fields of a Recipe; and the names that other trainers give to keys.

SAME        names of a key whose values mean the same
READ        names whose values are translated
NO_EFFECT   names that change no number of a run: read, reported, and left out
NOT_HERE    names that would change it: refused with a reason, unless they are switched off

READ has a function for each name. It takes the value and all other values of the config, and returns what it is here: {} for
nothing, "lora.rank" for a key of a section.
"""

import difflib
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, get_args

from ..formatting import hint, listed, shown
from ..trace import notice
from .fields import Lora, check_type
from .recipe import Recipe

Values = Mapping[str, Any]

OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "paged_adamw": "adamw", "paged_adamw_32bit": "adamw", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit", "adamw8bit": "adamw8bit", "muon": "muon",
}  # fmt: skip
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant", "wsd": "wsd",
    "warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine",
}  # fmt: skip
DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32", "float32": "fp32",
    "no": "fp32", "fp8": "fp8", "tf32": "tf32", "bf16-mixed": "bf16", "16-mixed": "fp16", "auto": "auto",
    "bf16-pure": "bf16-pure", "bf16-split": "bf16-split",
}  # fmt: skip


def is_off(value: Any) -> bool:
    """Return whether a value says that something is not used."""
    return value in (None, False, 0, "", "no", "none", "None", "false") or value in ([], {}, ())


def _choice(key: str, known: Mapping[str, str]) -> Callable[[Any, Values], dict[str, Any]]:
    def read(value: Any, values: Values) -> dict[str, Any]:
        chosen = known.get(str(value).lower().removeprefix("torch."))
        if chosen is None:
            raise ValueError(f"got {shown(value)}, wanted one of {', '.join(known)}")
        return {key: chosen}

    return read


def _switch(key: str, on: Any, off: Any = None) -> Callable[[Any, Values], dict[str, Any]]:
    """Return a reader of a name that means our value `on`, or, switched off, `off`, or nothing."""

    def read(value: Any, values: Values) -> dict[str, Any]:
        chosen = off if is_off(value) else on
        return {} if chosen is None else {key: chosen}

    return read


def _schedule(value: Any, values: Values) -> dict[str, Any]:
    """Linear and cosine schedules of other trainers fall to 0, and here to `final`."""
    chosen = _choice("schedule", SCHEDULES)(value, values)
    falls = chosen["schedule"] in ("linear", "cosine", "wsd") and value != "cosine_with_min_lr"
    return chosen | ({"final": 0.0} if falls and "final" not in values else {})


def _schedule_options(value: Any, values: Values) -> dict[str, Any]:
    if is_off(value):
        return {}
    if isinstance(value, Mapping) and value.keys() <= {"min_lr", "min_lr_rate"} and len(value) == 1:
        least = _number(value.get("min_lr_rate", value.get("min_lr")))
        return {"final": least if "min_lr_rate" in value else least / _number(values.get("learning_rate", values.get("lr")))}
    raise ValueError(f"got {shown(value)}, wanted min_lr or min_lr_rate; schedules have the settings final and decay here")


def _clip(value: Any, values: Values) -> dict[str, Any]:
    return {"clip": None if is_off(value) else value}


def _dtype(name: str) -> Callable[[Any, Values], dict[str, Any]]:
    def read(value: Any, values: Values) -> dict[str, Any]:
        used = [other for other in ("bf16", "fp16", "tf32") if not is_off(values.get(other))]
        if len(used) == 2 and used[1] == "tf32":
            used = used[:1]  # tf32 is for what 16 bits leave
        if used:
            return {"precision": name} if name in used else {}
        return {"precision": "fp32"} if name == "bf16" else {}

    return read


def _warmup_steps(value: Any, values: Values) -> dict[str, Any]:
    if is_off(value):
        return {} if not is_off(values.get("warmup_ratio")) else {"warmup": 0}
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"got {value}, wanted a whole number of steps; warmup_ratio is a fraction")
    return {"warmup": value}


def _warmup_ratio(value: Any, values: Values) -> dict[str, Any]:
    if is_off(value):
        return {} if not is_off(values.get("warmup_steps")) else {"warmup": 0}
    if isinstance(value, int | float) and value >= 1:
        raise ValueError(f"got {value}, wanted a fraction of the steps, below 1; warmup_steps is a number of them")
    return {"warmup": value}


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"got {shown(value)}, wanted a number") from None


def _max_steps(value: Any, values: Values) -> dict[str, Any]:
    """-1 leaves the number of steps to num_train_epochs, as in transformers."""
    return {} if is_off(value) or _number(value) < 0 else {"steps": value}


def _train_epochs(value: Any, values: Values) -> dict[str, Any]:
    """A positive max_steps overrides num_train_epochs, as in transformers."""
    return {} if _max_steps(values.get("max_steps"), values) else {"epochs": value}


def _every(key: str, strategy: str) -> Callable[[Any, Values], dict[str, Any]]:
    def read(value: Any, values: Values) -> dict[str, Any]:
        chosen = str(values.get(strategy, "steps")).lower()
        if chosen in ("no", "false", "epoch"):
            return {} if chosen == "epoch" else {key: 0}
        if isinstance(value, float) and value < 1:
            raise ValueError(f"got {value}, wanted a number of steps")
        return {key: value or 0}

    return read


def _strategy(key: str, per_epoch: str) -> Callable[[Any, Values], dict[str, Any]]:
    def read(value: Any, values: Values) -> dict[str, Any]:
        chosen = str(value).lower()
        read_as: dict[str, dict[str, Any]] = {
            "no": {key: 0},
            "false": {key: 0},
            "epoch": {per_epoch: 1.0},
            "steps": {},
            "best": {},
        }
        if chosen not in read_as:
            raise ValueError(f"got {shown(value)}, wanted steps, epoch or no")
        return read_as[chosen]

    return read


def _report_to(value: Any, values: Values) -> dict[str, Any]:
    names = [name for name in (value if isinstance(value, list | tuple) else [value]) if not is_off(name)]
    if len(names) > 1:
        raise ValueError(f"got {shown(value)}, wanted one logger")
    return {"log": names[0]} if names else {}


def _resume(value: Any, values: Values) -> dict[str, Any]:
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        raise ValueError(f"got {shown(value)}, wanted true: a run goes on from the newest checkpoint in out")
    return {"resume": str(value).lower() == "true"} if value is not None else {}


def _validation(value: Any, values: Values) -> dict[str, Any]:
    if isinstance(value, int | float) and value >= 1:
        raise ValueError(f"got {value}, wanted a fraction of the documents")
    return {"validation": value or 0}


def _learn_answers(value: Any, values: Values) -> dict[str, Any]:
    return {} if value is None else {"train_on": "all" if is_off(value) else "assistant"}


def _beta(number: int) -> Callable[[Any, Values], dict[str, Any]]:
    return lambda value, values: {f"betas.{number}": value}


def _adapter(value: Any, values: Values) -> dict[str, Any]:
    if is_off(value) or str(value).lower() in ("lora", "true"):
        return {}
    if str(value).lower() == "qlora":
        return {"lora.base": "nf4"}
    raise ValueError(f"got {shown(value)}, wanted lora or qlora")


READ: dict[str, Callable[[Any, Values], dict[str, Any]]] = {
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_schedule", "scheduler"), _schedule),
    "lr_scheduler_kwargs": _schedule_options,
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad_norm", "gradient_clip_val"), _clip),
    **dict.fromkeys(("optim", "optimizer_name", "optimizer_type"), _choice("optimizer", OPTIMIZERS)),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "model_dtype"), _choice("precision", DTYPES)),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "enable_activation_checkpointing", "use_gradient_checkpointing"),
        _switch("recompute", "blocks", "cheap"),
    ),
    **dict.fromkeys(("warmup_steps", "warmup_iters", "num_warmup_steps"), _warmup_steps),
    **dict.fromkeys(("report_to", "logger"), _report_to),
    **dict.fromkeys(("packing", "sample_packing"), _switch("pack", "examples", "none")),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "train_on_responses_only"), _learn_answers),
    "bf16": _dtype("bf16"), "fp16": _dtype("fp16"), "tf32": _dtype("tf32"),
    "adam_beta1": _beta(0), "adam_beta2": _beta(1), "beta1": _beta(0), "beta2": _beta(1),
    "warmup_ratio": _warmup_ratio, "max_steps": _max_steps, "num_train_epochs": _train_epochs,
    "eval_steps": _every("eval_every", "eval_strategy"), "save_steps": _every("save_every", "save_strategy"),
    "eval_strategy": _strategy("eval_every", "evals_per_epoch"),
    "evaluation_strategy": _strategy("eval_every", "evals_per_epoch"),
    "save_strategy": _strategy("save_every", "saves_per_epoch"),
    "resume_from_checkpoint": _resume, "val_set_size": _validation,
    "validation_split_percentage": lambda value, values: {"validation": _number(value) / 100},
    **dict.fromkeys(("train_on_inputs", "train_on_input"), _switch("train_on", "all", "assistant")),
    "load_in_4bit": _switch("lora.base", "nf4"), "load_in_8bit": _switch("lora.base", "int8"),
    "fsdp": _switch("parallel", "fsdp"), "lora_target_linear": _switch("lora.targets", "all-linear"),
    "adapter": _adapter, "use_peft": _adapter,
}  # fmt: skip


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


RECIPE = {field.name: field for field in fields(Recipe)}


def convert(values: Mapping[Any, Any], known: Mapping[str, Field], where: str = "config") -> dict[str, Any]:
    """Return `values` under the names and with the types of the `known` fields; aliases.py has their other names.

    Unknown keys are refused here, wrong types by the recipe.
    """
    values = _read_sources(read(values, known, where), where)
    if "allow" in values:
        values["allow"] = tuple(listed(values["allow"]))
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}: {shown(key)} is unknown; {advice(key, known)}")
        if key not in RECIPE or key in ("lora", "objective_options"):  # which an option parser cannot hold as other types
            check_type(RECIPE.get(key, known[key]), value)
    return {key: _convert_value(known[key], value) for key, value in values.items()}


def _convert_value(field: Field, value: Any) -> Any:
    """Return a value of YAML's with the type of the field: YAML reads 3e-4 as a text."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        if not value:
            Lora.of(value)  # refuses it: an empty section would train every weight
        return _convert_known({f.name: f for f in fields(Lora)}, value)
    if field.name in ("betas", "data_weights"):
        numbers = value if isinstance(value, list | tuple) else (value,)
        return tuple(float(number) if isinstance(number, str | int) and _is_number(number) else number for number in numbers)
    if field.name == "clip" and value in ("none", "off"):
        return None
    if field.name in ("data", "eval_data"):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if field.name == "phases" and isinstance(value, list):
        known = {name: field for name, field in RECIPE.items() if name != "phases"}
        return tuple(_convert_known(known, _read_sources(p, "phases")) if isinstance(p, dict) else p for p in value)
    if wanted is float and _is_number(value):  # else the recipe's error names the field
        return float(value)
    return str(value) if wanted is str and type(value) is int else value


def _read_sources(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values with `data: [{path: a, weight: 2}, b]`, or `{a: 2, b: 1}`, as paths and data_weights."""
    for key, weights_key in (("data", "data_weights"), ("eval_data", None)):
        entries = values.get(key)
        if isinstance(entries, Mapping) and "path" not in entries:
            if any(not _is_number(weight) for weight in entries.values()):
                raise ValueError(
                    f"{where}: {key}: got {shown(dict(entries))}, wanted a path, a list of them, or weights by path such as "
                    "{a.jsonl: 2}."
                )
            entries = [{"path": path, "weight": weight} for path, weight in entries.items()]
        entries = entries if isinstance(entries, list | tuple) else [entries]
        if not any(isinstance(entry, Mapping) for entry in entries):
            continue
        sources = [entry if isinstance(entry, Mapping) else {"path": entry} for entry in entries]
        allowed = {"path", "weight"} if weights_key else {"path"}
        for source in sources:
            if "path" not in source or source.keys() - allowed:
                example = "{path: a.jsonl, weight: 2}" if weights_key else "{path: a.jsonl}"
                raise ValueError(
                    f"{where}: {key}: got {shown(dict(source))}, wanted a path or {example}; other "
                    f"keys of data, such as format, are the recipe's."
                )
        values = values | {key: [source["path"] for source in sources]}
        if weights_key and weights_key in values:
            raise ValueError(f"{where}: {weights_key}: got it and weights in data; give one of them.")
        if weights_key:
            values[weights_key] = [source.get("weight", 1) for source in sources]
    return values


def _is_number(value: Any) -> bool:
    """Return whether this is a finite number, or a text of one."""
    with suppress(ValueError, OverflowError, TypeError):
        return isinstance(value, str | int | float) and not isinstance(value, bool) and float(value) is not None
    return False


def _convert_known(known: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of known keys; the recipe refuses the others."""
    return {key: _convert_value(known[key], value) if key in known else value for key, value in values.items()}
