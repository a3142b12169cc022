"""Products in 8 bits: y = x Wᵀ with x and W in e4m3, both gradients from dy in e5m2 and the same x and W, summed in fp32.

A Hopper GPU multiplies 8-bit floats twice as fast as 16-bit ones. They have 2 or 3 bits behind the leading one and a narrow
range, so every tensor has a scale of its own, by which it is divided before it is rounded. The scale follows the largest
magnitude that was seen in the steps before: known in advance, it lets one pass read the tensor, round it and write both layouts
that the products need (kernels/quantize.py). Within a gated MLP the activation's kernels give 8 bits themselves, and its
hidden state is never stored in 16.

A weight that takes part carries `weight.fp8`, a Site. train/fp8.py makes the sites, renews their scales once a step and takes
them off again. Without gradients (evaluation) products stay in the weights' own 16 bits.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import quantize, quantize_swiglu, quantize_swiglu_backward
from ..kernels.accumulate import bias_gradients, deliver_product, weight_gradients
from ..kernels.quantize import LARGEST, MULTIPLE, scaled_product
from ..trace import fallback

FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT = WIDE
WEIGHT_GRADIENT_IN_FP8 = True  # False: from x and dy in 16 bits, a third of the arithmetic at half the rate
MARGIN = 2.0  # how far a tensor may outgrow the largest magnitude seen before it is cut off; costs range, not precision
SMALLEST = 2.0**-100
DECAY = 0.9  # of a scale at each step: a spike is forgotten within some twenty

STATE = 4  # numbers of a tensor's state: its scale, the largest magnitude seen, the scale of a magnitude of 1, one unused
ROLES = ((FINE, "input"), (FINE, "weight"), (GRADIENT, "output gradient"))


def new_states(sites: int, device: torch.device) -> Tensor:
    """(sites, roles, STATE) in fp32, 16 bytes apart as cuBLAS likes its scales. A scale of 0 is not found yet."""
    unit = torch.tensor([MARGIN / LARGEST[dtype] for dtype, _ in ROLES])
    states = torch.zeros(sites, len(ROLES), STATE)
    states[..., 2] = unit
    return states.to(device)


@torch.no_grad()
def renew(states: Tensor) -> None:
    """New scales from what was seen since the last time, on the device. What saw nothing finite keeps its scale."""
    scale, seen, unit, _ = states.unbind(-1)
    useful = seen.isfinite() & (seen > 0)
    scale.copy_(torch.where(useful, torch.maximum(seen * unit, scale * DECAY), scale))
    seen.zero_()


@torch.no_grad()
def settle(states: Tensor) -> None:
    """Scales from what was seen alone. Zeros get the smallest: the next step's `renew` may then choose freely."""
    scale, seen, unit, _ = states.unbind(-1)
    useful = seen.isfinite() & (seen > 0)
    scale.copy_(torch.where(useful, seen * unit, SMALLEST))
    seen.zero_()


class Site:
    """The 8-bit side of one weight, or of several multiplied as one: their first one's."""

    def __init__(self, states: Tensor, calibrating: Callable[[], bool]):
        self.input, self.weight, self.gradient = states.unbind()
        self._calibrating = calibrating
        self._kept: tuple[tuple, Tensor, Tensor] | None = None

    def rounded(self, op: Callable, state: Tensor, dtype: torch.dtype, *tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
        """`op` of kernels/quantize.py on `tensors`. While calibrating, the scale is first made from these very tensors."""
        if self._calibrating():
            state[0] = 1.0
            op(*tensors, state, dtype, **options)
            settle(state)
        return op(*tensors, state, dtype, **options)

    def weights(self, whole: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(q, its transpose) of the weight, rounded once for forward and backward of a micro-batch."""
        now = (whole.data_ptr(), whole.shape, *(p._version for p in parameters))
        if self._kept is None or self._kept[0] != now:
            self._kept = (now, *self.rounded(quantize, self.weight, FINE, whole))
        return self._kept[1], self._kept[2]

    def forget(self) -> None:
        """The weights have changed, or will."""
        self._kept = None


def site_of(weights: Sequence[Tensor], x: Tensor) -> Site | None:
    """The site to multiply by, or None when this product stays in 16 bits."""
    sites = [getattr(weight, "fp8", None) for weight in weights]
    if any(site is None for site in sites) or x.dtype != weights[0].dtype or torch.compiler.is_compiling():
        return None
    rows = x.numel() // x.shape[-1]
    if rows == 0 or rows % MULTIPLE:
        if rows:
            fallback("fp8 product", f"{rows} tokens are no multiple of {MULTIPLE}; it is computed in {x.dtype}")
        return None
    return sites[0]


def multiply(
    x: Tensor, site: Site, whole: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """x wholeᵀ + bias in 8 bits. All of `weights` take gradients."""
    return _Product.apply(x, site, whole, bias, len(weights), *weights, *biases)


def gated(x: Tensor, stack: tuple, down: Tensor) -> Tensor | None:
    """down(silu(gate) · up) as one function, gate and up in `stack` (Stacked.parts); None when not all of it fits."""
    whole, bias, weights, _ = stack
    if not WEIGHT_GRADIENT_IN_FP8 or bias is not None:
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    if (down_site := getattr(down, "fp8", None)) is None or (site := site_of(weights, x)) is None:
        return None
    return _Gated.apply(x, site, down_site, whole, down.detach(), *weights, down)


def _product_forward(x_q: Tensor, site: Site, w_q: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_product(x_q, w_q, site.input[0], site.weight[0], dtype, fast=True)


def _input_gradient(g_q: Tensor, site: Site, w_t: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_product(g_q, w_t, site.gradient[0], site.weight[0], dtype)


def _weight_gradients(weights: Sequence[Tensor], g_t: Tensor, x_t: Tensor, site: Site) -> tuple[Tensor | None, ...]:
    def product(out: Tensor | None) -> Tensor:
        return scaled_product(g_t, x_t, site.gradient[0], site.input[0], torch.float32, out=out)

    return deliver_product(weights, product, g_t, x_t)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Product(torch.autograd.Function):
    """As layers/linear_site.py's, in 8 bits. Saved is x in 8 bits, transposed: half of what the 16-bit product keeps."""

    @staticmethod
    def forward(ctx, x, site, whole, bias, count, *parameters):
        ctx.site, ctx.whole, ctx.count, ctx.parameters = site, whole, count, parameters
        ctx.versions, ctx.shape = [p._version for p in parameters], x.shape
        x_q, x_t = site.rounded(quantize, site.input, FINE, _rows(x), both=WEIGHT_GRADIENT_IN_FP8)
        ctx.save_for_backward(x_t if WEIGHT_GRADIENT_IN_FP8 else x)
        y = _product_forward(x_q, site, site.weights(whole, parameters)[0], x.dtype)
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,), site = ctx.saved_tensors, ctx.site
        _check_versions(ctx)
        weights, biases = ctx.parameters[: ctx.count], ctx.parameters[ctx.count :]
        flat_g = _rows(g)
        g_q, g_t = site.rounded(quantize, site.gradient, GRADIENT, flat_g, both=WEIGHT_GRADIENT_IN_FP8)
        dx = None
        if ctx.needs_input_grad[0]:
            w_t = site.weights(ctx.whole, ctx.parameters)[1]
            dx = _input_gradient(g_q, site, w_t, g.dtype).view(ctx.shape)
        dw = _weight_gradients(weights, g_t, x, site) if WEIGHT_GRADIENT_IN_FP8 else weight_gradients(weights, flat_g, _rows(x))
        db = bias_gradients(biases, ctx.needs_input_grad[5 + ctx.count :], flat_g)
        return dx, None, None, None, None, *dw, *db


class _Gated(torch.autograd.Function):
    """down(silu(gate) · up). Between the products nothing but [gate | up] is stored in 16 bits, and nothing else is kept so."""

    @staticmethod
    def forward(ctx, x, site, down_site, whole, down, *parameters):
        ctx.sites, ctx.whole, ctx.down, ctx.parameters = (site, down_site), whole, down, parameters
        ctx.versions, ctx.shape = [p._version for p in parameters], x.shape
        x_q, x_t = site.rounded(quantize, site.input, FINE, _rows(x))
        gate_up = _product_forward(x_q, site, site.weights(whole, parameters[:-1])[0], x.dtype)
        h_q, h_t = down_site.rounded(quantize_swiglu, down_site.input, FINE, gate_up)
        ctx.save_for_backward(x_t, gate_up, h_t)
        y = _product_forward(h_q, down_site, down_site.weights(down, parameters[-1:])[0], x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x_t, gate_up, h_t = ctx.saved_tensors
        (site, down_site), gates, down = ctx.sites, ctx.parameters[:-1], ctx.parameters[-1:]
        _check_versions(ctx)
        g_q, g_t = down_site.rounded(quantize, down_site.gradient, GRADIENT, _rows(g))
        dh = _input_gradient(g_q, down_site, down_site.weights(ctx.down, down)[1], g.dtype)
        d_down = _weight_gradients(down, g_t, h_t, down_site)
        d_q, d_t = site.rounded(quantize_swiglu_backward, site.gradient, GRADIENT, dh, gate_up)
        d_gates = _weight_gradients(gates, d_t, x_t, site)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(d_q, site, site.weights(ctx.whole, gates)[1], g.dtype).view(ctx.shape)
        return dx, None, None, None, None, *d_gates, *d_down


def _check_versions(ctx) -> None:
    if [p._version for p in ctx.parameters] != ctx.versions:
        raise RuntimeError(
            "a weight of an fp8 product was changed in place between forward and backward, so its gradient would be wrong; "
            "step the optimizer after backward."
        )
