"""LayerNorm over the last dimension: y = (x − mean) / sqrt(var + eps) · weight + bias."""

import torch
from torch import Tensor

from .checks import require_rows, too_wide
from .choose import implementation
from .ops import definition
from .selftest import draw


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last dimension."""
    require_rows("layer_norm", x, weight=weight, bias=bias)
    return implementation("layer_norm", x, too_wide(x), x.shape[-1:])(x, weight, bias, eps)


@definition(lambda g, cols=40: (draw(g, 3, cols), draw(g, cols), draw(g, cols), 1e-5))
def layer_norm_reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide)
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
