"""Read config files and key=value texts into the fields of a Recipe."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, get_args

import yaml

from ..formatting import hint, shown
from ..train.recipe import Recipe, check_type

RECIPE = {field.name: field for field in fields(Recipe)}
OTHER_NAMES = {
    "lr": ("learning_rate",),
    "micro_batch": ("batch_size", "micro_batch_size", "per_device_train_batch_size", "device_batch_size"),
    "accumulate": ("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
    "seq": (
        "max_seq_length", "max_seq_len", "max_length", "seq_len", "sequence_len", "block_size", "cutoff_len", "context_length",
    ),
    "steps": ("max_steps", "num_steps", "train_steps", "epochs", "num_epochs", "num_train_epochs"),
    "clip": ("max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad_norm"),
    "recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "out": ("output_dir", "out_dir", "save_dir"),
    "model": ("base_model", "model_name", "model_name_or_path", "model_id"),
    "data": ("dataset", "datasets", "dataset_name", "train_data", "train_file", "data_path"),
    "schedule": ("lr_scheduler", "lr_scheduler_type", "lr_schedule"),
    "warmup": ("warmup_steps", "warmup_ratio", "warmup_iters", "num_warmup_steps"),
    "decay": ("decay_ratio", "decay_steps"),
    "final": ("min_lr_ratio", "min_lr"),
    "validation": ("val_set_size", "eval_fraction", "validation_split", "test_size"),
    "eval_every": ("eval_steps", "eval_interval", "evaluate_every"),
    "save_every": ("save_steps", "save_interval", "checkpoint_interval"),
    "keep": ("save_total_limit",),
    "patience": ("early_stopping_patience",),
    "precision": ("bf16", "fp16", "tf32", "dtype", "mixed_precision", "amp"),
    "optimizer": ("optim",),
    "vocabulary": ("vocab_size",),
    "parallel": ("fsdp", "ddp", "strategy"),
    "graph": ("compile", "torch_compile"),
    "seed": ("random_seed",),
    "resume": ("resume_from_checkpoint",),
    "log": ("report_to", "logger"),
}  # fmt: skip
"""Names of these keys in other trainers."""
KEY_OF = {name: key for key, names in OTHER_NAMES.items() for name in names}

MAX_BYTES = 1 << 20  # of a config file
MAX_DEPTH, MAX_VALUES = 32, 100_000  # levels, and values with every alias expanded


class StrictLoader(yaml.SafeLoader):
    """Load YAML, and refuse values that PyYAML silently reads differently: the last of two equal keys, 1:30 as 90, 010 as 8."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines = dict[tuple[str, str], int]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and (first := lines.setdefault((key.tag, key.value), line)) != line:
                raise ValueError(f"{shown(key.value)} is there twice, in lines {first} and {line}; leave one of them out")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        integer = node.tag == "tag:yaml.org,2002:int"
        value = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if ":" in digits or (integer and digits.isdecimal() and int(digits) != abs(value)):
            base = "sixties" if ":" in digits else "eights"
            raise ValueError(
                f"{shown(node.value)} in line {node.start_mark.line + 1} is {value} in YAML, counted in {base}; write the "
                f"number in tens, or a text in quotes"
            )
        return value


for _tag in ("int", "float"):
    StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", StrictLoader.construct_number)


def load_yaml(text: str) -> Any:
    """Return the value that `text` holds. ValueError if it contains itself, is too deep, or grows too large by its aliases."""
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}, 0) > MAX_VALUES:
            raise ValueError(f"with every alias (*name) expanded it holds more than {MAX_VALUES:,} values; leave aliases out")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int | None], depth: int) -> int:
    """Return the number of values in `node`, with every alias expanded."""
    if id(node) in sizes:
        if (size := sizes[id(node)]) is None:
            raise ValueError(f"line {node.start_mark.line + 1} holds a value that contains itself; write it without the alias")
        return size
    if depth > MAX_DEPTH:
        raise ValueError(f"line {node.start_mark.line + 1} is nested more than {MAX_DEPTH} deep; write fewer levels")
    sizes[id(node)], size = None, 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, sizes, depth + 1) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(item, sizes, depth + 1) for pair in node.value for item in pair)
    sizes[id(node)] = size
    return size


def convert(values: Mapping[Any, Any], known: Mapping[str, Field], where: str = "config") -> dict[str, Any]:
    """Return `values` with the types of the `known` fields. Unknown keys are refused here, wrong types by the recipe."""
    for key, value in values.items():
        if key not in known:
            other = KEY_OF.get(str(key).lower().replace("-", "_"))
            advice = f"it is {other!r} here." if other in known else hint(key, known, "the keys are")
            raise ValueError(f"{where}: {shown(key)} is unknown; {advice}")
        if key not in RECIPE:
            check_type(known[key], value)
    return {key: _convert_value(known[key], value) for key, value in values.items()}


def _convert_value(field: Field, value: Any) -> Any:
    """Return a value of YAML's with the type of the field: YAML reads 3e-4 as a text."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        from ..train.recipe import Lora

        if not value:
            Lora.of(value)  # refuses it: an empty section would train every weight
        return _convert_known({f.name: f for f in fields(Lora)}, value)
    if field.name == "data":
        return tuple(value) if isinstance(value, list) else (value,)
    if field.name == "phases" and isinstance(value, list):
        known = {name: field for name, field in RECIPE.items() if name != "phases"}
        return tuple(_convert_known(known, phase) if isinstance(phase, dict) else phase for phase in value)
    if wanted is float and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # the recipe's error names the field
            return float(value)
    return str(value) if wanted is str and type(value) is int else value


def _convert_known(known: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of known keys; the recipe refuses the others."""
    return {key: _convert_value(known[key], value) if key in known else value for key, value in values.items()}
