"""Adapters in PEFT's files, both ways: adapter_config.json, and adapter_model.safetensors.

PEFT names the tensors and puts them into the model. Reading is ours: sizes are bounded, pickles are never opened, patterns
cannot run for minutes, and a file that does not fit leaves the model as it was.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor, nn

from ..errors import DataError
from ..files import check_replaceable, make_folder, read_json, reading, regular, replacing, write_atomic
from ..trace import fallback
from .base import check_no_step
from .layers import base_of, parameters_of
from .model import (
    adapter_names,
    check_module,
    check_not_merged,
    check_values,
    config_class,
    inject,
    layers_with,
    take_out,
)
from .targets import check_pattern

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base's weights
UNUSUAL = (  # options of PEFT's that change more than single layers, or need more than the input
    "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config",
    "layer_replication",
)  # fmt: skip
SAME = (
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices",
)  # fmt: skip
PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}  # other values for some layers
LARGEST_RANK = 1 << 16


def save(model: nn.Module, path: str | Path, name: str = "default", overwrite: bool = False) -> None:
    """Write the adapters called `name` into the folder `path`, as PEFT's save_pretrained does."""
    layers = layers_with(model, name, "lora.save")
    check_values({key: p for key, layer, _ in layers for p in parameters_of(layer, name)}, "lora.save")
    from peft import get_peft_model_state_dict

    model = base_of(model)
    config = {
        **model.peft_config[name].to_dict(),  # type: ignore[operator, union-attr, index]
        "base_model_name_or_path": getattr(model, "name_or_path", None) or None,
        "task_type": "CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else getattr(model, "task_type", None),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {f"{PREFIX}{key}": t.detach().cpu().contiguous() for key, t in state.items()}
    folder = Path(path)
    check_replaceable(folder, "lora.save", (WEIGHTS, CONFIG), overwrite=overwrite)
    make_folder(folder)
    with replacing(folder / WEIGHTS) as file:
        file.write(bytes_of(tensors, {"format": "pt"}))
    write_atomic(folder / CONFIG, json.dumps(config, indent=2, default=sorted) + "\n")


@torch.inference_mode(False)
@torch.no_grad()
def load(model: nn.Module, path: str | Path, name: str = "default") -> list[str]:
    """Add the adapters in the folder `path` to `model` under `name`. Return the layers' names.

    The model is frozen, as by `add`. Where it has an adapter `name` on these layers already, that gets the values.
    """
    check_module(model, "lora.load")
    folder = Path(path)
    config, tensors = _read(folder)
    check_values(dict(model.named_parameters()), "lora.load")
    known = name in adapter_names(model)
    if known:
        check_not_merged(layers_with(model, name, "lora.load"), "lora.load")
        present = base_of(model).peft_config[name]  # type: ignore[operator, union-attr, index]
        if other := [option for option in SAME if getattr(present, option) != getattr(config, option)]:
            raise DataError(
                f"{folder / CONFIG}: {other[0]} is {getattr(config, other[0])!r}, and the model's {name!r} has "
                f"{getattr(present, other[0])!r}; load it under another name."
            )
        _put(model, folder, tensors, name)
    else:
        check_no_step(model, "lora.load")
        trained = [(p, p.requires_grad) for p in model.parameters()]
        try:
            inject(model, config, name, "lora.load")
            _put(model, folder, tensors, name)
        except BaseException as error:
            take_out(model, [name])
            for p, requires_grad in trained:
                p.requires_grad_(requires_grad)
            if isinstance(error, ValueError) and not isinstance(error, DataError):
                raise DataError(f"{folder / CONFIG}: {error} Load it on the model that it was trained on.") from error
            raise
    return [key for key, _, _ in layers_with(model, name, "lora.load")]


def _put(model: nn.Module, folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    """Copy the tensors of a file into the adapter `name`, if all of them fit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, file, do = base_of(model), folder / WEIGHTS, "load it on the model that it was trained on"
    wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    values: dict[str, Tensor] = {}
    for word, tensor in tensors.items():
        key = word.removeprefix(PREFIX)
        if not tensor.is_floating_point():
            raise DataError(f"{file}: {word} has {tensor.dtype} values, wanted floating-point; save it again.")
        if key.endswith(".base_layer.weight"):  # PEFT stores those of adapted embeddings, too
            _check_base(model, file, key, tensor)
            continue
        if key not in wanted:
            raise DataError(f"{file}: {word} is no part of an adapter of a layer of {type(model).__name__}; {do}.")
        if tensor.shape != wanted[key].shape:
            raise DataError(f"{file}: {word} is {tuple(tensor.shape)}, wanted {tuple(wanted[key].shape)}; {do}.")
        values[key] = tensor
    layers = {_layer_of(key) for key in values}
    if part := [key for key in wanted if key not in values and _layer_of(key) in layers]:
        raise DataError(f"{file}: has no {part[0]}, which the config asks for; save the adapter again.")
    if missing := list(dict.fromkeys(layer for key in wanted if (layer := _layer_of(key)) not in layers)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        fallback(
            "lora.load: an adapter for every layer that the file's config names",
            f"{file} has none for {missing[0]}{more}; {do}",
        )
    set_peft_model_state_dict(model, values, adapter_name=name)


def _layer_of(key: str) -> str:
    return key.partition(".lora_")[0]


def _check_base(model: nn.Module, file: Path, key: str, tensor: Tensor) -> None:
    weight = model.state_dict().get(key)
    if weight is None or tensor.shape != weight.shape or not torch.equal(tensor.to(weight), weight):
        raise DataError(f"{file}: {key} is not the model's weight; load it on the model that it was trained on.")


def _read(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    lora_config = config_class("lora.load")
    written = read_json(folder / CONFIG, "save the adapter again")
    if written.get("peft_type") != "LORA":
        raise DataError(f"{folder / CONFIG}: peft_type is {written.get('peft_type')!r}, wanted 'LORA'; load it with PEFT.")
    for option, usual in {"bias": "none", **dict.fromkeys(UNUSUAL)}.items():
        if (written.get(option, usual) or None) != usual:
            raise DataError(f"{folder / CONFIG}: {option} is {written[option]!r}, which is not read here; load it with PEFT.")
    begun = str(written.get("init_lora_weights"))
    if begun.lower().startswith(OTHER_BASE):
        raise DataError(
            f"{folder / CONFIG}: init_lora_weights is {begun!r}, which changed the base's weights, too; let PEFT convert the "
            f"adapter as it saves it: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    _check_values(folder / CONFIG, written)
    known = {field.name for field in fields(lora_config)}
    try:
        config = lora_config(**{key: value for key, value in written.items() if key in known} | {"init_lora_weights": True})
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder / CONFIG}: {error}; save the adapter again.") from error
    file = folder / WEIGHTS
    if not file.exists() and (pickled := folder / PICKLED).exists():
        raise DataError(
            f"{pickled}: is a pickle, which may run code when it is read, and is not read here; load it with PEFT, and save it "
            f"by save_pretrained, whose files are {WEIGHTS}."
        )
    try:
        with reading(file):
            return config, tensors_of(regular(file).read_bytes())
    except SafetensorError as error:
        raise DataError(f"{file}: is not in safetensors' format: {error}; save the adapter again.") from error


def _check_values(file: Path, config: dict[str, Any]) -> None:
    """Check the ranks, the scales and every pattern, before PEFT allocates or matches by them."""
    values: list[tuple[str, Any]] = [
        (option, config.get(option)) for option in ("r", "lora_alpha", "lora_dropout") if option in config
    ]
    for option in PATTERNS:
        table = config.get(option) or {}
        if not isinstance(table, dict):
            raise DataError(f"{file}: {option} has {table!r}, wanted names and values; save the adapter again.")
        for expression in table:
            check_pattern(expression, f"{file}: {option} has {expression!r}", "save the adapter again", DataError)
        values += [(option, value) for value in table.values()]
    for option in ("target_modules", "exclude_modules", "layers_pattern"):
        if isinstance(config.get(option), str):
            check_pattern(config[option], f"{file}: {option} has {config[option]!r}", "save the adapter again", DataError)
    for option, value in values:
        rank = PATTERNS.get(option, option) == "r"
        fits = isinstance(value, int if rank else (int, float)) and not isinstance(value, bool)
        if not fits or (rank and not 1 <= value <= LARGEST_RANK):
            wanted = f"a rank from 1 to {LARGEST_RANK:,}" if rank else "a number"
            raise DataError(f"{file}: {option} has {value!r}, wanted {wanted}; save the adapter again.")
