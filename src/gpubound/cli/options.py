"""What YAML read, or a key=value says, as the fields of a recipe want it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any, get_args

import yaml

from ..formatting import hint, shown
from ..train.recipe import Recipe, check_type

RECIPE = {field.name: field for field in fields(Recipe)}
OTHERS = {
    "lr": ("learning_rate",),
    "micro_batch": ("batch_size", "micro_batch_size", "per_device_train_batch_size", "device_batch_size"),
    "accumulate": ("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
    "seq": (
        "max_seq_length",
        "max_seq_len",
        "max_length",
        "seq_len",
        "sequence_len",
        "block_size",
        "cutoff_len",
        "context_length",
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
    "evaluate_every": ("eval_steps", "eval_interval", "eval_every"),
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
}
"""What other trainers call these keys."""
HERE = {name: key for key, names in OTHERS.items() for name in names}

LARGEST = 1 << 20  # bytes of a config file
DEEPEST, MOST = 32, 100_000  # levels, and values with every alias written out


class AsWritten(yaml.SafeLoader):
    """Reads YAML and refuses what PyYAML would take otherwise than it looks, in silence: of a key that stands twice in one
    place the last, 1:30 for 90, 010 for 8."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines = dict[tuple[str, str], int]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and (first := lines.setdefault((key.tag, key.value), line)) != line:
                raise ValueError(f"{shown(key.value)} stands twice, in lines {first} and {line}; leave one of them out")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        whole = node.tag == "tag:yaml.org,2002:int"
        found = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        digits = node.value.replace("_", "").lstrip("+-")
        if ":" in digits or (whole and digits.isdecimal() and int(digits) != abs(found)):
            count = "sixties" if ":" in digits else "eights"
            raise ValueError(
                f"{shown(node.value)} in line {node.start_mark.line + 1} is {found} in YAML, counted in {count}; write the "
                f"number in tens, or a text in quotes"
            )
        return found


for _kind in ("int", "float"):
    AsWritten.add_constructor(f"tag:yaml.org,2002:{_kind}", AsWritten.construct_number)


def load_yaml(text: str) -> Any:
    """Return the value that `text` holds. ValueError if it contains itself, is too deep, or grows too large by its aliases."""
    loader = AsWritten(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}, 0) > MOST:
            raise ValueError(f"with every alias (*name) written out it holds more than {MOST:,} values; write it without them")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int | None], depth: int) -> int:
    """Return the number of values in `node`, those of an alias as often as it stands there."""
    if id(node) in known:
        if (size := known[id(node)]) is None:
            raise ValueError(f"line {node.start_mark.line + 1} holds a value that contains itself; write it without the alias")
        return size
    if depth > DEEPEST:
        raise ValueError(f"line {node.start_mark.line + 1} is nested more than {DEEPEST} deep; write fewer levels")
    known[id(node)], size = None, 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, known, depth + 1) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_size(item, known, depth + 1) for pair in node.value for item in pair)
    known[id(node)] = size
    return size


def typed(found: Mapping[Any, Any], known: Mapping[str, Field], where: str = "config") -> dict[str, Any]:
    """`found`, its values as the `known` fields want them. Unknown keys are refused; values of another kind, by the recipe."""
    for key, value in found.items():
        if key not in known:
            here = HERE.get(str(key).lower().replace("-", "_"))
            said = f"it is {here!r} here." if here in known else hint(key, known, "the keys are")
            raise ValueError(f"{where}: {shown(key)} is unknown; {said}")
        if key not in RECIPE:
            check_type(known[key], value)
    return {key: _as(known[key], value) for key, value in found.items()}


def _phase(phase: Any) -> Any:
    """A phase's own values; which of them a phase may have is the recipe's to say."""
    if not isinstance(phase, dict):
        return phase
    known = {name: field for name, field in RECIPE.items() if name != "phases"}
    return {key: _as(known[key], value) if key in known else value for key, value in phase.items()}


def _as(field: Field, value: Any) -> Any:
    """What YAML read, as the field wants it: it reads 3e-4 as a text, and 12 blocks as a number."""
    wanted = (get_args(field.type) or (field.type,))[0]
    if field.name == "lora" and isinstance(value, dict):
        from ..train.recipe import Lora

        if not value:
            Lora.of(value)  # refuses it: an empty section would train every weight
        known = {f.name: f for f in fields(Lora)}
        return {key: _as(known[key], own) if key in known else own for key, own in value.items()}
    if field.name == "data":
        return tuple(value) if isinstance(value, list) else (value,)
    if field.name == "phases":
        return tuple(map(_phase, value)) if isinstance(value, list) else value
    if wanted is float and isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # the recipe's sentence names the field
            return float(value)
    return str(value) if wanted is str and type(value) is int else value
