"""A model's first values, drawn one tensor at a time: of a model made on the meta device, because it fits nowhere whole.

While the model is made, `Drawing` notes which tensors are filled, how, and in which order. `values` does the same again on a
real device, and gives each tensor's last values. A generator then gives the numbers that it would have given to the model made
there: what is drawn twice, by a layer and by its model behind it, is drawn twice again. One tensor is whole at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FILLS = {aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default}
MADE = {aten.ones.default, aten.zeros.default, aten.full.default}
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}


@dataclass(frozen=True)
class Draw:
    """One filling of one tensor."""

    tensor: Tensor  # on the meta device; it keeps its storage's address from being taken by another
    fill: Callable[..., Any]
    arguments: tuple
    keywords: dict[str, Any]


class Drawing(TorchDispatchMode):
    """Notes how the tensors are filled that are made on the meta device inside."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._computed: dict[int, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, gives = (_meta_tensors(tree) for tree in ((args, kwargs), result))
        if (func in MADE or func in FILLS) and gives and whole(result):
            self._computed.pop(key_of(result), None)
            self.draws.append(Draw(result.detach(), func, args if func in MADE else args[1:], kwargs or {}))
        elif func not in EMPTY:
            views = set() if func._schema.is_mutable else set(map(key_of, given))
            written = (*gives, *given) if func._schema.is_mutable else gives
            self._computed |= {key_of(one): func.name() for one in written if key_of(one) not in views}
        return result

    def check(self, name: str, tensor: Tensor) -> None:
        """ValueError where the values are not those of one filling."""
        how = self._computed.get(key_of(tensor))
        if how is None and any(key_of(draw.tensor) == key_of(tensor) for draw in self.draws):
            return
        raise ValueError(
            f"shard_made: {name} is {f'computed by {how}' if how else 'never filled'}, wanted numbers drawn into the whole of "
            f"it by normal_, uniform_, fill_, zero_, or made by ones, zeros or full; make it whole, and give it to shard."
        )

    @torch.no_grad()
    def values(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """(key_of a tensor, its values), in the order of their last fillings. Let go of one before the next."""
        last = {key_of(draw.tensor): draw for draw in self.draws}
        for draw in self.draws:
            if draw.fill in MADE:
                value = draw.fill(*draw.arguments, **draw.keywords | {"device": device})
            else:
                value = torch.empty_like(draw.tensor, device=device)
                draw.fill(value, *draw.arguments, **draw.keywords)
            if last[key_of(draw.tensor)] is draw:
                yield key_of(draw.tensor), value
            del value


def _meta_tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_meta]


def whole(tensor: Tensor) -> bool:
    """Whether it is all of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def key_of(tensor: Tensor) -> int:
    """The same for all tensors over one storage."""
    return tensor.untyped_storage()._cdata
