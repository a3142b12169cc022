"""Rotary position embedding: each pair (x_i, x_{i+P}) of a head is turned by the token's angle θ_i.

Legend: B batch, T tokens, H heads, D head size, P pairs turned. P = D/2 turns the whole head; with fewer, 2P..D pass.
cos and sin are constants here: no gradient reaches them.
"""

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turned(q, cos, sin), _turned(k, cos, sin)


def rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of a packed product (B, T, (heads + 2 kv_heads) D): q and k turned, v as it is."""
    total = heads + 2 * kv_heads
    q, k, v = qkv.unflatten(-1, (total, qkv.shape[-1] // total)).split([heads, kv_heads, kv_heads], 2)
    return _turned(q, cos, sin), _turned(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def _turned(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    cos, sin = (t.detach().to(wide).unsqueeze(-2) for t in (cos, sin))  # one angle for all heads
    pairs = cos.shape[-1]
    first, second, rest = x_BTHD.to(wide).split([pairs, pairs, x_BTHD.shape[-1] - 2 * pairs], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x_BTHD.dtype)
