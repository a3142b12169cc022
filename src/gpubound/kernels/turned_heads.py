"""Heads of a decoding step, normed and turned by where their tokens stand: DeepSeek-V4's queries, keys and what it reads.

Legend: N tokens, H heads, D width of a head, P pairs: the last 2 P channels turn, neighbours being a pair.
"""

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .compressor import turned
from .decode_product import WRITTEN
from .ops import definition, draw, ints, zeros


def turn_heads(
    x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, out: Tensor, weight: Tensor | None = None, eps: float | None = None,
    back: bool = False, slot: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out (N, H, D) = each head of x (N, H, D), divided by the root of its mean square + eps, times weight, and turned.

    position  (N,) int32; one that the angles have no row of makes its token's heads NaN
    cos, sin  (positions, P) fp32
    weight    (D,). None: no gain
    eps       None: no norm. `back`: by the opposite of the angles
    slot      (N,) int32: out is (places, H, D), such as a ring of tokens, and this says which of them a token's heads become,
              each another; of one outside out, nothing is written
    """
    device = x.device
    require("turn_heads", "x", x, None, ("tokens", "heads", "width"), device, "a head follows the other")
    N, H, D = x.shape
    require("turn_heads", "position", position, torch.int32, (N,), device, "it says where each token stands")
    for name, t in (("cos", cos), ("sin", sin)):
        require("turn_heads", name, t, torch.float32, (*cos.shape[:1], *cos.shape[-1:]), device, "its rows are positions")
    require("turn_heads", "out", out, None, (N if slot is None else "places", H, D), device, WRITTEN)
    if slot is not None:
        require("turn_heads", "slot", slot, torch.int32, (N,), device, "it says where each token is kept")
    if len(cos) == 0:
        raise ValueError("turn_heads: cos and sin must have a row for each position, got none.")
    if 2 * cos.shape[1] > D:
        raise ValueError(f"turn_heads: cos must have at most {D // 2} pairs for heads of {D}, got {cos.shape[1]}.")
    if weight is not None:
        require("turn_heads", "weight", weight, None, (D,), device, "it has one number for each channel")
        if eps is None:
            raise ValueError("turn_heads: weight is of a norm, which eps=None leaves out; pass its eps.")
    return implementation("turn_heads", x)(x, position, cos, sin, out, weight, eps, back, slot)


@definition(
    lambda g: (
        draw(g, 3, 2, 40), ints(5, 0, 9), *(draw(g, 10, 12).detach().float() for _ in range(2)), zeros(3, 2, 40),
        draw(g, 40).detach(), 1e-6
    )
)  # fmt: skip
@torch.no_grad()
def turn_heads_reference(
    x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, out: Tensor, weight: Tensor | None = None, eps: float | None = None,
    back: bool = False, slot: Tensor | None = None,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    y, place = x.to(wide), position.long()
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    known, place = (place >= 0) & (place < len(cos)), place.clamp(0, len(cos) - 1)
    cos, sin = (t.index_select(0, place)[:, None].to(wide) for t in (cos, sin))
    y = turned(y, cos, -sin if back else sin).masked_fill(~known[:, None, None], float("nan"))
    if slot is None:
        return out.copy_(y)
    inside, beside = (slot >= 0) & (slot < len(out)), torch.cat([out, out[:1]])
    return out.copy_(beside.index_copy_(0, torch.where(inside, slot, len(out)).long(), y.to(out.dtype))[:-1])
