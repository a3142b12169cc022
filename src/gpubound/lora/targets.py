"""Which layers of a model are to be adapted: all of a kind, by the ends of their names, or by a regular expression."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..kernels.record import seen
from ..layers.frozen import OnlyCodes
from ..layers.site_parts import format_of, is_sharded, shape_of
from ..layers.vocabulary import head_of
from ..trace import fallback
from .convolution import ConvAdapters
from .dora import DoraPair
from .experts import ExpertAdapters, ExpertStack, expert_stacks
from .pair import Pair
from .pairs import Adapters
from .table import TableAdapters

KINDS: dict[type, type[Adapters]] = {
    nn.Linear: Adapters,
    nn.Conv2d: ConvAdapters,
    nn.Embedding: TableAdapters,
    ExpertStack: ExpertAdapters,
}
"""The layers that are adapted, and what holds their adapters."""

DORA: dict[type, type[Pair]] = {nn.Linear: DoraPair}
"""Those that can have DoRA."""

ALL: dict[str, tuple[type[nn.Module], ...]] = {
    "all-linear": (nn.Linear,),
    "all-linear-and-conv": (nn.Linear, nn.Conv2d),
}


def layers_of(model: nn.Module, kinds: tuple[type, ...] = tuple(KINDS)) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, module in model.named_modules():
        if isinstance(module, kinds):
            found[key] = module
        elif ExpertStack in kinds:
            found.update(expert_stacks(key, module))
    return found


def chosen(model: nn.Module, targets: str | Sequence[str], rank: Any) -> dict[str, Any]:
    _check_no_peft(model)
    _check_reached(model)
    if isinstance(targets, str) and targets in ALL:
        return _all(model, targets, rank)
    wanted = [targets] if isinstance(targets, str) else list(targets or ())
    _check_words(targets, wanted)
    layers, found = layers_of(model), dict[str, Any]()
    named = {**dict(model.named_modules()), **layers}
    for target in wanted:
        matches = [key for key in named if key and _matches(key, target, regex=isinstance(targets, str))]
        if not matches:
            ends = sorted({key.rpartition(".")[2] for key in layers})
            raise ValueError(
                f"lora.add: no layer of {type(model).__name__} is named {target!r}; those that can be adapted end in "
                f"{', '.join(ends)}."
            )
        found.update((key, named[key]) for key in matches)
    for key, module in found.items():
        if why := unfit(model, module):
            raise ValueError(f"lora.add: {key} {why}; name other layers.")
    return found


def _check_words(targets: Any, wanted: Sequence[Any]) -> None:
    if not wanted or not all(isinstance(target, str) for target in wanted):
        raise ValueError(
            f"lora.add: targets must be {', '.join(map(repr, ALL))}, a regular expression, or a list of names' ends, got "
            f"{targets!r}."
        )
    try:
        re.compile(targets if isinstance(targets, str) else "")
    except re.error as error:
        raise ValueError(f"lora.add: targets {targets!r} is no regular expression ({error}); list names.") from error


def _matches(key: str, target: str, regex: bool) -> bool:
    return key == target or key.endswith(f".{target}") or (regex and re.fullmatch(target, key) is not None)


def _all(model: nn.Module, targets: str, rank: Any) -> dict[str, Any]:
    head = head_of(model)
    layers = {key: layer for key, layer in layers_of(model, ALL[targets]).items() if layer is not head}
    left = {key: why for key, layer in layers.items() if (why := unfit(model, layer) or _too_small(layer, rank))}
    if len(left) == len(layers):
        kinds = " or ".join(f"nn.{kind.__name__}" for kind in ALL[targets])
        raise ValueError(
            f"lora.add: {type(model).__name__} has no {kinds} below its head that takes an adapter of rank {rank}; name as "
            f"targets what takes one: linear layers, 2d convolutions, embeddings, experts."
        )
    for key, why in left.items():
        fallback(f"lora.add: {targets}", f"{key} {why}, so it gets no adapter")
    if coded := [key for key, module in model.named_modules() if isinstance(module, OnlyCodes) and module.linear]:
        others = f" and {len(coded) - 1} more linear layers" if len(coded) > 1 else ""
        fallback(f"lora.add: {targets}", f"the weights of {coded[0]}{others} are codes and no parameters: no adapter for them")
    return {key: layer for key, layer in layers.items() if key not in left}


def _too_small(layer: Any, rank: Any) -> str | None:
    """The last convolution of a network of diffusion has four channels."""
    if not isinstance(rank, int) or rank <= KINDS[type(layer)].PAIR.most_rank(layer.weight):
        return None
    return f"has a weight of {by(shape_of(layer.weight))}, too small for rank {rank}"


def by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def unfit(model: nn.Module, module: Any) -> str | None:
    """Why no adapter can be a part of what `module` computes."""
    if type(module) not in KINDS:
        *kinds, last = (f"nn.{kind.__name__}" for kind in KINDS if issubclass(kind, nn.Module))
        return f"is a {type(module).__module__.split('.')[0]}.{type(module).__name__}, not an {', '.join(kinds)} or {last}"
    weight = seen(module.weight)
    if type(weight) is not nn.Parameter or not (weight.is_floating_point() or format_of(weight).coded):
        return "has a weight that is not a plain parameter of floating-point numbers"
    if why := KINDS[type(module)].unfit(module):
        return why
    encoders = [layer for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    if any(module is layer.linear1 or module is layer.linear2 for layer in encoders):
        return "lies in an nn.TransformerEncoderLayer, which in eval mode reads its weight without calling it"
    return None


def _check_no_peft(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners."):
            raise ValueError(f"lora.add: {key} carries an adapter of PEFT's; train that one, or call merge_and_unload() first.")


def _check_reached(model: nn.Module) -> None:
    """That what hangs on a weight's record is found by the products that see the weight gathered."""
    if key := next((key for key, layer in layers_of(model).items() if is_sharded(seen(layer.weight))), None):
        raise ValueError(
            f"lora.add: the weight of {key} is sharded; add adapters first, and shard the model then, or make it in shards by "
            f"gpubound.parallel.sharded.shard_made(frozen=True)."
        )
