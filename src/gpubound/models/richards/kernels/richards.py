"""Richards curves as ops: one by itself, the gated unit of two, and that unit's backward as an op.

    richards        y = f(x)
    richards_glu    h = x1 · f_v(x1) · f_g(x2)        of one packed tensor [x1 | x2]

curve.py has the formula of f. With both curves at their defaults h is silu(x1) · sigmoid(x2).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ....kernels.checks import require_device, require_last
from ....kernels.dispatch import implementation
from ....kernels.gated import check_half
from ....kernels.registry import definition, draw, load
from .curve import Curve as Curve

VALUE = Curve(("nu", "k", "m", "bias"), "free", tail=True)
"""A value's curve. gain is left out: it stretches all of h, as the product behind does, and bias alone sets how much of x1
passes by the curve. beta is left out: m moves the curve already."""
GATE = Curve(("nu", "k", "m"), tail=True)
"""A gate's: from 0 to 1. k stands for the temperature too."""


def richards(x: Tensor, free: Tensor | None, curve: Curve) -> Tensor:
    """f(x) by element. `free` holds what the curve learns, in the order of `curve.learned`: None where that is nothing."""
    require_last("richards", "x", x, "with a last dimension")
    require_free("richards", "free", free, curve, x)
    return chosen("richards", x, (curve,))(x, free, curve)


@definition(lambda g, curve=VALUE: (draw(g, 3, 40), draw_free(g, curve), curve))
def richards_reference(x: Tensor, free: Tensor | None, curve: Curve) -> Tensor:
    return curve.apply(_wide(x), free).to(x.dtype)


def richards_glu(
    packed: Tensor, value_free: Tensor | None, gate_free: Tensor | None, value_curve: Curve, gate_curve: Curve
) -> Tensor:
    """x1 · f_v(x1) · f_g(x2) of packed [x1 | x2] (..., 2 H): (..., H)."""
    _check_glu("richards_glu", packed, value_free, gate_free, value_curve, gate_curve)
    shape = packed.shape[-1] // 2, value_curve, gate_curve
    return chosen("richards_glu", packed, shape)(packed, value_free, gate_free, value_curve, gate_curve)


@definition(lambda g, cols=40, value=VALUE, gate=GATE: (draw(g, 16, 2 * cols), *_draw_frees(g, value, gate), value, gate))
def richards_glu_reference(
    packed: Tensor, value_free: Tensor | None, gate_free: Tensor | None, value_curve: Curve, gate_curve: Curve
) -> Tensor:
    x1, x2 = _wide(packed).chunk(2, -1)
    return (x1 * value_curve.apply(x1, value_free) * gate_curve.apply(x2, gate_free)).to(packed.dtype)


def richards_glu_backward(
    dh: Tensor,
    packed: Tensor,
    value_free: Tensor | None,
    gate_free: Tensor | None,
    value_curve: Curve,
    gate_curve: Curve,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(gradient of packed (..., 2 H), h, gradients of value_free and gate_free in fp32) from dh (..., H).

    It serves an autograd.Function that multiplies by h and does not keep h until backward: h is computed again here.
    """
    _check_glu("richards_glu_backward", packed, value_free, gate_free, value_curve, gate_curve)
    check_half("richards_glu_backward", dh, packed, "packed", "richards_glu")
    arguments = dh, packed, value_free, gate_free, value_curve, gate_curve
    return chosen("richards_glu_backward", packed, (dh.shape[-1], value_curve, gate_curve))(*arguments)


@definition(
    lambda g, cols=40, value=VALUE, gate=GATE: (
        draw(g, 16, cols),
        draw(g, 16, 2 * cols),
        *_draw_frees(g, value, gate),
        value,
        gate,
    )
)
def richards_glu_backward_reference(
    dh: Tensor,
    packed: Tensor,
    value_free: Tensor | None,
    gate_free: Tensor | None,
    value_curve: Curve,
    gate_curve: Curve,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    wide = [None if t is None else _wide(t.detach()).requires_grad_() for t in (packed, value_free, gate_free)]
    assert wide[0] is not None
    with torch.enable_grad():
        h = richards_glu_reference(wide[0], wide[1], wide[2], value_curve, gate_curve)
        found = iter(torch.autograd.grad(h, [t for t in wide if t is not None], dh.to(h.dtype)))
    gradient, value, gate = (None if t is None else next(found) for t in wide)
    assert gradient is not None
    return gradient.to(packed.dtype), h.detach().to(packed.dtype), value, gate


def chosen(op: str, x: Tensor, shape: tuple, unable: str | None = None) -> Callable:
    """Its implementation. torch.compile takes the definition: pointwise as it is, the compiler fuses it itself."""
    return load("reference", op) if torch.compiler.is_compiling() else implementation(op, x, unable, shape)


def require_free(op: str, name: str, free: Tensor | None, curve: Curve, x: Tensor) -> None:
    """`free` is what `curve` wants beside x."""
    if (free is None) if curve.learned else (free is not None):
        wanted = f"hold its learned {', '.join(curve.learned)}" if curve.learned else "be None"
        got = "None" if free is None else f"shape {tuple(free.shape)}"
        raise ValueError(f"{op}: {name} must {wanted} to match its curve, got {got}; RichardsCurve keeps both together.")
    if free is None:
        return
    if free.shape != (len(curve.learned),) or not free.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating point of shape ({len(curve.learned)},), for {', '.join(curve.learned)}, "
            f"got {free.dtype} {tuple(free.shape)}; begin with its curve's start()."
        )
    require_device(op, name, free, x)


def draw_free(generator: torch.Generator, curve: Curve) -> Tensor | None:
    """For a self-test: near the start, every number apart from its neighbours."""
    if not curve.learned:
        return None
    start = torch.tensor(curve.start(), device="cpu", dtype=torch.float32)
    return (start + 0.2 * draw(generator, len(curve.learned)).detach()).requires_grad_()


def _draw_frees(generator: torch.Generator, value: Curve, gate: Curve) -> tuple[Tensor | None, Tensor | None]:
    return draw_free(generator, value), draw_free(generator, gate)


def _check_glu(op: str, packed: Tensor, value_free: Tensor | None, gate_free: Tensor | None, value: Curve, gate: Curve) -> None:
    require_last(op, "packed", packed, "with a last dimension")
    if packed.shape[-1] % 2:
        raise ValueError(
            f"{op}: packed [x1 | x2] needs an even last dimension, got {tuple(packed.shape)}; join two halves of one width."
        )
    require_free(op, "value_free", value_free, value, packed)
    require_free(op, "gate_free", gate_free, gate, packed)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
