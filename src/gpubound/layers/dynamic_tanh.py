"""What stands in a norm's place: tanh or a Richards curve by element, a gain and a bias for each column.

Both have RMSNorm's two methods. `add` adds what the last sub-layer computed to the residual stream in the same pass.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Curve, add_dynamic_tanh, add_richards_norm, dynamic_tanh, richards_norm
from ..kernels.dynamic_tanh import NORM
from .richards import CurveNumbers, at_least_fp32
from .stacked import Kernels


class _Elementwise(nn.Module):
    """Gain, bias, and a norm's two methods over `_alone` and `_added`."""

    OPS: tuple[str, ...]

    def __init__(self, hidden: int, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype))

    def _alone(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        raise NotImplementedError

    def _added(self, x: Tensor, pending: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self._alone(x, self._parameters["weight"], self._parameters["bias"])

    def add(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the new stream, the new stream); the stream stays x when nothing is pending."""
        if pending is None:
            return self.forward(x), x
        # under autocast products give 16 bits, and the stream stays fp32
        return self._added(x, pending.to(x.dtype), self._parameters["weight"], self._parameters["bias"])

    def fused_kernels(self) -> Kernels:
        return "{}", self.OPS


class DynamicTanh(_Elementwise):
    """y = tanh(alpha · x) · weight + bias, without statistics: a token's row is as large as its numbers make it.

    alpha: where the one learned factor begins
    """

    OPS = ("dynamic_tanh", "add_dynamic_tanh")

    def __init__(self, hidden: int, alpha: float = 0.5, device=None, dtype=None) -> None:
        super().__init__(hidden, device, dtype)
        self.alpha = nn.Parameter(torch.full((1,), alpha, device=device, dtype=at_least_fp32(dtype)))

    def _alone(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        return dynamic_tanh(x, self._parameters["alpha"], weight, bias)  # type: ignore[arg-type]

    def _added(self, x: Tensor, pending: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor]:
        return add_dynamic_tanh(x, pending, self._parameters["alpha"], weight, bias)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return str(len(self.weight))


class RichardsNorm(_Elementwise):
    """y = f(x) · weight + bias with a Richards curve f: by default tanh(x / 2), whose numbers are learned."""

    OPS = ("richards_norm", "add_richards_norm")

    def __init__(self, hidden: int, curve: Curve = NORM, device=None, dtype=None) -> None:
        super().__init__(hidden, device, dtype)
        self.curve = CurveNumbers(curve, device=device, dtype=dtype)

    def _of_curve(self) -> tuple[Tensor | None, Curve]:
        child: Any = self._modules["curve"]
        return child._parameters["free"], child.curve

    def _alone(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        return richards_norm(x, *self._of_curve(), weight, bias)

    def _added(self, x: Tensor, pending: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor]:
        return add_richards_norm(x, pending, *self._of_curve(), weight, bias)

    def extra_repr(self) -> str:
        return str(len(self.weight))
