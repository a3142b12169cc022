"""RMSNorm, alone or with the residual add inside."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import add_rms_norm, rms_norm
from . import recompute
from .fused_weights import Kernels


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · (weight + offset).

    `add` adds what the last sub-layer computed to the residual stream and norms the sum, in one pass over memory.
    """

    OPS = ("rms_norm", "add_rms_norm")

    offset: float = 0.0  # Gemma's weights are how far the gain is from 1
    eps: float
    recompute_bytes = recompute.LEAST_BYTES

    def __init__(self, hidden: int, eps: float = 1e-6, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self._gain()
        y = rms_norm(x, weight, self.eps, self.offset)
        return self._mark(y, x, weight)

    def add(self, x: Tensor, pending: Tensor | None, rounds: bool = False) -> tuple[Tensor, Tensor]:
        """(norm of the new stream, the new stream); the stream stays x when nothing is pending.

        rounds: the norm comes in the dtype of `pending`, because whoever reads it rounds it to that dtype
        """
        weight = self._gain()
        if pending is None:
            return self.forward(x), x
        if pending.dtype != x.dtype and not rounds:  # autocast: products give 16 bits, the stream stays fp32
            pending = pending.to(x.dtype)
        y, stream = add_rms_norm(x, pending, weight, self.eps, self.offset)
        # Kept for backward if it is rounded, as torch's autocast keeps its cast: to compute it again would move fp32.
        return y if y.dtype != stream.dtype else self._mark(y, stream, weight), stream

    def _gain(self) -> Any:
        """Its weight: a parameter, found without a search, or what a parametrization or pruning computes."""
        own = self._parameters.get("weight")
        return self.weight if own is None else own

    def _mark(self, y: Tensor, x: Tensor, weight: Any) -> Tensor:
        return recompute.mark(y, self.recompute_bytes, partial(rms_norm, eps=self.eps, offset=self.offset), x, weight)

    def fused_kernels(self) -> Kernels:
        return "{}", self.OPS

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
