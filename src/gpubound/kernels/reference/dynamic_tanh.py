"""Dynamic tanh: y = tanh(alpha · x) · weight + bias, a norm without statistics (Zhu et al. 2025, arXiv 2503.10622)."""

import torch
from torch import Tensor


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`alpha` holds one element; `weight` and `bias` one for each of x's last dimension."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.tanh(alpha.to(wide).reshape(()) * x.to(wide)) * weight.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
