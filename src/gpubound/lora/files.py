"""Adapters in PEFT's files, both ways, and merged into the weights of a model, from which they are unmerged bit for bit.

PEFT names the tensors and puts them into the model. Reading is ours: sizes are bounded, pickles are never opened, patterns
cannot run for minutes, and a file that does not fit leaves the model as it was.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor, nn

from ..device import without_autocast
from ..errors import DataError
from ..files import check_replaceable, make_folder, read_json, reading, regular, replacing, write_atomic
from ..layers.linear_product import format_of, is_sharded
from ..layers.quantized_base import Base
from ..trace import fallback
from .base import check_no_step, check_pattern
from .layers import TOKENS, active_in, adapted_layers, base_of, parameters_of, tokens_of, wrappers
from .model import (
    adapter_names,
    check_module,
    check_not_merged,
    check_not_routed,
    check_values,
    config_class,
    inject,
    layers_with,
    take_out,
)

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
        _put(model, folder, tensors, name, known)
    else:
        check_no_step(model, "lora.load")
        trained = [(p, p.requires_grad) for p in model.parameters()]
        try:
            inject(model, config, name, "lora.load")
            _put(model, folder, tensors, name, known)
        except BaseException as error:
            take_out(model, [name])
            for p, requires_grad in trained:
                p.requires_grad_(requires_grad)
            if isinstance(error, ValueError) and not isinstance(error, DataError):
                raise DataError(f"{folder / CONFIG}: {error} Load it on the model that it was trained on.") from error
            raise
    return [key for key, _, _ in layers_with(model, name, "lora.load")]


def _put(model: nn.Module, folder: Path, tensors: dict[str, Tensor], name: str, known: bool) -> None:
    """Copy the tensors of a file into the adapter `name`, if all of them fit. A `known` one had values before."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, file, do = base_of(model), folder / WEIGHTS, "load it on the model that it was trained on"
    wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    values: dict[str, Tensor] = {}
    for word, tensor in tensors.items():
        key = word.removeprefix(PREFIX)
        if not tensor.is_floating_point():
            raise DataError(f"{file}: {word} has {tensor.dtype} values, wanted floating-point; save it again.")
        if key.endswith(".base_layer.weight"):  # PEFT stores those of adapted embeddings, too
            weight = model.state_dict().get(key)
            if weight is None or tensor.shape != weight.shape or not torch.equal(tensor.to(weight), weight):
                raise DataError(f"{file}: {key} is not the model's weight; load it on the model that it was trained on.")
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
        if known:
            raise DataError(
                f"{file}: has none for {missing[0]}{more}, whose values in the model's {name!r} would stay; load it under "
                f"another name."
            )
        fallback(
            "lora.load: an adapter for every layer that the file's config names",
            f"{file} has none for {missing[0]}{more}; {do}",
        )
    set_peft_model_state_dict(model, values, adapter_name=name)


def _layer_of(key: str) -> str:
    return key.partition(".lora_")[0]


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


class Unmerged:
    """A layer's weight from before `gb.lora.merge`. In slots: graphs do not check what they contain."""

    __slots__ = ("of", "version", "weight")

    def __init__(self, weight: Tensor):
        self.weight = weight.detach().to("cpu", copy=True)
        self.note(weight)

    def note(self, weight: Tensor) -> None:
        """Remember the version of the merged weight."""
        self.of, self.version = id(weight), weight._version

    def changed(self, weight: Tensor) -> bool:
        """Return whether the merged weight was written since. A copy of a layer has another weight."""
        return self.of == id(weight) and self.version != weight._version


@torch.inference_mode(False)
@torch.no_grad()
def merge(model: nn.Module, name: str | None = None, for_good: bool = False) -> float:
    """Add scale · b a of the adapters that are on, or those of them called `name`, to the weights. They then cost nothing.

    for_good  remove the merged adapters, and keep no copy of the former weights. Copies of whole modules (`modules_to_save`)
              and rows of tokens that trained with them replace the model's own

    Return the largest rounding error of a layer, relative to the sum that was added. In bf16 it is large where an adapter is
    small: one hundredth of a weight keeps one or two bits.
    """
    layers = layers_with(model, name, "lora.merge", some=True)
    check_not_routed(layers, "lora.merge")
    active: list[tuple[str, Any, list[str]]] = []
    for key, layer, names in layers:
        on = [word for word in active_in(layer) if word in names and word not in getattr(layer, "merged_adapters", ())]
        if on and hasattr(layer, "base_layer"):
            active.append((key, layer, on))
    check_values({key: _weight(layer) for key, layer, _ in active}, "lora.merge")
    for key, layer, on in active:
        _check_mergeable(key, layer, on)
    trained = [(key, layer, on) for key, layer, names in layers if (on := _replacing(layer, names))] if for_good else []
    _check_own_weights(model, [*active, *trained])
    with without_autocast(next(model.parameters()).device):  # it would round the products of b and a to 16 bits
        errors = [_merge_layer(layer, on, keep=not for_good) for _, layer, on in active]
    if for_good:
        merged = {word for _, layer in adapted_layers(model) for word in layer.merged_adapters}
        for _, layer in adapted_layers(model):
            vars(layer).pop("unmerged", None)
            layer.merged_adapters.clear()
        for _, wrapper, on in trained:
            _replace(wrapper, on)
        take_out(model, sorted(merged))
    return max((error.item() for error in errors), default=0.0)


def _replacing(layer: Any, names: Sequence[str]) -> list[str]:
    """Return which of these adapters replace a module or rows of it now."""
    return [] if hasattr(layer, "base_layer") else [word for word in active_in(layer) if word in names]


def _check_own_weights(model: nn.Module, layers: Sequence[tuple[str, Any, list[str]]]) -> None:
    """Refuse to write a weight that another module has, too: that one would change as well."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            paths.setdefault(id(p), []).append(f"{path}.{name}")
    for key, layer, _ in layers:
        adapted = hasattr(layer, "base_layer")
        if adapted or tokens_of(layer) is None:  # PEFT lets the rows of tied modules follow each other
            for p in [_weight(layer)] if adapted else layer.original_module.parameters():
                if other := [path for path in paths[id(p)] if not path.startswith(f"{key}.")]:
                    instead = "" if adapted else ", or merge without for_good"
                    raise ValueError(
                        f"lora.merge: the weight of {key} is {other[0]}, too, which would change with it; untie them{instead}."
                    )


def _replace(wrapper: Any, names: Sequence[str]) -> None:
    """Write what the wrapper's forward reads into the module that it wraps."""
    if tokens := tokens_of(wrapper):
        tokens.base_layer.weight.copy_(tokens.get_merged_weights(names))
    else:
        wrapper.original_module.load_state_dict(wrapper.modules_to_save[names[0]].state_dict())


def _weight(layer: Any) -> Any:
    base = layer.get_base_layer()
    return getattr(base, layer.parameter_name) if hasattr(layer, "parameter_name") else base.weight


def _check_mergeable(key: str, layer: Any, names: Sequence[str]) -> None:
    _check_unchanged("merge", key, layer)
    if is_sharded(_weight(layer)):
        raise ValueError(
            f"lora.merge: the weight of {key} is sharded; save the adapters, and load and merge them into a model that is "
            f"not sharded."
        )
    if format_of(_weight(layer)).coded:
        raise ValueError(
            f"lora.merge: the weight of {key} is quantised, in steps larger than an adapter's sums; call "
            f"gb.lora.dequantize_base first."
        )
    if biased := [word for word in names if getattr(layer, "lora_bias", {}).get(word)]:
        raise ValueError(
            f"lora.merge: the adapter {biased[0]!r} of {key} adds a bias, too, which the weight cannot hold; keep the adapter."
        )
    left = [word for word in active_in(layer) if word not in names and word not in layer.merged_adapters]
    if left and (set(layer.lora_variant) or type(layer.get_base_layer()) is not nn.Linear):
        raise ValueError(
            f"lora.merge: {key} has the adapter {left[0]!r}, too, which PEFT's forward leaves out while another is merged; "
            f"merge or disable that one first."
        )


def _merge_layer(layer: Any, names: Sequence[str], keep: bool) -> Tensor:
    weight = _weight(layer)
    if keep and "unmerged" not in vars(layer):
        layer.unmerged = Unmerged(weight)
    before = weight.detach().double()
    if layer.lora_variant or not isinstance(layer.get_base_layer(), nn.Linear):
        layer.merge(adapter_names=list(names))
        added = weight.double() - before
    else:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        deltas = []
        for name in names:
            deltas.append(layer.scaling[name] * (layer.lora_B[name].weight.to(dtype) @ layer.lora_A[name].weight.to(dtype)))
        delta = torch.stack(deltas).sum(0)
        weight.copy_(weight.to(dtype) + delta)
        layer.merged_adapters.extend(names)
        added = delta.double()
    torch.autograd.graph.increment_version(weight)
    if "unmerged" in vars(layer):
        layer.unmerged.note(weight)
    return (weight.double() - before - added).norm() / added.norm().clamp_min(torch.finfo(torch.float64).tiny)


@torch.inference_mode(False)
@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Restore every weight that adapters were merged into, bit for bit. The adapters add to its products again."""
    layers = [(key, layer) for key, layer in adapted_layers(model) if "unmerged" in vars(layer)]
    for key, layer in layers:
        _check_unchanged("unmerge", key, layer)
    for _, layer in layers:
        _weight(layer).copy_(vars(layer).pop("unmerged").weight)
        layer.merged_adapters.clear()


def _check_unchanged(what: str, key: str, layer: Any) -> None:
    if "unmerged" in vars(layer) and layer.unmerged.changed(_weight(layer)):
        raise ValueError(
            f"lora.{what}: the weight of {key} was changed after an adapter was merged into it, and unmerging would undo that; "
            f"call gb.lora.unmerge before weights are trained or loaded."
        )


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model` without adapters, under the names that it has without them.

    Raise ValueError where an adapter is on and not merged, because it would be lost, and where weights are quantised.
    """
    for key, module in model.named_modules():
        if isinstance(module, Base):
            raise ValueError(
                f"lora: the weight of {key.rpartition('.')[0].removesuffix('.base_layer')} is in {module.kind.name}, which a "
                f"model's own files cannot store; call gb.lora.dequantize_base first."
            )
    state = model.state_dict()
    for key, layer in [*adapted_layers(model), *wrappers(model)]:
        for name in active_in(layer):
            if name not in getattr(layer, "merged_adapters", ()):
                raise ValueError(
                    f"lora: {key} carries the adapter {name!r}, which a model's own files cannot store; call gb.lora.merge "
                    f"first, or gb.lora.disable to leave it out."
                )
        own = "" if hasattr(layer, "base_layer") else TOKENS if tokens_of(layer) else None
        inner = f"{key}.original_module." if own is None else f"{key}{own}.base_layer."
        state = {
            f"{key}.{word.removeprefix(inner)}" if word.startswith(inner) else word: tensor
            for word, tensor in state.items()
            if word.startswith(inner) or not word.startswith(f"{key}.")
        }
    return state
