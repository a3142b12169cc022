"""Which tensors lie over the same memory without being one tensor.

To the user they are one weight: what is written into one is read in the other. Moving one of them away, into a stacked or flat
buffer, ends that without a sign. So whoever moves weights asks here first.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Pairs of names of different tensors that share bytes. A tensor that comes twice, as a tied one does, is no pair.

    Left out are tensors with gaps between their elements, for two of them may lie in each other's gaps, and subclasses, whose
    memory is their own business.
    """
    tensors = {id(t): (name, t) for name, t in reversed(list(named))}.values()  # reversed: the first name of each stays
    placed = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors if _dense(t))
    end, holder = 0, ""
    for begin, stop, name in placed:
        if begin < end:
            yield holder, name
        if stop > end:
            end, holder = stop, name


def _dense(t: Tensor) -> bool:
    if type(t) not in (Tensor, Parameter) or t.layout != torch.strided or not t.numel():
        return False
    return sum((size - 1) * step for size, step in zip(t.shape, t.stride())) + 1 == t.numel()
