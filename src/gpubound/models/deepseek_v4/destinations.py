"""Destinations of the tensors of a published DeepSeek-V4 checkpoint: a parameter, a buffer, one expert's rows in a stack, or
quantised weights; and the names of quantisation scales.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from ...kernels.packed_weights import Packed
from ..folder import Stored
from .blocks import Fp8Linear
from .kernels.fp8_blocks import Fp8Blocks

Place = Tensor | Packed | Fp8Blocks


def destinations(model: Any) -> tuple[dict[str, Place], dict[str, list[str]]]:
    """Return the destination of each checkpoint tensor by name, and the single experts' names of each stack of experts."""
    found: dict[str, Place] = {name: tensor.data for name, tensor in model.state_dict().items()}
    stacks = {}
    for stem, layer in ((name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear)):
        del found[f"{stem}.codes"], found[f"{stem}.scale"]
        found[f"{stem}.weight"] = layer.blocks
    for stem, experts in ((name, module) for name, module in model.named_modules() if name.endswith(".experts")):
        if (packed := getattr(experts, "packed", None)) is not None:
            for part in ("gate_up", "down"):
                del found[f"{stem}.{part}_words"], found[f"{stem}.{part}_scale"]
                found[f"{stem}.{part}_proj"] = packed(part)
        gate_up, down = (_apart(found[f"{stem}.{part}_proj"], experts.num_experts) for part in ("gate_up", "down"))
        halves = [_apart(both, 2) for both in gate_up]
        gate, up = ([both[half] for both in halves] for half in (0, 1))
        for part, singles in (("gate_up", {"w1": gate, "w3": up}), ("down", {"w2": down})):
            single = {f"{stem}.{n}.{w}.weight": one for w, those in singles.items() for n, one in enumerate(those)}
            stacks[f"{stem}.{part}_proj"] = list(single)
            found |= single
    return found, stacks


def _apart(stack: Place, count: int) -> Sequence[Any]:
    """Split a stack into `count` equal parts of its rows."""
    if isinstance(stack, Tensor):
        return stack.unbind() if stack.dim() == 3 else stack.chunk(count)
    assert isinstance(stack, Packed)
    rows = stack.rows // count
    return [stack.part(slice(first, first + rows)) for first in range(0, stack.rows, rows)]


def own_name(model: Any, known: Collection[str]) -> Callable[[str], str]:
    """Return a function that maps a checkpoint name to transformers' name, by transformers' conversion table."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    table = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def own(name: str) -> str:
        renamed = name
        for rule in table:
            renamed, _ = rule.rename_source_key(renamed)
        return next((one for one in (name, renamed, f"model.{renamed}", f"model.{name}") if one in known), renamed)

    return own


def scales_of(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    yield f"{name.removesuffix('weight')}scale"


def _scaled_by(name: str) -> str:
    """Return the name of the weight that has these scales."""
    return name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else f"{name.removesuffix('scale')}weight"


def holds_integers(place: Place) -> bool:
    """Return True for an integer tensor, such as the table of a router that chooses experts by token."""
    return isinstance(place, Tensor) and not place.is_floating_point()


def is_scale(name: str, stored: dict[str, Stored]) -> bool:
    return name.endswith(("scale", "scale_inv")) and _scaled_by(name) in stored
