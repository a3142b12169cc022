"""Adapters in PEFT's files, both ways: adapter_config.json, and adapter_model.safetensors with a and b by their layers' names.

What is written loads with `PeftModel.from_pretrained` on the same model, to the same logits; what PEFT wrote loads here, if it
is plain LoRA or DoRA. Everything is checked before the model is changed.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor, nn

from ..errors import DataError
from ..files import check_replaceable, make_folder, read_json, reading, regular, replacing, write_whole
from ..layers.linear_formats import shape_of
from ..trace import fallback
from .add import AdapterOptions, attach
from .dora import DoraPair
from .experts import ExpertStack
from .pair import Pair
from .pairs import adapted_layers, check_module, check_not_merged, check_values, pairs
from .targets import DORA, KINDS, by, check_pattern, layers_of, unfit

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
UNUSUAL = (  # options of PEFT's that are off in what is read here
    "lora_bias", "use_qalora", "use_bdlora", "fan_in_fan_out", "modules_to_save", "trainable_token_indices",
    "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config",
    "layer_replication",
)  # fmt: skip
OTHER_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # ways to begin that change the base, which PEFT does again as it loads
USUAL = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # PEFT's own defaults
PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}  # what has other values for some layers


def save(model: nn.Module, path: str | Path, name: str = "default", overwrite: bool = False) -> None:
    """Write the adapters called `name` into the folder `path`, as PEFT's save_pretrained does. An adapter that is there is
    replaced only with `overwrite`."""
    there = pairs(model, name, "lora.save")
    check_values({key: own.a for key, _, own in there}, "lora.save")
    found, layers = {key: own for key, _, own in there}, {key: adapters.layer for key, adapters, _ in there}
    config = _config(model, found, layers)  # what it refuses leaves files that are there as they were
    folder = Path(path)
    check_replaceable(folder, "lora.save", (WEIGHTS, CONFIG), overwrite=overwrite)
    make_folder(folder)
    tensors = {}
    for key, adapters, own in there:
        if why := adapters.unlike_peft():
            fallback("lora.save: the same in PEFT", f"{key} {why}")
        for half in own.HALVES:
            tensors[f"{PREFIX}{adapters.filed_under(key, layers)}.{half}"] = own.filed(half).cpu().contiguous()
    with replacing(folder / WEIGHTS) as file:
        file.write(bytes_of(tensors, {"format": "pt"}))
    write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _config(model: nn.Module, found: dict[str, Pair], layers: dict[str, Any]) -> dict[str, Any]:
    stacks = [key for key, layer in layers.items() if isinstance(layer, ExpertStack)]
    modules = [key for key in found if key not in stacks]
    first = next(iter(found.values()))
    for key, own in found.items():
        if (own.rslora, own.dropout.p, type(own) is DoraPair) != (first.rslora, first.dropout.p, type(first) is DoraPair):
            raise ValueError(
                f"lora.save: {key} differs from {next(iter(found))} in rslora, dora or dropout, for which PEFT's files have "
                f"one value; give them different names, and save each."
            )
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(model, "name_or_path", None) or None,
        "task_type": "CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else getattr(model, "task_type", None),
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout.p,
        "use_rslora": first.rslora,
        "use_dora": type(first) is DoraPair,
        "target_modules": _ends(modules, [key for key, _ in model.named_modules()]),
        "target_parameters": _ends(stacks, list(layers_of(model, (ExpertStack,)))) or None,
        "rank_pattern": {f"^{re.escape(key)}": own.rank for key, own in found.items() if own.rank != first.rank},
        "alpha_pattern": {f"^{re.escape(key)}": own.alpha for key, own in found.items() if own.alpha != first.alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _ends(found: list[str], named: list[str]) -> list[str]:
    """The ends of the names in `found`, where they choose these of all and no others; else the whole names."""
    ends = {key.rpartition(".")[2] for key in found}
    chosen = {key for key in named if key.rpartition(".")[2] in ends}
    return sorted(ends) if chosen == set(found) else sorted(found)


@torch.inference_mode(False)
@torch.no_grad()
def load(model: nn.Module, path: str | Path, name: str = "default") -> list[str]:
    """The adapters in the folder `path` onto `model`, under `name`; returns their layers' names.

    They are added, and the model is frozen, as by `add`. Where an adapter `name` lies on these layers already, it gets the
    values.
    """
    check_module(model, "lora.load")
    folder = Path(path)
    config, tensors = _read(folder)
    layers = {key: layer for key, layer in layers_of(model).items() if not unfit(model, layer) and _in_file(config, key, layer)}
    paths = {key: f"{PREFIX}{KINDS[type(layer)].filed_under(key, layers)}" for key, layer in layers.items()}
    known = {f"{paths[key]}.{half}": (key, half) for key, layer in layers.items() for half in _pair(config, layer).HALVES}
    halves: dict[str, dict[str, Tensor]] = {}
    for word, tensor in sorted(tensors.items()):
        if _is_base(folder, word, tensor, layers):
            continue
        if word not in known:
            raise DataError(f"{folder / WEIGHTS}: {word} {_unknown(model, config, word)}.")
        if not tensor.is_floating_point():
            raise DataError(f"{folder / WEIGHTS}: {word} has {tensor.dtype} values, wanted floating-point; save it again.")
        key, half = known[word]
        halves.setdefault(key, {})[half] = tensor
    options = {key: _options(folder, config, key, layers[key], own) for key, own in halves.items()}
    check_values({key: layers[key].weight for key in options}, "lora.load")
    _tell_of_missing(folder, config, [key for key, layer in layers.items() if key not in halves and type(layer) is nn.Linear])
    there = {key: (adapters[name].rank, type(adapters[name])) for key, adapters in adapted_layers(model) if name in adapters}
    if there:
        check_not_merged(pairs(model, name, "lora.load"), "lora.load")
    if not there:
        attach(model, options, name, "lora.load")
    elif there != {key: (own.rank, own.pair) for key, own in options.items()}:
        raise DataError(
            f"{folder / WEIGHTS}: holds adapters of other layers or ranks than the model's {name!r}; load it under another "
            f"name."
        )
    for key, adapters, own in pairs(model, name, "lora.load"):
        for half in own.HALVES:
            own.take(half, halves[key][half])
        own.alpha, own.dropout.p, own.rslora = options[key][2:5]
        adapters.hang()
    return list(halves)


def _unknown(model: nn.Module, config: dict[str, Any], word: str) -> str:
    """What is wrong with a tensor's name, and what to do."""
    named = {f"{PREFIX}{key}.": (key, layer) for key, layer in model.named_modules() if key}
    path = max((path for path in named if word.startswith(path)), key=len, default="")
    if path and word.removeprefix(path).startswith(("lora_", "base_layer.")):
        key, layer = named[path]
        if type(layer) in KINDS and config.get("use_dora") and type(layer) not in DORA:
            return f"is DoRA of an nn.{type(layer).__name__}, which is read of nn.Linear alone; load it with PEFT"
        if why := unfit(model, layer):
            return f"is of {key}, which {why}; load it with PEFT"
    return f"is no half of a low-rank adapter of a layer of {type(model).__name__}; load it on the model that it was trained on"


def _tell_of_missing(folder: Path, config: dict[str, Any], without: list[str]) -> None:
    """A model with more layers than the adapter's own takes it without a complaint otherwise."""
    ends = config.get("target_modules")
    chosen_by_more = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    if not isinstance(ends, list) or chosen_by_more:
        return
    if missing := [key for key in without if any(key == end or key.endswith(f".{end}") for end in ends)]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        fallback(
            "lora.load: an adapter for every layer that the file's config names",
            f"{folder / WEIGHTS} has none for {missing[0]}{more}; load it on the model that it was trained on",
        )


def _pair(config: dict[str, Any], layer: Any) -> type[Pair]:
    return DORA[type(layer)] if config.get("use_dora") else KINDS[type(layer)].PAIR


def _in_file(config: dict[str, Any], key: str, layer: Any) -> bool:
    """Parameters are adapted where the config names them. What modules are shows in the tensors' names."""
    if config.get("use_dora") and type(layer) not in DORA:
        return False
    named = config.get("target_parameters") or ()
    return not isinstance(layer, ExpertStack) or any(key == name or key.endswith(f".{name}") for name in named)


def _is_base(folder: Path, word: str, tensor: Tensor, layers: dict[str, Any]) -> bool:
    """Whether this is the weight of an adapted layer itself: PEFT keeps those of embeddings and heads beside their adapters."""
    key = word.removeprefix(PREFIX).removesuffix(".base_layer.weight")
    if not word.endswith(".base_layer.weight") or key not in layers:
        return False
    adapters = KINDS[type(layers[key])].of(layers[key])
    weight = layers[key].weight if adapters is None or adapters.unmerged is None else adapters.unmerged
    if tensor.shape != weight.shape or not torch.equal(tensor.to(weight), weight):
        raise DataError(
            f"{folder / WEIGHTS}: holds a weight of {key} that is not the model's; load it on the model that it was trained on."
        )
    return True


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = read_json(folder / CONFIG, "save the adapter again")
    wanted = {"peft_type": "LORA", "bias": "none", **dict.fromkeys(UNUSUAL)}
    for option, usual in wanted.items():
        if (config.get(option, usual) or None) != usual:
            raise DataError(
                f"{folder / CONFIG}: {option} is {config[option]!r}, and only plain LoRA and DoRA are read here; load it with "
                f"PEFT."
            )
    begun = str(config.get("init_lora_weights"))
    if begun.lower().startswith(OTHER_BASE):
        raise DataError(
            f"{folder / CONFIG}: init_lora_weights is {begun!r}, which changed the base's weights, too; let PEFT convert the "
            f"adapter as it saves it: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    _check_numbers(folder / CONFIG, config)
    file = folder / WEIGHTS
    if not file.exists() and (pickled := folder / PICKLED).exists():
        raise DataError(
            f"{pickled}: is a pickle, which may run code as it is read, and is not read here; load it with PEFT, and save it "
            f"by save_pretrained, whose files are {WEIGHTS}."
        )
    try:
        with reading(file):
            return config, tensors_of(regular(file).read_bytes())
    except SafetensorError as error:
        raise DataError(f"{file}: is not in safetensors' format: {error}; save the adapter again.") from error


def _check_numbers(file: Path, config: dict[str, Any]) -> None:
    given = [(option, "", config.get(option, usual)) for option, usual in USUAL.items()]
    for pattern in PATTERNS:
        table = config.get(pattern) or {}
        given += [(pattern, *one) for one in (table.items() if isinstance(table, dict) else [("", str(table))])]
    for option, expression, value in given:
        check_pattern(expression, f"{file}: {option} has {expression!r}", "save the adapter again", DataError)
        rank = PATTERNS.get(option, option) == "r"
        if isinstance(value, bool) or not isinstance(value, int if rank else (int, float)) or (rank and value < 1):
            wanted = "a rank" if rank else "a number"
            raise DataError(f"{file}: {option} has {value!r}, wanted {wanted}; save the adapter again.")


def _options(folder: Path, config: dict[str, Any], key: str, layer: Any, own: dict[str, Tensor]) -> AdapterOptions:
    rank = _of(config, "rank_pattern", key, config.get("r", USUAL["r"]))
    kind = _pair(config, layer)
    example = kind(torch.empty(shape_of(layer.weight), device="meta", dtype=torch.float32), rank, 1.0, 0.0, False)
    got = [tuple(own[half].shape) if half in own else None for half in kind.HALVES]
    wanted = [tuple(example.filed(half).shape) for half in kind.HALVES]
    if got != wanted:
        halves = " and ".join(f"{letter} {shape}" for letter, shape in zip(("A", "B", "magnitudes"), got))
        raise DataError(
            f"{folder / WEIGHTS}: the adapter of {key} has {halves}, wanted {' and '.join(map(str, wanted))} for a "
            f"weight of {by(shape_of(layer.weight))}; load it on the model that it was trained on."
        )
    alpha = _of(config, "alpha_pattern", key, config.get("lora_alpha", USUAL["lora_alpha"]))
    drops, rslora, dora = config.get("lora_dropout", 0.0), bool(config.get("use_rslora")), bool(config.get("use_dora"))
    return AdapterOptions(layer, rank, alpha, drops, rslora, dora)


def _of(config: dict[str, Any], pattern: str, key: str, otherwise: Any) -> Any:
    """As PEFT reads its patterns: the end of a name, or a regular expression of it."""
    for expression, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({expression})$", key):
            return value
    return otherwise
