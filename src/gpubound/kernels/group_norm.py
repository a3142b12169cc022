"""GroupNorm: x (N, C, *) is normalised over each of `groups` runs of channels with all that follows."""

from math import prod

import torch
from torch import Tensor

from .dispatch import implementation, require_columns, require_rows
from .norms import layer_norm_reference
from .registry import definition, draw


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """GroupNorm as torch's: x (N, C, *) is normed in `groups` groups of channels. Each channel has a weight and a bias."""
    require_rows("group_norm", x)
    if x.dim() < 2:
        raise ValueError(f"group_norm: x must have shape (samples, channels, ...), got {tuple(x.shape)}; add what is missing.")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: groups must divide x's {channels} channels, got {groups}; choose a divisor of {channels}."
        )
    require_columns("group_norm", x, (channels,), "channels", weight=weight, bias=bias)
    return implementation("group_norm", x)(x, groups, weight, bias, eps)


@definition(lambda g: (draw(g, 2, 6, 5, 7), 3, draw(g, 6), draw(g, 6), 1e-5))
def group_norm_reference(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    samples, channels, *positions = x.shape
    rows = x.to(compute_dtype).reshape(samples, groups, channels // groups * prod(positions))
    y = layer_norm_reference(rows, eps=eps).reshape(x.shape)
    per_channel = (channels, *(1 for _ in positions))
    if weight is not None:
        y = y * weight.to(compute_dtype).reshape(per_channel)
    if bias is not None:
        y = y + bias.to(compute_dtype).reshape(per_channel)
    return y.to(x.dtype)
