"""What stands in a norm's place: tanh or a Richards curve by element, a gain and a bias for each column.

Both have RMSNorm's two methods. `add` adds what the last sub-layer computed to the residual stream in the same pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....layers import recompute
from ....layers.fused_weights import Kernels
from ..kernels import Curve, add_dynamic_tanh, add_richards_norm, dynamic_tanh, richards_norm
from ..kernels.dynamic_tanh import NORM
from .richards import CurveNumbers, at_least_fp32


class _Elementwise(nn.Module):
    """Gain, bias, and a norm's two methods over two ops."""

    OPS: tuple[str, ...]
    recompute_bytes = recompute.LEAST_BYTES

    def __init__(self, hidden: int, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype))

    def _ops(self) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
        """The op alone and with the residual add: they take x (and the residual), what is learned of f, gain and bias."""
        raise NotImplementedError

    def _learned(self) -> Tensor | None:
        raise NotImplementedError

    def _small(self) -> tuple[Tensor | None, ...]:
        return self._learned(), self._parameters["weight"], self._parameters["bias"]

    def forward(self, x: Tensor) -> Tensor:
        alone, small = self._ops()[0], self._small()
        return recompute.mark(alone(x, *small), self.recompute_bytes, alone, x, *small)

    def add(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the new stream, the new stream); the stream stays x when nothing is pending."""
        if pending is None:
            return self.forward(x), x
        (alone, added), small = self._ops(), self._small()
        y, stream = added(x, pending.to(x.dtype), *small)  # under autocast products give 16 bits, and the stream stays fp32
        return recompute.mark(y, self.recompute_bytes, alone, stream, *small), stream

    def fused_kernels(self) -> Kernels:
        return "{}", self.OPS

    def extra_repr(self) -> str:
        return str(len(self.weight))


class DynamicTanh(_Elementwise):
    """y = tanh(alpha · x) · weight + bias, without statistics: a token's row is as large as its numbers make it.

    alpha: where the one learned factor begins
    """

    OPS = ("dynamic_tanh", "add_dynamic_tanh")

    def __init__(self, hidden: int, alpha: float = 0.5, device=None, dtype=None) -> None:
        super().__init__(hidden, device, dtype)
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=at_least_fp32(dtype)))

    def _ops(self) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
        return dynamic_tanh, add_dynamic_tanh

    def _learned(self) -> Tensor | None:
        return self._parameters["alpha"]


class RichardsNorm(_Elementwise):
    """y = f(x) · weight + bias with a Richards curve f: by default tanh(x / 2), whose numbers are learned."""

    OPS = ("richards_norm", "add_richards_norm")

    def __init__(self, hidden: int, curve: Curve = NORM, device=None, dtype=None) -> None:
        super().__init__(hidden, device, dtype)
        self.curve = CurveNumbers(curve, device=device, dtype=dtype)

    def _ops(self) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
        curve: Any = self._modules["curve"]
        return partial(_richards_norm, curve.curve), partial(_add_richards_norm, curve.curve)

    def _learned(self) -> Tensor | None:
        curve: Any = self._modules["curve"]
        return curve._parameters["free"]


def _richards_norm(curve: Curve, x: Tensor, free: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    return richards_norm(x, free, curve, weight, bias)


def _add_richards_norm(
    curve: Curve, x: Tensor, residual: Tensor, free: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    return add_richards_norm(x, residual, free, curve, weight, bias)
