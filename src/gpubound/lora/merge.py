"""Adapters folded into the weights of their layers, and taken out again.

Subtracting what was added would leave rounding behind. So the weight as it was is kept, in the host's memory, and put back.
"""

import torch
from torch import Tensor, nn

from ..device import without_autocast
from ..layers.linear_formats import format_of, is_sharded
from ..layers.quantized_base import Base
from .add import take_out
from .dora import DoraPair
from .pair import Pair
from .pairs import Adapters, adapted_layers, check_not_chosen, check_values, pairs


@torch.inference_mode(False)
@torch.no_grad()
def merge(model: nn.Module, name: str | None = None, for_good: bool = False) -> float:
    """weight += scale · b a for the adapters that are on, or those of them called `name`. They cost nothing from then on.

    for_good  take what is merged out of the model then, and keep no copy of the weights as they were

    Returns what rounding to the weights' dtype took: the largest error of a layer beside what was added, 0.0 to 1.0 and above.
    In bf16 it is large where an adapter is small: one hundredth of a weight keeps one or two bits.
    """
    found: dict[str, tuple[Adapters, list[Pair]]] = {}
    named = pairs(model, name, "lora.merge", some=True)
    check_not_chosen(named, "lora.merge")
    for key, adapters, own in named:
        if own.on and not own.merged:
            found.setdefault(key, (adapters, []))[1].append(own)
    check_values({key: adapters.layer.weight for key, (adapters, _) in found.items()}, "lora.merge")
    for key, (adapters, merging) in found.items():
        _check_dora(key, adapters, merging)
        _check_unchanged("merge", key, adapters)
        if is_sharded(adapters.layer.weight):
            raise ValueError(
                f"lora.merge: the weight of {key} is sharded; save the adapters, and load and merge them into a model that is "
                f"whole."
            )
        if format_of(adapters.layer.weight).coded:
            raise ValueError(
                f"lora.merge: the weight of {key} is in codes, whose steps are larger than what an adapter adds; call "
                f"gb.lora.dequantize_base first."
            )
    errors = [_fold(adapters, own, keep=not for_good) for adapters, own in found.values()]
    if for_good:
        for _, adapters in adapted_layers(model):
            adapters.keep(None)
        take_out(model, [(key, adapters, own) for key, adapters, own in pairs(model, None, "lora.merge") if own.merged])
    return max((error.item() for error in errors), default=0.0)


def _fold(adapters: Adapters, own: list[Pair], keep: bool) -> Tensor:
    weight = adapters.layer.weight
    if keep and adapters.unmerged is None:
        adapters.keep(weight.detach().to("cpu", copy=True))
    wide = torch.promote_types(weight.dtype, torch.float32)
    before = weight.detach().to(wide, copy=True)
    base = before if adapters.unmerged is None else adapters.unmerged.to(before)
    with without_autocast(weight.device):  # it would round what is merged to 16 bits
        added = sum((pair.added(base) for pair in own), torch.zeros((), device=weight.device, dtype=torch.float32))
    weight.copy_(before + added)
    for pair in own:
        pair.merged = True
    adapters.hang()
    adapters.written = weight._version
    exact = before.double() + added.double()
    return (weight.double() - exact).norm() / added.double().norm().clamp_min(torch.finfo(torch.float64).tiny)


@torch.inference_mode(False)
@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Every weight that adapters were merged into, bit for bit as it was. The adapters add to its products again."""
    layers = [(key, adapters) for key, adapters in adapted_layers(model) if adapters.unmerged is not None]
    for key, adapters in layers:
        _check_unchanged("unmerge", key, adapters)
    for _, adapters in layers:
        assert adapters.unmerged is not None
        adapters.layer.weight.copy_(adapters.unmerged)
        adapters.keep(None)
        for _, pair in adapters.pairs():
            pair.merged = False
        adapters.hang()


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of `model` without adapters, for files that know of none.

    ValueError where one is on and not merged, because it would be lost, and where weights are in codes.
    """
    for key, module in model.named_modules():
        if isinstance(module, Base):
            raise ValueError(
                f"lora: the weight of {key.rpartition('.')[0]} is in {module.kind.name}, and a model's own files have no place "
                f"for it; call gb.lora.dequantize_base first."
            )
    state, layers = model.state_dict(), adapted_layers(model)
    for key, adapters in layers:
        for name, pair in adapters.pairs():
            if pair.on and not pair.merged:
                raise ValueError(
                    f"lora: {key} carries the adapter {name!r}, and a model's own files have no place for it; call "
                    f"gb.lora.merge first, or gb.lora.disable to leave it out."
                )
    theirs = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Adapters))
    return {name: tensor for name, tensor in state.items() if not name.startswith(theirs)}


def _check_dora(key: str, adapters: Adapters, merging: list[Pair]) -> None:
    """DoRA takes the lengths of the rows of the layer's weight, and merging others alone would change these: for one that is
    off, too, once it is on again."""
    left = [name for name, own in adapters.pairs() if isinstance(own, DoraPair) and not own.merged and own not in merging]
    if left:
        raise ValueError(
            f"lora.merge: {key} has the DoRA adapter {left[0]!r}, too, which would be over another weight then; merge or "
            f"remove that one first."
        )


def _check_unchanged(what: str, key: str, adapters: Adapters) -> None:
    if adapters.unmerged is not None and adapters.layer.weight._version != adapters.written:
        raise ValueError(
            f"lora.{what}: the weight of {key} was changed after an adapter was merged into it, and unmerging would undo that; "
            f"call gb.lora.unmerge before weights are trained or loaded."
        )
