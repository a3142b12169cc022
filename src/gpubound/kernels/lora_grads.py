"""Gradients of low-rank adapters' parameters: those of several adapters go to one place, by one launch, where memory
allows it.

Legend as in lora.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..trace import fallback
from .accumulate import join, main_gradient, opens
from .hash_dropout import Drop
from .lora import lora_gradients
from .lora_checks import BLOCK, BLOCKS, SHARED_SUMS
from .side_stream import aside
from .tensor_state import made_record, record_of


def blocks_of(b: Sequence[Tensor]) -> list[int] | None:
    """`blocks` of these b as one, if the ops take them so."""
    sizes, ranks = [part.shape[0] for part in b], {part.shape[1] for part in b}
    return sizes if 1 < len(b) <= BLOCKS and len(ranks) == 1 and not any(size % BLOCK for size in sizes) else None


def adapter_gradients(
    a: Sequence[Tensor], b: Sequence[Tensor], x: Tensor, gh: Tensor, g: Tensor, h: Tensor, drop: Drop | None = None,
    wanted: Sequence[bool] = (True, True), beside: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of adapters' parameters, where they go: into their main_grad and None, or tensors of their dtypes.

    The adapters lie side by side on h, and their b are blocks of one; `beside` says that all of them are of all outputs, and b
    side by side, too. They, and `wanted`, are in the order a, b, a, b.
    """
    blocks = None if beside else blocks_of(b)
    of_a, of_b = _Into.all(a, wanted[::2], False), _Into.all(b, wanted[1::2], beside)
    if of_a is None or of_b is None or (len(b) > 1 and blocks is None and not beside):
        ranks, outputs = [part.shape[0] for part in a], [part.shape[0] for part in b]
        gs = [g] * len(b) if beside else g.split(outputs, 1)
        each = zip(a, b, gh.split(ranks, 1), gs, h.split(ranks, 1), wanted[::2], wanted[1::2])
        return [t for i, j, ghi, gi, hi, *want in each for t in adapter_gradients([i], [j], x, ghi, gi, hi, drop, want)]
    if of_a.out is None and of_b.out is None:
        return [None] * len(wanted)
    begins, made = (of_a.begins(), of_b.begins()), of_a.made or of_b.made
    arrivals = None if made else _arrivals(a[0])

    def put() -> None:
        lora_gradients(x, gh, g, h, of_a.out, of_b.out, drop, begins, blocks, arrivals)

    if made or (record := record_of(a[0])) is None or record.side is None:
        put()
    else:
        aside(a[0], put, x, gh, g, h)
    return [t for pair in zip(of_a.given(), of_b.given()) for t in pair]


class _Into(NamedTuple):
    """Destination of the gradients of some parameters, one matrix: by rows or, with `beside`, by columns."""

    parameters: Sequence[Tensor]
    beside: bool
    out: Tensor | None  # None: not needed
    made: bool = False  # for autograd, not a sum that others add to

    @classmethod
    def all(cls, parameters: Sequence[Tensor], wanted: Sequence[bool], beside: bool) -> "_Into | None":
        """None if they do not go to one place."""
        if not any(wanted):
            return cls(parameters, beside, None)
        mains = [main for p in parameters if (main := main_gradient(p)) is not None]
        if not all(wanted) or 0 < len(mains) < len(parameters) or len({p.dtype for p in parameters}) > 1:
            return None
        if not mains:
            return cls(parameters, beside, torch.cat([torch.empty_like(p) for p in parameters], int(beside)), True)
        if (joined := mains[0] if len(mains) == 1 else join(mains, beside)) is None:
            fallback("lora: gradients of several adapters", "their accumulators are not adjacent in memory")
            return None
        return cls(parameters, beside, joined)

    def begins(self) -> bool:
        return self.out is None or self.made or opens(self.parameters)

    def given(self) -> Sequence[Tensor | None]:
        """For autograd."""
        if self.out is None or not self.made:
            return [None] * len(self.parameters)
        return self.out.split([p.shape[self.beside] for p in self.parameters], int(self.beside))


def _arrivals(a: Tensor) -> Tensor:
    """Return a parameter's counters, which no other launch may use at the same time. A captured step makes its own, unless it
    was run before."""
    record = made_record(a)
    if (kept := record.arrivals) is None or kept.device != a.device:
        kept = torch.zeros(SHARED_SUMS, dtype=torch.int32, device=a.device)
        if not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
            record.arrivals = kept
    return kept
