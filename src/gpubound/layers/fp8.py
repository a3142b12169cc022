"""Products in 8 bits: y = x Wᵀ with x and W in e4m3, both gradients from dy in e5m2 and the same x and W, summed in fp32.

A Hopper GPU multiplies 8-bit floats twice as fast as 16-bit ones. Their range is small, so every tensor is divided by its own
scale before it is rounded. The scale follows the largest magnitude of the preceding steps: known in advance, it lets one pass
read the tensor, round it and write both layouts that the products need (kernels/quantize.py). Within a gated MLP the
activation's kernels write 8 bits, and its hidden state is never stored in 16.

Such a weight has an Fp8 as the format in its record. train/precision.py makes these and renews their scales once a
step. Without gradients (evaluation) products stay in the weights' own 16 bits.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import quantize, quantize_swiglu, quantize_swiglu_backward
from ..kernels.accumulate import deliver_product, weight_gradients
from ..kernels.dispatch import Call
from ..kernels.quantize import LARGEST, MULTIPLE, scaled_product
from ..trace import fallback
from .linear_product import DENSE, VERSION, Format, Joined, changed_in_place, format_of, rows_of

FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT = WIDE
WEIGHT_GRADIENT_IN_FP8 = True  # False: from x and dy in 16 bits, a third of the arithmetic at half the rate
MARGIN = 2.0  # by which a tensor may exceed the largest magnitude so far before it saturates; costs range, not precision
SMALLEST = 2.0**-100
DECAY = 0.9  # of a scale at each step: a spike is forgotten within some twenty

STATE = 4  # values of a tensor's state: its scale, the largest magnitude so far, the scale of a magnitude of 1, one unused
ROLES = ((FINE, "input"), (FINE, "weight"), (GRADIENT, "output gradient"))

CALLS: tuple[Call, ...] = (  # of a step, to be compiled in parallel before it
    ("quantize", (FINE, True)),
    ("quantize", (GRADIENT, WEIGHT_GRADIENT_IN_FP8)),
    ("quantize_swiglu", ()),
    ("quantize_swiglu_backward", ()),
)


def new_states(sites: int, device: torch.device) -> Tensor:
    """Return (sites, roles, STATE) in fp32, 16 bytes apart as cuBLAS prefers for scales. A scale of 0 is not known yet."""
    unit = torch.tensor([MARGIN / LARGEST[dtype] for dtype, _ in ROLES], device="cpu", dtype=torch.float32)
    states = torch.zeros(sites, len(ROLES), STATE, device="cpu", dtype=torch.float32)
    states[..., 2] = unit
    return states.to(device)


@torch.no_grad()
def renew(states: Tensor) -> None:
    """Update the scales from the magnitudes since the last call, on the device. Without a finite one a scale stays."""
    scale, largest, unit, _ = states.unbind(-1)
    useful = largest.isfinite() & (largest > 0)
    scale.copy_(torch.where(useful, torch.maximum(largest * unit, scale * DECAY), scale))
    largest.zero_()


class Fp8(Format):
    """8-bit format of one weight, or of several multiplied as one: the first one's. All of them take gradients."""

    def __init__(self, states: Tensor, calibrating: Callable[[], bool]):
        self.input, self.weight, self.gradient = states.unbind()
        self._calibrating = calibrating
        self._rounded: tuple[tuple, Tensor, Tensor] | None = None

    @property
    def reads_input(self) -> bool:  # type: ignore[override]
        return not WEIGHT_GRADIENT_IN_FP8

    def select(self, x: Tensor, weights: Sequence[Tensor]) -> Format:
        if not torch.is_grad_enabled() or x.dtype != weights[0].dtype:
            return DENSE
        if any(type(format_of(weight)) is not Fp8 for weight in weights):
            return DENSE
        rows = x.numel() // x.shape[-1]
        if rows % MULTIPLE:
            fallback("fp8 product", f"{rows} tokens are no multiple of {MULTIPLE}; it is computed in {x.dtype}")
        return self if rows and rows % MULTIPLE == 0 else DENSE

    def forward(self, x: Tensor, joined: Joined) -> tuple[Tensor, Sequence[Tensor]]:
        """Return y and x in 8 bits, transposed: half of the bytes that the 16-bit product saves."""
        x_q, x_t = self.rounded(quantize, self.input, FINE, rows_of(x), both=WEIGHT_GRADIENT_IN_FP8)
        y = self.product(x_q, self.weights(joined)[0], x.dtype)
        y = y if joined.bias is None else y.add_(joined.bias)
        return y.view(*x.shape[:-1], -1), ((x_t,) if WEIGHT_GRADIENT_IN_FP8 else ())

    def backward(
        self, g: Tensor, x: Tensor | None, saved: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        g_q, g_t = self.rounded(quantize, self.gradient, GRADIENT, g, both=WEIGHT_GRADIENT_IN_FP8)
        dx = self.input_gradient(g_q, joined, g.dtype) if wants_dx else None
        if x is not None and not WEIGHT_GRADIENT_IN_FP8:
            return dx, weight_gradients(joined.weights, g, x)
        return dx, self.weight_gradients(joined.weights, g_t, saved[0])

    def product(self, x_q: Tensor, w_q: Tensor, dtype: torch.dtype) -> Tensor:
        return scaled_product(x_q, w_q, self.input[0], self.weight[0], dtype, fast=True)

    def input_gradient(self, g_q: Tensor, joined: Joined, dtype: torch.dtype) -> Tensor:
        return scaled_product(g_q, self.weights(joined)[1], self.gradient[0], self.weight[0], dtype)

    def weight_gradients(self, weights: Sequence[Tensor], g_t: Tensor, x_t: Tensor) -> tuple[Tensor | None, ...]:
        def product(out: Tensor | None) -> Tensor:
            return scaled_product(g_t, x_t, self.gradient[0], self.input[0], torch.float32, out=out)

        return deliver_product(weights, product, g_t, x_t)

    def rounded(self, op: Callable, state: Tensor, dtype: torch.dtype, *tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
        """Call `op` of kernels/quantize.py. While calibrating, the scale is first computed from these tensors."""
        if self._calibrating():
            state[0] = 1.0
            op(*tensors, state, dtype, **options)
            state[0] = SMALLEST  # zeros keep it: the next step may then choose freely
            renew(state)
        return op(*tensors, state, dtype, **options)

    def weights(self, joined: Joined) -> tuple[Tensor, Tensor]:
        """Return (q, its transpose) of the weight, rounded once for forward and backward of a micro-batch."""
        key = (joined.weight.data_ptr(), joined.weight.shape, *(p._version for p in joined.weights))
        if self._rounded is None or self._rounded[0] != key:
            self._rounded = (key, *self.rounded(quantize, self.weight, FINE, joined.weight))
        return self._rounded[1], self._rounded[2]

    def forget(self) -> None:
        """Drop the rounded weights, which have changed or will."""
        self._rounded = None

    def gated(self, x: Tensor, gates: Joined, down: Joined, least: float) -> Tensor | None:
        if not WEIGHT_GRADIENT_IN_FP8 or gates.bias is not None or torch.is_autocast_enabled(x.device.type):
            return None
        format = format_of(gates.weights[0]).select(x, gates.weights)
        return _Gated.apply(x, format, self, gates, down, *gates.weights, *down.weights) if type(format) is Fp8 else None


class _Gated(torch.autograd.Function):
    """down(silu(gate) · up). Between the products only [gate | up] is stored in 16 bits."""

    @staticmethod
    def forward(ctx, x, first, second, gates, down, *parameters):
        ctx.formats, ctx.gates, ctx.down, ctx.parameters = (first, second), gates, down, parameters
        ctx.versions, ctx.shape = [*map(VERSION, parameters)], x.shape
        x_q, x_t = first.rounded(quantize, first.input, FINE, rows_of(x))
        gate_up = first.product(x_q, first.weights(gates)[0], x.dtype)
        h_q, h_t = second.rounded(quantize_swiglu, second.input, FINE, gate_up)
        ctx.save_for_backward(x_t, gate_up, h_t)
        y = second.product(h_q, second.weights(down)[0], x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x_t, gate_up, h_t = ctx.saved_tensors
        (first, second), gates, down = ctx.formats, ctx.gates, ctx.down
        if [*map(VERSION, ctx.parameters)] != ctx.versions:
            raise changed_in_place()
        g_q, g_t = second.rounded(quantize, second.gradient, GRADIENT, rows_of(g))
        dh = second.input_gradient(g_q, down, g.dtype)
        d_down = second.weight_gradients(down.weights, g_t, h_t)
        d_q, d_t = first.rounded(quantize_swiglu_backward, first.gradient, GRADIENT, dh, gate_up)
        d_gates = first.weight_gradients(gates.weights, d_t, x_t)
        dx = first.input_gradient(d_q, gates, g.dtype).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, *d_gates, *d_down
