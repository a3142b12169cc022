"""Values of other trainers' keys, read as those of ours: READ has a function for each name whose values are translated.

It takes the value and all other values of the config, and returns what it is here: {} for nothing, "lora.rank" for a key of a
section.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..formatting import shown

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
