"""Configs of other trainers as recipes of this one: axolotl, TRL (and transformers' Trainer), LLaMA-Factory, torchtune.

Each tool has a function that flattens its config into the names of aliases.py, with the defaults that the tool would take. What
no key here means is listed, with the reason where there is one.
"""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..formatting import shown
from .aliases import SAME, SCHEDULES, is_off, normal, read_all

Values = dict[str, Any]

TRAINER = {
    "num_train_epochs": 3, "learning_rate": 5e-5, "per_device_train_batch_size": 8, "lr_scheduler_type": "linear",
    "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "packing": False,
    "val_set_size": 0,
}  # fmt: skip
TRL = TRAINER | {"learning_rate": 2e-5, "max_length": 1024}
DPO = TRAINER | {"learning_rate": 1e-6, "max_length": 1024}
AXOLOTL = {
    "num_epochs": 1, "optim": "adamw_torch", "lr_scheduler": "cosine", "warmup_ratio": 0.03, "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "sample_packing": False, "val_set_size": 0,
}  # fmt: skip
LLAMAFACTORY = TRAINER | {"cutoff_len": 2048}
TORCHTUNE = {"betas": [0.9, 0.999], "max_grad_norm": 0, "packing": False, "val_set_size": 0}
"""What each tool does where its config says nothing."""

INSTEAD = {
    "warmup_steps": ("warmup_ratio", "warmup_iters", "warmup"), "warmup_ratio": ("warmup_steps", "warmup"),
    "val_set_size": ("eval_data", "validation"), "lr_scheduler_type": ("lr_scheduler", "schedule"), "optim": ("optimizer",),
}  # fmt: skip
"""Names by which a config sets a default itself."""
COLUMNS = {"conversations": "sharegpt", "messages": "messages"}
TYPES = {
    "alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": "messages", "completion": "text", "pretrain": "text",
    "chatml.intel": "preference", "chat_template.default": "preference", "chatml": "preference",
}  # fmt: skip
"""axolotl's types of a dataset."""
AS_HERE = {
    "roles_to_train": ["assistant"], "train_on_eos": "turn", "message_field_role": "role", "message_field_content": "content",
    "message_property_mappings": {"role": "role", "content": "content"},
    "roles": {"system": ["system"], "user": ["user"], "assistant": ["assistant"], "tool": ["tool"]},
}  # fmt: skip
"""axolotl's options of a dataset, with the values that say what is done here anyway."""
TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "gemma": "gemma", "mistral": "mistral", "alpaca": "alpaca"}
TORCHTUNE_DATA = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"), "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "chat_dataset": (None, None), "instruct_dataset": (None, None), "preference_dataset": (None, "preference"),
    "text_completion_dataset": (None, "text"),
}  # fmt: skip
"""(the hub's id, the format) of torchtune's datasets."""


MALFORMED = AttributeError, IndexError, KeyError, TypeError  # what reading a value of another form raises


@dataclass
class Translation:
    """A config of another tool as keys of ours."""

    tool: str
    values: Values = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # without effect here, and why
    missing: list[str] = field(default_factory=list)  # what could not be translated


def tool_of(values: Mapping[str, Any]) -> str:
    """Return the tool whose config this is, by its keys."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        return "torchtune"
    names = {normal(name) for name in values}
    if names & {"finetuning_type", "stage"} and "model_name_or_path" in names:
        return "llamafactory"
    if "base_model" in names or isinstance(values.get("datasets"), list):
        return "axolotl"
    if names & {"model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "learning_rate", "output_dir"}:
        return "trl"
    raise ValueError(
        f"from: got the keys {', '.join(sorted(names)[:8])}, wanted a config of axolotl (base_model), TRL or transformers "
        f"(model_name_or_path), LLaMA-Factory (finetuning_type) or torchtune (_component_)."
    )


def translate(values: Mapping[str, Any], known: Collection[str]) -> Translation:
    """Return the recipe of another tool's config, whose kind its keys show. ValueError names a malformed value."""
    try:
        return _translated(values, known)
    except MALFORMED as error:
        what = next((f"{key}: got {shown(values[key])}, which" for key in values if _is_right(values, key, known)), "a value")
        raise ValueError(f"from: {what} has no form that {tool_of(values)} takes; correct the config.") from error


def _is_right(values: Mapping[str, Any], left_out: str, known: Collection[str]) -> bool:
    """Return whether the config is translated without one of its keys."""
    with suppress(ValueError, *MALFORMED):
        rest = {key: value for key, value in values.items() if key != left_out}
        return _translated(rest, known).tool == tool_of(values)
    return False


def _translated(values: Mapping[str, Any], known: Collection[str]) -> Translation:
    result = Translation(tool_of(values))
    flat = FLATTEN[result.tool](deepcopy(dict(values)), result)
    ours, result.read, dropped, refused = read_all(flat, known)
    result.missing += refused
    result.left_out += [f"{', '.join(names)}: {reason}" for reason, names in dropped.items()]
    for key, value in ours.items():
        if key not in known:
            result.missing.append(f"{key}: {shown(value)}")
        elif not (isinstance(value, Mapping) and not value):
            result.values[key] = list(value) if isinstance(value, tuple) else value
    return result


def _with_defaults(flat: Values, defaults: Values) -> Values:
    """Return the values with those that the tool takes where its config says nothing."""
    given = {SAME.get(normal(name), normal(name)) for name, value in flat.items() if value is not None}
    if not is_off(flat.get("max_steps")):
        given |= {"num_train_epochs", "epochs"}
    filled = {name: value for name, value in defaults.items() if not {SAME.get(name, name), *INSTEAD.get(name, ())} & given}
    return filled | {name: value for name, value in flat.items() if value is not None}


def _preference(flat: Values, beta: Any, loss: Any) -> None:
    """Set the objective to dpo with these options."""
    options = {"beta": beta, "loss": loss}
    flat["objective"], flat["objective_options"] = "dpo", {name: value for name, value in options.items() if value is not None}
    flat.pop("packing", None), flat.pop("sample_packing", None)
    flat["pack"] = "pairs"  # with several pairs a row a step would have other examples
    for name in ("per_device_train_batch_size", "micro_batch_size", "batch_size"):  # in pairs, which are two rows here
        if type(flat.get(name)) is int:
            flat[name] *= 2


def _trl(values: Values, result: Translation) -> Values:
    flat = {normal(name): value for name, value in values.items()}
    is_dpo = bool(flat.keys() & {"beta", "loss_type", "max_prompt_length", "ref_model"})
    uses_lora = not is_off(flat.pop("use_peft", "lora_r" in flat))
    for name in [name for name in flat if name.startswith("lora_")] if not uses_lora else ():
        result.left_out.append(f"{name}: use_peft is off")
        del flat[name]
    if uses_lora:
        flat = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05} | flat
    name, split = flat.pop("dataset_name", None), flat.pop("dataset_train_split", None)
    configuration, test = flat.pop("dataset_config", None), flat.pop("dataset_test_split", None)
    evaluates = not is_off(flat.get("eval_strategy", flat.get("evaluation_strategy")))
    if name is not None:
        flat["data"] = _hub(name, configuration, split)
        if evaluates and (test is not None or not _is_path(name)):
            flat["eval_data"] = _hub(name, configuration, test or "test")
    if evaluates and not {SAME.get(key, key) for key in flat} & {"eval_data", "validation", "val_set_size"}:
        result.missing.append("eval_strategy: there is no data to evaluate on; give eval_data, or validation: 0.05")
        for key in ("eval_strategy", "evaluation_strategy", "eval_steps"):
            flat.pop(key, None)
    if flat.get("bnb_4bit_quant_type") == "nf4":
        result.left_out.append(f"bnb_4bit_quant_type: {flat.pop('bnb_4bit_quant_type')} is the format of 4 bits")
    flat = _with_defaults(flat, DPO if is_dpo else TRL)
    if is_dpo:
        loss = flat.pop("loss_type", None)
        _preference(flat, flat.pop("beta", None), loss[0] if isinstance(loss, list) and len(loss) == 1 else loss)
        for name in ("max_prompt_length", "max_completion_length"):
            if flat.pop(name, None) is not None:
                result.missing.append(f"{name}: an example has one limit, seq")
    return flat


def _hub(name: str, configuration: Any, split: Any) -> str:
    """Return a dataset of the hub as owner/name:configuration:split, and a path unchanged."""
    if _is_path(name):
        return name
    if configuration is not None:
        return f"{name}:{configuration}:{split or 'train'}"
    return name if split in (None, "train") else f"{name}:{split}"


def _is_path(name: str) -> bool:
    return Path(name).exists() or "/" not in name or name.endswith((".json", ".jsonl", ".parquet", ".txt"))


def _llamafactory(values: Values, translated: Translation) -> Values:
    flat = {normal(name): value for name, value in values.items()}
    stage, kind, template = flat.pop("stage", "sft"), flat.pop("finetuning_type", "lora"), flat.pop("template", None)
    adapters = {name: flat.pop(name) for name in list(flat) if name.startswith("lora_")}
    if kind == "lora":
        rank, targets = adapters.pop("lora_rank", 8), adapters.pop("lora_target", "all")
        flat |= {"lora_r": rank, "lora_alpha": adapters.pop("lora_alpha", 2 * rank)} | adapters
        flat["lora_target_modules"] = "all-linear" if targets == "all" else [one.strip() for one in targets.split(",")]
    elif kind == "full":
        translated.left_out += [f"{name}: finetuning_type is full" for name in adapters]
    else:
        translated.missing.append(f"finetuning_type: {shown(kind)}")
    if template in TEMPLATES:
        flat["chat_template"] = TEMPLATES[template]
    elif template not in (None, "default", "empty"):
        translated.missing.append(f"template: {shown(template)}; the tokenizer's is taken, or give a file as chat_template")
    for name, key in (("dataset", "data"), ("eval_dataset", "eval_data")):
        if isinstance(names := flat.pop(name, None), str):
            flat[key] = [each.strip() for each in names.split(",")]
            if unknown := [each for each in flat[key] if not Path(each).exists()]:
                translated.missing.append(f"{name}: {', '.join(unknown)}: names of dataset_info.json; give their files")
    flat.pop("dataset_dir", None), flat.pop("plot_loss", None)
    bits = flat.pop("quantization_bit", None)
    flat |= {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8, "val_set_size": flat.pop("val_size", 0)}
    flat["packing"] = flat.pop("neat_packing", False) or flat.pop("packing", stage == "pt")
    if flat.pop("mask_history", False):
        flat["train_on"] = "last"
    if "train_on_prompt" in flat:
        flat["train_on_inputs"] = flat.pop("train_on_prompt")
    beta, loss = flat.pop("pref_beta", None), flat.pop("pref_loss", "sigmoid")
    flat = _with_defaults(flat, LLAMAFACTORY)
    if stage in ("dpo", "kto"):
        _preference(flat, beta, "kto" if stage == "kto" else None if loss == "sigmoid" else loss)
    elif stage not in ("sft", "pt"):
        translated.missing.append(f"stage: {shown(stage)}")
    return flat


def _axolotl(values: Values, result: Translation) -> Values:
    flat = {normal(name): value for name, value in values.items()}
    _datasets(flat, "datasets", "data", result)
    _datasets(flat, "test_datasets", "eval_data", result)
    if "optimizer" in flat:
        flat["optim"] = flat.pop("optimizer")
    template = flat.pop("chat_template", None)
    if template in TEMPLATES:
        flat["chat_template"] = TEMPLATES[template]
    elif template not in (None, "tokenizer_default"):
        result.missing.append(f"chat_template: {shown(template)}; give a file, or leave the tokenizer's")
    if flat.pop("wandb_project", None):
        flat["report_to"] = "wandb"
    adapter = flat.get("adapter")
    if is_off(adapter):
        for name in [name for name in flat if name.startswith("lora_")]:
            result.left_out.append(f"{name}: adapter is off")
            del flat[name]
    for name in ("wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "model_type", "tokenizer_type", "strict"):
        if flat.pop(name, None) is not None:
            result.left_out.append(f"{name}: the model's folder says it, or nothing needs it")
    if (tokens := flat.get("special_tokens")) and set(tokens) == {"pad_token"}:
        result.left_out.append("special_tokens: rows are padded without a special token")
        del flat["special_tokens"]
    preference, beta = flat.pop("rl", None), flat.pop("rl_beta", flat.pop("dpo_beta", None))
    if str(flat.get("bf16")).lower() == "auto":
        flat["dtype"] = flat.pop("bf16")
        flat.pop("fp16", None), flat.pop("tf32", None)
    flat = _with_defaults(flat, AXOLOTL)
    if preference in ("dpo", "ipo", "kto"):
        _preference(flat, beta, {"dpo": None}.get(preference, preference))
    elif not is_off(preference):
        result.missing.append(f"rl: {shown(preference)}")
    return flat


def _datasets(flat: Values, name: str, key: str, result: Translation) -> None:
    """Read axolotl's list of datasets: their paths, and the format of their rows."""
    entries, paths, formats = flat.pop(name, None), list[str](), set[str]()
    for entry in entries if isinstance(entries, list) else [entries] if entries else ():
        if not isinstance(entry, str | Mapping):
            result.missing.append(f"{name}: {shown(entry)}, which is no path, and no mapping with one")
            continue
        entry = {"path": entry} if isinstance(entry, str) else dict(entry)
        path, files, kind = entry.pop("path", None), entry.pop("data_files", None), entry.pop("type", None)
        split, configuration = entry.pop("split", None), entry.pop("name", None)
        columns = entry.pop("field_messages", None)
        entry.pop("ds_type", None)
        paths += [files] if isinstance(files, str) else files or [_hub(str(path), configuration, split)]
        if isinstance(kind, str) and (format := COLUMNS.get(columns) or TYPES.get(kind.partition(":")[0].split(".load")[0])):
            formats.add(format)
        elif kind is not None:
            result.missing.append(f"{name}: type: {shown(kind)}; rows need the keys of a format that docs/training.md lists")
        for option, value in entry.items():
            here = AS_HERE.get(option)
            if value == here or (isinstance(here, dict) and isinstance(value, dict) and value.items() <= here.items()):
                result.left_out.append(f"{name}: {option}: it is so here")
            elif not is_off(value):
                result.missing.append(f"{name}: {option}: {shown(value)}")
    if paths:
        flat[key] = paths
    if len(formats) == 1 and key == "data":
        flat["format"] = formats.pop()
    elif len(formats) > 1:
        result.missing.append(f"{name}: types of several formats; each file's is detected")


def _torchtune(values: Values, result: Translation) -> Values:
    flat: Values = _filled(values, values)
    model, tokenizer, optimizer, schedule, data, files, logger = (
        flat.pop(name, None) or {}
        for name in ("model", "tokenizer", "optimizer", "lr_scheduler", "dataset", "checkpointer", "metric_logger")
    )
    flat["model"] = files.get("checkpoint_dir")
    component = str(model.pop("_component_", ""))
    if "lora" in component:
        flat |= {"lora_r": model.get("lora_rank"), "lora_alpha": model.get("lora_alpha")}
        flat |= {"lora_dropout": model.get("lora_dropout"), "lora_target_modules": _targets(model)}
        flat["load_in_4bit"] = "qlora" in component
    flat["seq"] = tokenizer.get("max_seq_len")
    flat |= {"learning_rate": optimizer.get("lr"), "weight_decay": optimizer.get("weight_decay", 0.01)}
    flat |= {"betas": optimizer.get("betas"), "eps": optimizer.get("eps")}
    kind = str(optimizer.get("_component_", "")).rpartition(".")[2].lower()
    flat["optim"] = {"adamw8bit": "adamw_8bit", "pagedadamw8bit": "adamw_8bit"}.get(kind, kind)
    shape = re.search(r"cosine|linear|constant", str(schedule.get("_component_", "")))
    flat["lr_scheduler_type"] = shape[0] if shape and shape[0] in SCHEDULES else "constant"
    flat["warmup_steps"] = schedule.get("num_warmup_steps", 0)
    _torchtune_data(data, flat, result)
    if not is_off(per_epoch := flat.pop("max_steps_per_epoch", None)):
        result.missing.append(f"max_steps_per_epoch: {per_epoch}; give steps")
    flat["max_grad_norm"] = flat.pop("clip_grad_norm", None) or 0
    name = str(logger.get("_component_", "")).lower()
    flat["report_to"] = next((known for known in ("wandb", "tensorboard") if known in name), None)
    for name in ("loss", "profiler", "device", "optimizer_in_bwd", "enable_activation_offloading", "resume_from_checkpoint"):
        if flat.get(name) in (None, "cuda") or isinstance(flat.get(name), Mapping) or is_off(flat.get(name)):
            flat.pop(name, None)
    return _with_defaults(flat, TORCHTUNE)


def _targets(model: Values) -> Any:
    """Return torchtune's adapted layers under their names in transformers."""
    names = {"output_proj": "o_proj"}
    layers = [names.get(name, name) for name in model.get("lora_attn_modules", ())]
    return layers + (["gate_proj", "up_proj", "down_proj"] if model.get("apply_lora_to_mlp") else []) or None


def _torchtune_data(data: Values, flat: Values, result: Translation) -> None:
    component = str(data.pop("_component_", "")).rpartition(".")[2]
    source, format = TORCHTUNE_DATA.get(component, (None, None))
    source, files, split = data.pop("source", None) or source, data.pop("data_files", None), data.pop("split", None)
    flat["packing"] = data.pop("packed", False)
    if (all_of_it := data.pop("train_on_input", None)) is not None:
        flat["train_on_inputs"] = all_of_it
    if data.pop("conversation_style", None) == "sharegpt":
        format = "sharegpt"
    if files is not None or source is not None:
        flat["data"] = files if source in (None, "json", "text", "parquet") else _hub(source, None, split)
    else:
        result.missing.append(f"dataset: {component or 'none'}; give data")
    flat["format"] = format
    result.missing += [f"dataset: {name}: {shown(value)}" for name, value in data.items() if not is_off(value)]


def _filled(value: Any, values: Values) -> Any:
    """Return a value with ${name} replaced by the value of that name."""
    if isinstance(value, Mapping):
        return {name: _filled(own, values) for name, own in value.items()}
    if isinstance(value, list):
        return [_filled(own, values) for own in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), value)
    return value


FLATTEN: dict[str, Callable[[Values, Translation], Values]] = {
    "trl": _trl, "axolotl": _axolotl, "llamafactory": _llamafactory, "torchtune": _torchtune,
}  # fmt: skip
