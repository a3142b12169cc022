"""A Richards curve as a module, and the gated MLP of two of them: down(x1 · f_v(x1) · f_g(x2)).

x1 is the gate's product and x2 that of up, so that a fixed logistic f_v makes x1 · f_v(x1) the silu(gate) of a SwiGLU. What
differs from one is the curve on x2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.dispatch import Call
from ....layers import recompute
from ....layers.fused_weights import Kernels, Projecting, Stacked, run_linear
from ....layers.linear_product import DENSE, format_of, multiply
from ....layers.mlp import Unit, gated_down, trained_weight
from ..kernels import Curve, richards, richards_glu, richards_glu_backward
from ..kernels.curve import NAMES
from ..kernels.richards import GATE, VALUE


class CurveNumbers(nn.Module):
    """The learned parameters of a curve: one small vector `free` in at least fp32, or None without any.

    A layer whose kernel computes a curve among other things has this as a child.
    """

    in_parents_row = True  # in a placement's table

    def __init__(self, curve: Curve, device=None, dtype=None) -> None:
        super().__init__()
        self.curve = curve
        self.register_parameter("free", nn.Parameter(given(curve.start(), device, dtype)) if curve.learned else None)

    def values(self) -> dict[str, float]:
        """Return the current values of the nine parameters. Synchronises with the device, so not for use in a step."""
        free: Any = self._parameters["free"]
        numbers = self.curve.parameters(None if free is None else free.detach().double().cpu(), torch.float64)
        return {name: float(number) for name, number in zip(NAMES, numbers)}

    def extra_repr(self) -> str:
        return f"{self.curve.variant}, learns {', '.join(self.curve.learned) or 'nothing'}"


class RichardsCurve(CurveNumbers):
    """f of each element."""

    def forward(self, x: Tensor) -> Tensor:
        return richards(x, self._parameters["free"], self.curve)

    def fused_kernels(self) -> Kernels:
        return "{}", ("richards",)


class RichardsGLU(Projecting):
    """Gate and up as one product, both curves and the multiplication as one kernel, then down. No bias.

    residual: whether x is added inside. A block adds it itself, so it is off by default
    """

    PROJECTIONS: tuple[str, ...] = ("gate_proj", "up_proj")  # together [x1 | x2]

    recompute_bytes = recompute.LEAST_BYTES

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        residual: bool = False,
        value_curve: Curve = VALUE,
        gate_curve: Curve = GATE,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **where)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **where)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **where)
        self.value, self.gate = CurveNumbers(value_curve, **where), CurveNumbers(gate_curve, **where)
        self.unit = RichardsUnit(value_curve, gate_curve)
        self.residual = residual
        self.stacked = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        gates = self.stacked.joined(self.projections())
        packed = torch.cat(self.one_by_one(x), -1) if gates is None else multiply(x, gates)
        y = self._down(packed)
        return x + y.to(x.dtype) if self.residual else y

    def rounds(self) -> bool:
        return not self.residual and super().rounds()

    def _down(self, packed: Tensor) -> Tensor:
        children: dict[str, Any] = self._modules
        down, free = children["down_proj"], [children[name]._parameters["free"] for name in ("value", "gate")]
        weight = trained_weight(down) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None
        if weight is not None and packed.nbytes // 2 >= self.recompute_bytes and format_of(weight) is DENSE:
            return gated_down(packed, weight, self.unit, free)
        h = self.unit.forward(packed, *free)
        return run_linear(down, recompute.mark(h, self.recompute_bytes, self.unit.forward, packed, *free))

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('gate and up')}; {{}}", ("richards_glu",)

    def extra_repr(self) -> str:
        return "residual" if self.residual else ""


class RichardsUnit(Unit):
    """x1 · f_v(x1) · f_g(x2); `small` are the numbers that the two curves learn."""

    def __init__(self, value: Curve, gate: Curve) -> None:
        self.curves = value, gate

    def forward(self, packed: Tensor, *small: Tensor | None) -> Tensor:
        value, gate = small
        return richards_glu(packed, value, gate, *self.curves)

    def backward(self, dh: Tensor, packed: Tensor, *small: Tensor | None) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        value, gate = small
        gradient, h, *of_small = richards_glu_backward(dh, packed, value, gate, *self.curves)
        return gradient, h, of_small


def richards_glu_calls(inner: int, value: Curve = VALUE, gate: Curve = GATE) -> tuple[Call, ...]:
    """Return the ops that a RichardsGLU of width `inner` calls, so that the first step can compile in parallel."""
    return ("richards_glu", (inner, value, gate)), ("richards_glu_backward", (inner, value, gate))


def at_least_fp32(dtype: torch.dtype | None) -> torch.dtype:
    """For a handful of numbers that all of a layer depends on: 16 bits would round away their updates and save nothing."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


def given(numbers: Sequence[float], device: Any, dtype: torch.dtype | None) -> Tensor:
    """A handful of numbers on `device`, or on the caller's default. Moved there: what torch.tensor makes on the meta device is
    seen by no dispatch mode, and a model in shards is drawn by what one has seen (parallel/drawn.py)."""
    there = torch.get_default_device() if device is None else device
    return torch.tensor(numbers, device="cpu", dtype=at_least_fp32(dtype)).to(there)
