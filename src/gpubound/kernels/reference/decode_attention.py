"""One token's attention for every row: q and k normed and turned, k and v cached, attention over what lives in the cache.

Of several tokens a row, it is that of the first, then of the second, and so on. A cache of 8-bit codes is read as the numbers
they stand for, the new token's own among them; one in pages, as if each row's lay side by side.

Legend: B rows, H query heads, K key and value heads, L places in the cache, D width of a head, M pages a row.
"""

import torch
from torch import Tensor

from ..cached import decode, encode


@torch.no_grad()
def decode_attention(
    qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, scale: float, window: int, partial: Tensor, count: Tensor, out: Tensor,
    dependent: int = 0, pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    caches = [(k_cache, None), (v_cache, None)]
    _attend_all(qkv, position, caches, cos, sin, q_norm, k_norm, eps, scale, window, out, pages)
    return out, k_cache, v_cache


@torch.no_grad()
def quantized_decode_attention(
    qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor, cos: Tensor, sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, scale: float, window: int, partial: Tensor, count: Tensor,
    out: Tensor, dependent: int = 0, pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    caches = [(k_cache, k_scale), (v_cache, v_scale)]
    _attend_all(qkv, position, caches, cos, sin, q_norm, k_norm, eps, scale, window, out, pages)
    return out, k_cache, v_cache, k_scale, v_scale


def _attend_all(qkv, position, caches, cos, sin, q_norm, k_norm, eps, scale, window, out, pages) -> None:
    tokens = position.numel() // len(position)
    known = (position >= 0) & (position < len(cos))  # a place that the cache has
    first = known.view(len(position), -1)[:, :1].view(-1, *[1] * (position.dim() - 1))
    known = known & first  # a place that the cache has, and so has its row's first token
    at = torch.where(known, position, 0).long()
    for t in range(tokens):
        mine = slice(t, None, tokens)
        here, there = at.flatten()[mine], known.flatten()[mine]
        y = _attend(qkv[mine], here, there, caches, cos, sin, q_norm, k_norm, eps, scale, window, pages)
        out[mine] = torch.where(there[:, None], y, torch.nan).to(out.dtype)


def _attend(qkv, at, known, caches, cos, sin, q_norm, k_norm, eps, scale, window, pages) -> Tensor:
    """One token of every row. Nothing is written for a row whose place is not `known`."""
    B, (K, _, D) = len(at), caches[0][0].shape[1:]
    heads = qkv.view(B, -1, D).to(cos.dtype)
    q, k, v = heads.split([heads.shape[1] - 2 * K, K, K], 1)
    c, s = cos[at][:, None], sin[at][:, None]
    q, k = _turn(_normed(q, q_norm, eps), c, s), _turn(_normed(k, k_norm, eps), c, s)
    for new, (cache, scales) in zip((k, v), caches):
        _write(new, at, known, cache, scales, pages)
    keys, values = (_read(cache, scales, pages, B).to(q.dtype) for cache, scales in caches)
    place = torch.arange(keys.shape[2], device=qkv.device)
    live = place <= at[:, None]
    if window:
        live &= place > at[:, None] - window
    scores = torch.einsum("bkgd,bkld->bkgl", q.view(B, K, -1, D), keys) * scale
    if pages is not None:  # a key of a page that there is not
        there = _there(pages, caches[0][0]).repeat_interleave(caches[0][0].shape[2], 1)
        scores = scores.masked_fill(~there[:, None, None], torch.nan)
    weights = torch.softmax(scores.masked_fill(~live[:, None, None], float("-inf")), -1)
    values = values.masked_fill(~live[:, None, :, None], 0.0)  # what lies beyond may be anything, NaN too
    return torch.einsum("bkgl,bkld->bkgd", weights, values).reshape(B, -1)


def _there(pages: Tensor, cache: Tensor) -> Tensor:
    """Which entries of the table name a page that there is."""
    return (pages >= 0) & (pages < len(cache))


def _write(new: Tensor, at: Tensor, known: Tensor, cache: Tensor, scales: Tensor | None, pages: Tensor | None) -> None:
    """(B, K, D) at its rows' places; of a place that there is not, what lies at another is put there again."""
    rows = torch.arange(len(at), device=at.device)
    if pages is not None:
        known = known & _there(pages, cache)[rows, at // cache.shape[2]]
        rows, at = pages[rows, at // cache.shape[2]].clamp(0, len(cache) - 1).long(), at % cache.shape[2]
    if scales is None:
        _put(cache, rows, at, new.to(cache.dtype), known)
    else:
        codes, scale = encode(new, cache.dtype)
        _put(scales, rows, at, scale, known)
        _put(cache.view(torch.uint8), rows, at, codes.view(torch.uint8), known)


def _put(cache: Tensor, rows: Tensor, at: Tensor, new: Tensor, known: Tensor) -> None:
    known = known.view(-1, *[1] * (new.dim() - 1))
    cache[rows, :, at] = torch.where(known, new, cache[rows, :, at])


def _read(cache: Tensor, scales: Tensor | None, pages: Tensor | None, rows: int) -> Tensor:
    """(B, K, L, D)"""
    if scales is None:
        return _side_by_side(cache, pages, rows)
    codes = _side_by_side(cache.view(torch.uint8), pages, rows).view(cache.dtype)  # fp8 is not indexed
    return decode(codes, _side_by_side(scales, pages, rows))


def _side_by_side(cache: Tensor, pages: Tensor | None, rows: int) -> Tensor:
    if pages is None:
        return cache[:rows]
    return cache[pages.clamp(0, len(cache) - 1).long()].transpose(1, 2).flatten(2, 3)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)
