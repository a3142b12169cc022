"""One token's attention for every row: q and k normed and turned, k and v cached, attention over what lives in the cache.

Of several tokens a row, it is that of the first, then of the second, and so on.

Legend: B rows, H query heads, K key and value heads, L places in the cache, D width of a head.
"""

import torch
from torch import Tensor


@torch.no_grad()
def decode_attention(
    qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, scale: float, window: int, partial: Tensor, count: Tensor, out: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = position.numel() // len(k_cache)
    for t in range(tokens):
        mine = slice(t, None, tokens)
        y = _attend(qkv[mine], position.flatten()[mine].long(), k_cache, v_cache, cos, sin, q_norm, k_norm, eps, scale, window)
        out[mine] = y.to(out.dtype)
    return out, k_cache, v_cache


def _attend(
    qkv: Tensor, at: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """One token of every row."""
    B, K, L, D = k_cache.shape
    heads = qkv.view(B, -1, D).to(cos.dtype)
    q, k, v = heads.split([heads.shape[1] - 2 * K, K, K], 1)
    c, s = cos[at][:, None], sin[at][:, None]
    q, k = _turn(_normed(q, q_norm, eps), c, s), _turn(_normed(k, k_norm, eps), c, s)
    rows = torch.arange(B, device=qkv.device)
    k_cache[rows, :, at] = k.to(k_cache.dtype)
    v_cache[rows, :, at] = v.to(v_cache.dtype)
    place = torch.arange(L, device=qkv.device)
    live = place <= at[:, None]
    if window:
        live &= place > at[:, None] - window
    scores = torch.einsum("bkgd,bkld->bkgl", q.view(B, K, -1, D), k_cache.to(q.dtype)) * scale
    weights = torch.softmax(scores.masked_fill(~live[:, None, None], float("-inf")), -1)
    values = v_cache.to(q.dtype).masked_fill(~live[:, None, :, None], 0.0)  # what lies beyond may be anything, NaN too
    return torch.einsum("bkgl,bkld->bkgd", weights, values).reshape(B, -1)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)
