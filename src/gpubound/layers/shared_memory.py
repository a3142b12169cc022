"""Tensors over the same memory. To the user two of them are one weight, and moving one of them silently ends that.

Who moves weights, into a stacked or a flat buffer, asks here first. A tensor that comes twice, as a tied one does, is no pair.
Tensors with gaps are left out, for two may lie in each other's gaps, and so are subclasses.
"""

from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Pairs of names of different tensors that share bytes."""
    tensors = {id(t): (name, t) for name, t in reversed(list(named))}.values()  # reversed: the first name of each stays
    placed = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors if _dense(t))
    end, holder = 0, ""
    for begin, stop, name in placed:
        if begin < end:
            yield holder, name
        if stop > end:
            end, holder = stop, name


def any_over(parts: Sequence[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether a tensor of `others` that is none of `parts` shares bytes with one of them."""
    own = set(map(id, parts))
    spans = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts if _dense(p)]
    rest = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in others if id(t) not in own and _dense(t)]
    return any(begin < end and start < stop for begin, stop in spans for start, end in rest)


class Movers:
    """The modules of this process that move their own weights: what one of them moves may be another one's, too."""

    def __init__(self) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._lock = Lock()

    def add(self, module: nn.Module) -> None:
        with self._lock:
            self._modules.add(module)

    def weights(self) -> list[Tensor]:
        with self._lock:
            modules = list(self._modules)
        return [parameter for module in modules for parameter in module.parameters()]


movers = Movers()


def _dense(t: Tensor) -> bool:
    if type(t) not in (Tensor, Parameter) or t.layout != torch.strided or not t.numel():
        return False
    return sum((size - 1) * step for size, step in zip(t.shape, t.stride())) + 1 == t.numel()
