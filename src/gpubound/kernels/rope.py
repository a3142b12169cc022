"""Rotary position embedding: each pair (x_i, x_{i+P}) of a head is turned by the token's angle θ_i.

Legend: B batch, T tokens, H heads, D head size, P pairs turned. P = D/2 turns the whole head; with fewer, 2P..D pass.
cos and sin are constants here: no gradient reaches them.
"""

import torch
from torch import Tensor

from .dispatch import implementation
from .registry import definition, draw


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, T, heads, D) and k (B, T, kv_heads, D) rotated by the angles of their tokens. Any strides in, contiguous out.

    cos and sin are float32, (T, P) or (B, T, P), for the pairs (i, i + P) of each head ("rotate half", as Hugging Face does).
    P = D/2 rotates whole heads. With fewer pairs the dimensions from 2P on stay unchanged. cos and sin get no gradient.
    """
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"rope: {name} must be a floating-point tensor (batch, tokens, heads, head size), got {x.dtype} "
                f"{tuple(x.shape)}; bring it into that shape before the call."
            )
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or k.dtype != q.dtype or k.device != q.device:
        raise ValueError(
            f"rope: k must match q in all but its heads (dimension -2), {tuple(q.shape)} {q.dtype} on {q.device}, "
            f"got {tuple(k.shape)} {k.dtype} on {k.device}; cast, move or reshape one of them before the call."
        )
    _check_angles("rope", cos, sin, q.shape, q.shape[3], q.device)
    shape = q.shape[2], k.shape[2], q.shape[3], cos.shape[-1]
    return implementation("rope", q, None, shape)(q, k, cos, sin)


def _example(generator, heads=4, kv_heads=2, size=16, pairs=8):
    q, k = (draw(generator, 2, 3, count, size) for count in (heads, kv_heads))
    return q, k, *draw_angles(generator, 3, pairs)


@definition(_example, gradient=True)
def rope_reference(q, k, cos, sin):
    return _turned(q, cos, sin), _turned(k, cos, sin)


def rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of the packed product qkv (B, T, (heads + 2 kv_heads) D), q and k rotated as in `rope`. Each is contiguous.

    Backward writes the gradient of qkv as one packed tensor, so the product's backward stacks nothing.
    """
    total = heads + 2 * kv_heads
    if heads < 1 or kv_heads < 1:
        raise ValueError(f"rope_qkv: heads and kv_heads must be at least 1, got {heads} and {kv_heads}; pass the model's own.")
    if qkv.dim() != 3 or not qkv.is_floating_point() or qkv.shape[2] == 0 or qkv.shape[2] % total:
        raise ValueError(
            f"rope_qkv: qkv must be a floating-point tensor (batch, tokens, {total} heads x head size), got {qkv.dtype} "
            f"{tuple(qkv.shape)}; its rows hold {heads} q heads, then {kv_heads} k heads, then {kv_heads} v heads."
        )
    _check_angles("rope_qkv", cos, sin, qkv.shape, qkv.shape[2] // total, qkv.device)
    shape = heads, kv_heads, qkv.shape[2] // total, cos.shape[-1]
    return implementation("rope_qkv", qkv, None, shape)(qkv, cos, sin, heads, kv_heads)


def _packed_example(generator, heads=4, kv_heads=2, size=16, pairs=8):
    qkv = draw(generator, 2, 3, (heads + 2 * kv_heads) * size)
    return qkv, *draw_angles(generator, 3, pairs), heads, kv_heads


@definition(_packed_example, gradient=True)
def rope_qkv_reference(qkv, cos, sin, heads, kv_heads):
    total = heads + 2 * kv_heads
    rotated, v = qkv.unflatten(-1, (total, qkv.shape[-1] // total)).split([heads + kv_heads, kv_heads], 2)
    q, k = _turned(rotated, cos, sin).split([heads, kv_heads], 2)
    return q.contiguous(), k.contiguous(), v.clone(memory_format=torch.contiguous_format)


def apart(x: Tensor, pairs: int) -> Tensor:
    """Put the first elements of interleaved pairs (2i, 2i + 1) before the second ones, in each head of x (..., D).

    Then the pairs are (i, i + P), as the kernels rotate them. Scores are the same where q and k both have this order.
    """
    rotated, rest = x.split([2 * pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat([rotated[..., 0::2], rotated[..., 1::2], rest], -1)


def together(x: Tensor, pairs: int) -> Tensor:
    """Undo `apart`."""
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat([torch.stack([first, second], -1).flatten(-2), rest], -1)


def _turned(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    compute_dtype = torch.promote_types(x_BTHD.dtype, torch.float32)
    cos = cos.detach().to(compute_dtype).unsqueeze(-2)  # one angle for all heads
    sin = sin.detach().to(compute_dtype).unsqueeze(-2)
    return rotate(x_BTHD.to(compute_dtype), cos, sin).to(x_BTHD.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as many pairs (i, i + P) of x (..., D) as there are angles; the dimensions after them are not changed."""
    pairs = cos.shape[-1]
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _check_angles(op: str, cos: Tensor, sin: Tensor, shape: torch.Size, size: int, device: torch.device) -> None:
    batch, tokens = shape[:2]
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() in (2, 3) and table.shape[-2] == tokens and 1 <= table.shape[-1] <= size // 2
        if not fits or (table.dim() == 3 and table.shape[0] not in (1, batch)) or table.shape != cos.shape:
            raise ValueError(
                f"{op}: {name} must have shape ({tokens}, pairs) or ({batch}, {tokens}, pairs) with at most {size // 2} pairs, "
                f"cos and sin alike, got {tuple(table.shape)}; give one angle a token and pair, not one a dimension."
            )
        if table.dtype != torch.float32 or table.device != device:
            raise ValueError(
                f"{op}: {name} must be torch.float32 on {device}, got {table.dtype} on {table.device}; "
                f"16 bits cannot hold the angles of late positions."
            )


def draw_angles(generator: torch.Generator, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = 6 * draw(generator, tokens, pairs).detach()
    return angles.cos(), angles.sin()
