"""A model's first values, drawn one tensor at a time: of a model made on the meta device, because it fits nowhere whole.

While the model is made, `Drawing` notes which tensors are filled, how, and in which order. `values` does the same again on a
real device, and gives each tensor's last values. A generator then gives the numbers that it would have given to the model made
there: what is drawn twice, by a layer and by its model behind it, is drawn twice again. One tensor is whole at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
class Change:
    """One writing into the whole of a tensor."""

    work: Callable[..., Any]
    arguments: tuple
    keywords: dict[str, Any]

    def __call__(self, value: Tensor) -> None:
        self.work(value, *self.arguments, **self.keywords)


@dataclass(frozen=True)
class RecordedWrite:
    """One filling of one tensor."""

    tensor: Tensor  # on the meta device; it keeps its storage's address from being taken by another
    fill: Change
    shaping: list[Change] = field(default_factory=list)  # what was done to the numbers behind it, in place

    def value(self, device: torch.device) -> Tensor:
        if self.fill.work in MADE:
            made = self.fill.work(*self.fill.arguments, **self.fill.keywords | {"device": device})
        else:
            made = torch.empty_like(self.tensor, device=device)
            self.fill(made)
        for change in self.shaping:
            change(made)
        return made


class InitRecorder(TorchDispatchMode):
    """Notes how the tensors are filled that are made on the meta device inside."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[RecordedWrite] = []
        self._last: dict[int, RecordedWrite] = {}
        self._computed: dict[int, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, gives = (_meta_tensors(tree) for tree in ((args, kwargs), result))
        if len(gives) == 1 and whole(gives[0]) and (fill := _filling(func, args, kwargs)) is not None:
            self._draw(RecordedWrite(gives[0].detach(), fill))
        elif func not in EMPTY:
            self._compute(func, args, kwargs, given, gives)
        return result

    def _draw(self, draw: RecordedWrite) -> None:
        self._computed.pop(key_of(draw.tensor), None)
        self._last[key_of(draw.tensor)] = draw
        self.draws.append(draw)

    def _compute(self, func: Any, args: tuple, kwargs: dict[str, Any], given: list[Tensor], gives: list[Tensor]) -> None:
        if not func._schema.is_mutable:
            shared = set(map(key_of, given))  # by a view
            self._computed |= {key_of(one): func.name() for one in gives if key_of(one) not in shared}
        elif len(given) == 1 and args and given[0] is args[0] and whole(args[0]) and self._may_shape(func, args[0]):
            self._last[key_of(args[0])].shaping.append(Change(func, args[1:], kwargs))
        else:
            self._computed |= {key_of(one): func.name() for one in (*gives, *given)}

    def _may_shape(self, func: Any, tensor: Tensor) -> bool:
        """Return whether `func` may be replayed right after the fill: random values must be drawn in their original order."""
        drawn = key_of(tensor) in self._last and key_of(tensor) not in self._computed
        return drawn and torch.Tag.nondeterministic_seeded not in func.tags

    def check(self, name: str, tensor: Tensor) -> None:
        """ValueError where the values are not those of one filling."""
        how = self._computed.get(key_of(tensor))
        if how is None and key_of(tensor) in self._last:
            return
        raise ValueError(
            f"shard_deferred: {name} is {f'computed by {how}' if how else 'never filled'}, wanted numbers written into all of "
            f"it by normal_, uniform_, fill_, zero_, ones, zeros, full or .to(device), and perhaps changed in place; make the "
            f"model whole, and give it to shard."
        )

    @torch.no_grad()
    def values(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield (key_of a tensor, its values), in the order of the last fills. Release each tensor before the next."""
        for draw in self.draws:
            value = draw.value(device)
            if self._last[key_of(draw.tensor)] is draw:
                yield key_of(draw.tensor), value
            del value


def _filling(func: Any, args: tuple, kwargs: dict[str, Any]) -> Change | None:
    """Return the operation with which `func` fills a tensor; None if it does not, or fills it from other meta tensors."""
    if func in MADE:
        return Change(func, args, kwargs)
    if func in FILLS:
        return Change(func, args[1:], kwargs)
    if func is aten._to_copy.default and not args[0].is_meta:
        return Change(aten.copy_.default, (args[0].detach().clone(),), {})
    return None


def _meta_tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_meta]


def whole(tensor: Tensor) -> bool:
    """Return whether the tensor covers its whole storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def key_of(tensor: Tensor) -> int:
    """Return a key that all tensors over one storage share."""
    return tensor.untyped_storage()._cdata
