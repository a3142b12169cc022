"""Several products of one norm's output in a launch, for a step of few rows: what DeepSeek-V4's attention reads of a token.

`norm_product` (decode_product.py) takes up to three weights, a bias and adapters; this takes up to MOST, and neither.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .decode_product import WRITTEN, Norm, check_stream, draw_stream, form, rms_normed
from .ops import definition, draw, zeros

MOST = 8  # weights


def norm_products(x: Tensor, norm: Norm | None, weights: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """out (B, rows of all weights, fp32) = rms_norm(x), or x, times each weight, side by side.

    x        (B, columns) fp32
    weights  (rows, columns) each, of one dtype
    """
    if not 1 <= len(weights) <= MOST:
        raise ValueError(f"norm_products: got {len(weights)} weights, wanted 1 to {MOST}; of more, call it again.")
    check_stream("norm_products", x, norm, *weights)
    rows = sum(len(weight) for weight in weights)
    if out is None:
        out = torch.empty(len(x), rows, device=x.device, dtype=torch.float32)
    require("norm_products", "out", out, torch.float32, (len(x), rows), x.device, WRITTEN)
    return implementation("norm_products", weights[0], None, form(norm))(x, norm, weights, out)


@definition(lambda g, offset=0.0: (*draw_stream(g, 48, offset), [draw(g, r, 48) for r in (32, 16, 8, 7, 16)], zeros(2, 79)))
@torch.no_grad()
def norm_products_reference(x: Tensor, norm: Norm | None, weights: Sequence[Tensor], out: Tensor) -> Tensor:
    normed = rms_normed(x, norm)
    return out.copy_(torch.cat([normed @ weight.to(x.dtype).t() for weight in weights], -1))
