"""Layers that stand in a norm's place: a bounded function of each element, then a gain and a bias for each column.

    dynamic_tanh     y = tanh(alpha · x) · weight + bias         Zhu et al. 2025, arXiv 2503.10622
    richards_norm    y = f(x) · weight + bias                    f a Richards curve (curve.py)

There are no statistics: a row's numbers do not depend on each other. Each has a form that takes the residual add inside.
"""

import torch
from torch import Tensor

from ....kernels.checks import require_device, require_residual, require_rows, too_wide
from ....kernels.dispatch import implementation
from ....kernels.registry import definition, draw
from .curve import Curve
from .richards import chosen, draw_free, require_free

NORM = Curve(("nu", "k", "m"), "tanh", k=0.5)
"""What a norm's place is given by default: tanh(x / 2), as Zhu et al. begin. k is their alpha."""


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """tanh(alpha · x) · weight + bias, a norm without statistics. `alpha` is a tensor of one element."""
    _check_tanh("dynamic_tanh", x, alpha, weight, bias)
    return implementation("dynamic_tanh", x, too_wide(x), x.shape[-1:])(x, alpha, weight, bias)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 1), draw(g, cols), draw(g, cols)))
def dynamic_tanh_reference(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return _scaled(torch.tanh(alpha.to(wide).reshape(()) * x.to(wide)), weight, bias).to(x.dtype)


def add_dynamic_tanh(
    x: Tensor, residual: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s) with s = x + residual and y = dynamic_tanh(s): the residual is added in the same pass."""
    _check_tanh("add_dynamic_tanh", x, alpha, weight, bias)
    require_residual("add_dynamic_tanh", residual, x)
    return implementation("add_dynamic_tanh", x, too_wide(x), x.shape[-1:])(x, residual, alpha, weight, bias)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 3, cols), draw(g, 1), draw(g, cols), draw(g, cols)))
def add_dynamic_tanh_reference(
    x: Tensor, residual: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    s = x + residual  # rounded once to x.dtype
    return dynamic_tanh_reference(s, alpha, weight, bias), s


def richards_norm(x: Tensor, free: Tensor | None, curve: Curve, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """f(x) · weight + bias. `free` holds what the curve learns, as for `richards`."""
    require_rows("richards_norm", x, weight=weight, bias=bias)
    require_free("richards_norm", "free", free, curve, x)
    return chosen("richards_norm", x, (x.shape[-1], curve), too_wide(x))(x, free, curve, weight, bias)


@definition(lambda g, cols=40, curve=NORM: (draw(g, 3, cols), draw_free(g, curve), curve, draw(g, cols), draw(g, cols)))
def richards_norm_reference(x: Tensor, free: Tensor | None, curve: Curve, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return _scaled(curve.apply(x.to(wide), free), weight, bias).to(x.dtype)


def add_richards_norm(
    x: Tensor, residual: Tensor, free: Tensor | None, curve: Curve, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s) with s = x + residual and y = richards_norm(s): the residual is added in the same pass."""
    require_rows("add_richards_norm", x, weight=weight, bias=bias)
    require_residual("add_richards_norm", residual, x)
    require_free("add_richards_norm", "free", free, curve, x)
    function = chosen("add_richards_norm", x, (x.shape[-1], curve), too_wide(x))
    return function(x, residual, free, curve, weight, bias)


@definition(
    lambda g, cols=40, curve=NORM: (
        *(draw(g, 3, cols), draw(g, 3, cols)),
        *(draw_free(g, curve), curve, draw(g, cols), draw(g, cols)),
    )
)
def add_richards_norm_reference(
    x: Tensor, residual: Tensor, free: Tensor | None, curve: Curve, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    s = x + residual  # rounded once to x.dtype
    return richards_norm_reference(s, free, curve, weight, bias), s


def _scaled(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _check_tanh(op: str, x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_rows(op, x, weight=weight, bias=bias)
    if alpha.numel() != 1:
        raise ValueError(f"{op}: alpha must hold one element, got shape {tuple(alpha.shape)}; reduce it before the call.")
    require_device(op, "alpha", alpha, x)
