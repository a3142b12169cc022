"""Dynamic tanh: y = tanh(alpha · x) · weight + bias, a norm without statistics (Zhu et al. 2025, arXiv 2503.10622)."""

import torch
from torch import Tensor

from .checks import require_device, require_rows, too_wide
from .choose import implementation
from .ops import definition
from .selftest import draw


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """tanh(alpha · x) · weight + bias, a norm without statistics. `alpha` is a tensor of one element."""
    require_rows("dynamic_tanh", x, weight=weight, bias=bias)
    if alpha.numel() != 1:
        raise ValueError(
            f"dynamic_tanh: alpha must hold one element, got shape {tuple(alpha.shape)}; reduce it before the call."
        )
    require_device("dynamic_tanh", "alpha", alpha, x)
    return implementation("dynamic_tanh", x, too_wide(x), x.shape[-1:])(x, alpha, weight, bias)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, 1), draw(g, cols), draw(g, cols)))
def dynamic_tanh_reference(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`alpha` holds one element; `weight` and `bias` one for each of x's last dimension."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(wide).reshape(()) * x.to(wide)) * weight.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
