"""Gated activations, f(gate) · up, of one packed tensor [gate | up] or of two. SwiGLU's backward as an op, and both with the
product before them.

SwiGLU has f = silu, silu(g) = g · sigmoid(g). GeGLU has gelu: "none" is gelu(g) = g · Φ(g) with the normal distribution Φ,
"tanh" its usual approximation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import implementation, require_device, require_last
from .registry import definition, draw, frozen

INFINITE = float("inf")
LEAST_ROWS = 4096  # of a product whose epilogue computes the unit. With fewer, cuBLAS and another pass are about as fast
PRODUCT = 256, 128, LEAST_ROWS  # arguments of an example that takes that kernel, whose code depends on no size


def swiglu(gate: Tensor, up: Tensor | None = None, limit: float = INFINITE) -> Tensor:
    """silu(gate) · up. Pass both, or one packed tensor (..., 2 I) that holds [gate | up]. The result is (..., I).

    limit  a gate counts as at most this, an up as within it. What lies beyond has no gradient
    """
    shape = _checked("swiglu", gate, up)
    if limit != INFINITE:
        check_limit("swiglu", limit)
    return implementation("swiglu", gate, None, shape)(gate, up, limit)


@definition(lambda g, cols=40, packed=True: _draw_gated(g, cols, packed), gradient=True)
def swiglu_reference(gate, up=None, limit=INFINITE):
    gate_half, up_half = _halves(gate, up)
    if limit != INFINITE:
        gate_half, up_half = gate_half.clamp(max=limit), up_half.clamp(-limit, limit)
    return (F.silu(gate_half) * up_half).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up, packed or separate as in `swiglu`. `approximate` is as in torch's gelu: "tanh", or "none" for exact."""
    if approximate not in ("tanh", "none"):
        raise ValueError(
            f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}; take the one the model was trained with."
        )
    shape = _checked("geglu", gate, up)
    return implementation("geglu", gate, None, shape)(gate, up, approximate)


@definition(lambda g, cols=40, packed=False: (*_draw_gated(g, cols, packed), "tanh"), gradient=True)
def geglu_reference(gate, up=None, approximate="tanh"):
    gate_half, up_half = _halves(gate, up)
    return (F.gelu(gate_half, approximate=approximate) * up_half).to(gate.dtype)


def gated(activation: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return activation(gate) · up, by SwiGLU or GeGLU. `gate` alone is the packed product [gate | up]."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def swiglu_backward(dh: Tensor, gate_up: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """(gradient of the packed gate_up (..., 2 I), h) from dh (..., I), the gradient of h = silu(gate) · up.

    It serves an autograd.Function that multiplies by h and does not keep h until backward: h is computed again here. With
    `overwrite`, for a caller that needs neither argument any longer, the results may be in their memory.
    """
    _checked("swiglu_backward", gate_up, None)
    check_half("swiglu_backward", dh, gate_up)
    return implementation("swiglu_backward", gate_up, None, dh.shape[-1:])(dh, gate_up, overwrite)


@definition(lambda g, cols=40: (draw(g, 16, cols), draw(g, 16, 2 * cols)))
def swiglu_backward_reference(dh, gate_up, overwrite=False):
    gate, up = _halves(gate_up, None)
    d, s = dh.to(gate.dtype), torch.sigmoid(gate)
    gradient = torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1)
    return gradient.to(gate_up.dtype), (gate * s * up).to(gate_up.dtype)


def swiglu_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate_up (N, 2 I) = x weightᵀ of rows x (N, K) and weight (2 I, K), and h (N, I) = silu(gate) · up."""
    _check_product("swiglu_product", x, weight, (2 * (weight.shape[0] // 2), x.shape[-1]))
    return implementation("swiglu_product", x, None, PRODUCT)(x, weight)


@definition(
    lambda g, cols=40, width=24, rows=16: (draw(g, rows, width), frozen(draw(g, 2 * cols, width))), tf32=lambda *_: True
)
def swiglu_product_reference(x, weight):
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    gate_up = (x.to(compute_dtype) @ weight.to(compute_dtype).t()).to(x.dtype)
    return gate_up, swiglu_reference(gate_up)


def swiglu_product_backward(g: Tensor, weight: Tensor, gate_up: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up (N, 2 I), and h (N, I) = silu(gate) · up, from g (N, K), the gradient of y = h weightᵀ.

    weight     (K, I)
    overwrite  the caller no longer needs gate_up, in whose memory its gradient may be
    """
    _check_product("swiglu_product_backward", g, weight, (g.shape[-1], weight.shape[-1]))
    half = g.shape[0], 2 * weight.shape[1]
    if gate_up.shape != half or gate_up.dtype != g.dtype or gate_up.device != g.device:
        raise ValueError(
            f"swiglu_product_backward: gate_up must be {half} {g.dtype} on {g.device} to match g and weight, "
            f"got {tuple(gate_up.shape)} {gate_up.dtype} on {gate_up.device}; pass the packed product of forward."
        )
    return implementation("swiglu_product_backward", g, None, PRODUCT)(g, weight, gate_up, overwrite)


@definition(
    lambda g, cols=40, width=24, rows=16: (draw(g, rows, width), frozen(draw(g, width, cols)), draw(g, rows, 2 * cols)),
    tf32=lambda *_: True,
)
def swiglu_product_backward_reference(g, weight, gate_up, overwrite=False):
    compute_dtype = torch.promote_types(g.dtype, torch.float32)
    dh = g.to(compute_dtype) @ weight.to(compute_dtype)
    gradient, h = swiglu_backward_reference(dh, gate_up.to(compute_dtype))
    return gradient.to(g.dtype), h.to(g.dtype)


def clamped_glu(packed: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss' unit of packed (..., 2 I), in which gate and up alternate: (up + 1) · gate · sigmoid(alpha · gate) (..., I).

    limit  as in `swiglu`
    """
    _checked("clamped_glu", packed, None)
    check_limit("clamped_glu", limit)
    return implementation("clamped_glu", packed)(packed, alpha, limit)


@definition(lambda g: (draw(g, 16, 80), 1.7, 0.8), gradient=True)
def clamped_glu_reference(packed, alpha, limit):
    pairs = packed.to(torch.promote_types(packed.dtype, torch.float32))
    gate, up = pairs[..., ::2].clamp(max=limit), pairs[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(packed.dtype)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.promote_types(gate.dtype, torch.float32)
    gate_half, up_half = gate.chunk(2, -1) if up is None else (gate, up)
    return gate_half.to(compute_dtype), up_half.to(compute_dtype)


def _draw_gated(generator, cols, packed):
    if packed:
        return draw(generator, 16, 2 * cols), None
    return draw(generator, 16, cols), draw(generator, 16, cols)


def _checked(op: str, gate: Tensor, up: Tensor | None) -> tuple[int, bool]:
    """Return the columns of a half, and whether both halves are one tensor."""
    require_last(op, "gate", gate, "with a last dimension")
    if up is None and gate.shape[-1] % 2:
        raise ValueError(
            f"{op}: a packed [gate | up] needs an even last dimension, got {tuple(gate.shape)}; pass gate and up apart instead."
        )
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device):
        raise ValueError(
            f"{op}: up must match gate, {tuple(gate.shape)} {gate.dtype} on {gate.device}, "
            f"got {tuple(up.shape)} {up.dtype} on {up.device}; cast, move or reshape it before the call."
        )
    return (gate.shape[-1] // 2, True) if up is None else (gate.shape[-1], False)


def _check_product(op: str, x: Tensor, weight: Tensor, shape: tuple[int, int]) -> None:
    first = "g" if op.endswith("backward") else "x"
    if x.dim() != 2 or tuple(weight.shape) != shape or weight.dtype != x.dtype:
        raise ValueError(
            f"{op}: {first} must be a matrix and weight {shape} of its dtype {x.dtype}, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)} {weight.dtype}; reshape {first} to rows, and cast one of them."
        )
    require_device(op, x, weight=weight)


def check_limit(op: str, limit: float) -> None:
    if not limit > 0:
        raise ValueError(f"{op}: limit must be more than 0, got {limit}; leave it out for none.")


def check_half(op: str, dh: Tensor, packed: Tensor, name: str = "gate_up", unit: str = "SwiGLU") -> None:
    """dh is the gradient of what the packed tensor of that name gives, which `unit` is called."""
    half = (*packed.shape[:-1], packed.shape[-1] // 2)
    if dh.shape != half or dh.dtype != packed.dtype or dh.device != packed.device:
        raise ValueError(
            f"{op}: dh must be half of {name}, {half} {packed.dtype} on {packed.device}, "
            f"got {tuple(dh.shape)} {dh.dtype} on {dh.device}; pass the gradient of its {unit}."
        )
