"""RMSNorm and RoPE of heads in a decoding step: DeepSeek-V4's queries, keys and attention output.

Legend: N tokens, H heads, D width of a head, P pairs: the last 2 P channels are rotated, adjacent channels forming a pair.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.checks import require
from ....kernels.decode_product import WRITTEN
from ....kernels.dispatch import implementation
from ....kernels.registry import definition, draw, ints, zeros
from .compressor import turned

MOST = 3  # tensors of heads per launch


class TurnedHeads(NamedTuple):
    """Input and output of one tensor of heads."""

    x: Tensor  # (N, H, D)
    out: Tensor  # (N, H, D)
    weight: Tensor | None = None  # (D,), the norm's gain
    eps: float | None = None  # of the norm. None: no norm
    # (N,) int32, distinct: index of each token in out, which is then (places, H, D), such as a ring buffer. Out-of-range tokens
    # are not written.
    slot: Tensor | None = None


def turn_heads(
    parts: Sequence[TurnedHeads], position: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    """Apply RMSNorm and RoPE to the heads of each part, in one launch: out = RoPE(x / √(mean square + eps) · weight).

    position  (N,) int32; a position outside cos makes its token's heads NaN
    cos, sin  (positions, P) fp32
    back      rotate by the negative angles
    """
    if not 1 <= len(parts) <= MOST:
        raise ValueError(f"turn_heads: got {len(parts)} tensors of heads, wanted 1 to {MOST}.")
    device, tokens = parts[0].x.device, len(parts[0].x)
    require("turn_heads", "position", position, torch.int32, (tokens,), device, "it says where each token stands")
    for name, t in (("cos", cos), ("sin", sin)):
        require("turn_heads", name, t, torch.float32, (*cos.shape[:1], *cos.shape[-1:]), device, "its rows are positions")
    if len(cos) == 0:
        raise ValueError("turn_heads: cos and sin must have a row for each position, got none.")
    for part in parts:
        _check(part, tokens, 2 * cos.shape[1], device)
    return implementation("turn_heads", parts[0].x, None, (len(parts),))(parts, position, cos, sin, back)


def _check(part: TurnedHeads, tokens: int, turning: int, device: torch.device) -> None:
    x, out, weight, eps, slot = part
    require("turn_heads", "x", x, None, (tokens, "heads", "width"), device, "a head follows the other")
    H, D = x.shape[1:]
    require("turn_heads", "out", out, None, (tokens if slot is None else "places", H, D), device, WRITTEN)
    if slot is not None:
        require("turn_heads", "slot", slot, torch.int32, (tokens,), device, "it says where each token is kept")
    if turning > D:
        raise ValueError(f"turn_heads: cos must have at most {D // 2} pairs for heads of {D}, got {turning // 2}.")
    if weight is not None:
        require("turn_heads", "weight", weight, None, (D,), device, "it has one number for each channel")
        if eps is None:
            raise ValueError("turn_heads: weight is of a norm, which eps=None leaves out; pass its eps.")


@definition(lambda g, parts=2: _example(g, parts))
@torch.no_grad()
def turn_heads_reference(
    parts: Sequence[TurnedHeads], position: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, ...]:  # fmt: skip
    known, place = (position >= 0) & (position < len(cos)), position.long().clamp(0, len(cos) - 1)
    cos, sin = (t.index_select(0, place)[:, None] for t in (cos, -sin if back else sin))
    return tuple(_turned_part(part, known, cos, sin) for part in parts)


def _turned_part(part: TurnedHeads, known: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, out, weight, eps, slot = part
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    y = turned(y, cos.to(wide), sin.to(wide)).masked_fill(~known[:, None, None], float("nan"))
    if slot is None:
        return out.copy_(y)
    inside, beside = (slot >= 0) & (slot < len(out)), torch.cat([out, out[:1]])
    return out.copy_(beside.index_copy_(0, torch.where(inside, slot, len(out)).long(), y.to(out.dtype))[:-1])


def _example(generator: torch.Generator, parts: int) -> tuple:
    """Draw heads with a norm and a gain; heads with a norm and slots; and heads without either."""
    angles = (draw(generator, 10, 12).detach().float() for _ in range(2))
    made = [
        TurnedHeads(draw(generator, 3, 2, 40), zeros(3, 2, 40), draw(generator, 40).detach(), 1e-6),
        TurnedHeads(draw(generator, 3, 1, 24), zeros(5, 1, 24), None, 1e-6, ints(4, -1, 0)),
        TurnedHeads(draw(generator, 3, 3, 32), zeros(3, 3, 32)),
    ]
    return made[:parts], ints(5, 0, 9), *angles
