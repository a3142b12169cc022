"""The gated MLP: down(activation(gate(x)) · up(x)), with gate and up as one product."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import geglu, swiglu, swiglu_backward
from ..kernels.accumulate import deliver, weight_gradient
from ..kernels.dispatch import Call, transformed
from . import recompute
from .fused_weights import Kernels, Projecting, Stacked, bare, run_linear
from .linear_product import DENSE, VERSION, Joined, changed_in_place, check_dtypes, format_of, multiply

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class MLP(Projecting):
    """Gate and up as one product, the activation and the multiplication as one kernel, then down."""

    PROJECTIONS: tuple[str, ...] = ("gate_proj", "up_proj")  # together [gate | up]

    activation: str = "silu"
    recompute_bytes = recompute.LEAST_BYTES

    def __init__(
        self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu", device=None, dtype=None
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"MLP: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
        where = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, **where)
        self.activation = activation
        self.stacked = Stacked()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        down: Any = self._modules["down_proj"]
        gates = self.stacked.joined(self.projections())
        if gates is None:
            packed = tuple(self.one_by_one(x))
        else:
            trained = trained_weight(down) if self.activation == "silu" and torch.is_grad_enabled() else None
            if trained is not None and not any(gates.adapters):
                result = format_of(trained).gated(x, gates, Joined(trained.detach(), None, [trained], ()))
                if result is not None:
                    return result
            full = multiply(x, gates)
            if trained is not None and full.nbytes // 2 >= self.recompute_bytes and format_of(trained) is DENSE:
                return gated_down(full, trained)
            packed = (full,)
        y = gated(self.activation, *packed)
        return run_linear(down, recompute.mark(y, self.recompute_bytes, partial(gated, self.activation), *packed))

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('gate and up')}; {{}}", ("swiglu" if self.activation == "silu" else "geglu",)


def gated(activation: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return activation(gate) · up. `gate` alone is the packed product [gate | up]."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_calls(activation: str | None, inner: int) -> tuple[Call, ...]:
    """Return the ops that an MLP of width `inner` will call, so that a first step compiles their kernels in parallel."""
    if activation == "silu":
        return ("swiglu", (inner, True)), ("swiglu_backward", (inner,))
    return (("geglu", (inner, True)),)


def trained_weight(down: Any) -> Tensor | None:
    """Return the weight of `down` if it trains and calling `down` computes its product alone."""
    weight = down._parameters["weight"] if bare(down) and down._parameters["bias"] is None else None
    return weight if weight is not None and weight.requires_grad else None


class Unit:
    """Gated unit between the products of an MLP, applied to packed [gate | up]. This one is SwiGLU.

    `small` are its parameters, such as those of curves: small tensors, or None.
    """

    def forward(self, packed: Tensor, *small: Tensor | None) -> Tensor:
        return swiglu(packed)

    def backward(self, dh: Tensor, packed: Tensor, *small: Tensor | None) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """Return (gradient of packed, forward's result again, the gradients of `small`)."""
        return *swiglu_backward(dh, packed), ()


SWIGLU = Unit()


def gated_down(packed: Tensor, weight: Tensor, unit: Unit = SWIGLU, small: Sequence[Tensor | None] = ()) -> Tensor:
    """Return unit(packed) weightᵀ, saving neither the unit's result nor its intermediate results."""
    check_dtypes(packed, weight)
    if transformed():  # torch.func cannot trace _GatedDown
        return F.linear(unit.forward(packed, *small), weight)
    return _GatedDown.apply(packed, weight.detach(), weight, unit, *small)


class _GatedDown(torch.autograd.Function):
    """The Parameters are kept on ctx for their main_grad, as in layers/linear_product.py."""

    @staticmethod
    def forward(ctx, packed, plain, weight, unit, *small):
        ctx.save_for_backward(packed)
        ctx.plain, ctx.unit, ctx.small = plain, unit, small
        ctx.parameters = [p for p in (weight, *small) if p is not None]
        ctx.versions = [*map(VERSION, ctx.parameters)]
        return unit.forward(packed, *small) @ plain.to(packed.dtype).t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (packed,) = ctx.saved_tensors
        if [*map(VERSION, ctx.parameters)] != ctx.versions:
            raise changed_in_place()
        gradient, h, of_small = ctx.unit.backward(g @ ctx.plain.to(g.dtype), packed, *ctx.small)
        wanted = ctx.needs_input_grad[4:]
        small = [deliver(p, d) if want else None for p, d, want in zip(ctx.small, of_small, wanted)]
        dw = weight_gradient(ctx.parameters[0], g.reshape(-1, g.shape[-1]), h.reshape(-1, h.shape[-1]))
        return gradient, None, dw, None, *small
