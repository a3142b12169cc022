"""Attention in one decoding step, a token or a few for each of B rows: q and k normed and turned, k and v cached, attention
over what lives in the cache. Everything is written in place.

Of several tokens a row, it is that of the first, then of the second, and so on. A cache in pages is read as if each row's lay
side by side; one of 8-bit codes, as the numbers they stand for, the new token's own among them. Each token's keys and values,
in each kv head, are coded over a scale of their own:

int8   whole numbers from -127 to 127; the scale is the largest magnitude / 127
fp8    e4m3 numbers; the scale is the largest magnitude / 448

Of normal numbers, 128 wide, int8 loses 0.6 % of their spread and fp8 2.6 %. The kernels round as `encode` does, bit for bit:
what a prompt leaves in a cache is what single steps would have left, were its keys the same.

Legend: B rows, H query heads, K key and value heads, L places in the cache, D width of a head, M pages a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .decode_product import WRITTEN
from .ops import definition
from .rope import draw_angles
from .selftest import draw, ints

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 2.0**-100  # the smallest scale: of zeros, and of numbers that fp32 would soon lose
LEAST = 2.0**-10  # of e4m3 the largest that becomes 0; put there by hand, or a small negative number would become -0
MOST_PLACES = 2**31 - 1  # a larger window hides no more, and kernels take it as an int32


def decode_attention(
    qkv: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int,
    partial: Tensor,
    count: Tensor,
    out: Tensor,
    dependent: int = 0,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one new token a row over the cache, which gets the token's k and v: (out, k_cache, v_cache).

    With T new tokens a row, row after row in qkv, out and the scratch (B·T for B): each sees the cache and those before it, and
    gets the same bits as if it had come alone.

    qkv       (B, (H + 2K) D), as norm_product writes it: neither normed nor turned yet
    position  (B,) int32: where the token stands, and how many keys its row has already; or (B, T), places in order without a
              gap (tokens beyond the cache may share its last place; what comes of them is nobody's). At a place that the
              cache does not have, nothing is written and out is NaN, as it is for a row whose first token stands there
    caches    (B, K, L, D); places beyond `position` are never read
    cos, sin  (L, D/2) fp32 of every position
    q_norm    weights (D,) for models that norm their heads; None for others
    window    the nearest keys that a token sees, itself among them; 0: all
    partial   scratch (B, K, splits, H/K, D + 2) fp32; splits is over how many programs a row's kv head may spread
    count     scratch (B · K,) int32, zeros; each launch leaves zeros
    out       (B, H D) in the cache's dtype or any other
    pages     (B, M) int32, for caches (P, K, S, D) of P pages that hold S places each, a power of two: row b's places from m S
              on lie in page pages[b, m]. The bits are those of the same rows side by side. A page that there is not is
              neither read nor written, and makes NaN of what would have seen it
    """
    _check(
        "decode_attention", qkv, position, k_cache, v_cache, cos, sin, q_norm, k_norm, window, partial, count, out, pages
    )  # fmt: skip
    return implementation("decode_attention", k_cache, None, _shape(k_cache, out))(
        qkv,
        position,
        k_cache,
        v_cache,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        scale,
        min(window, MOST_PLACES),
        partial,
        count,
        out,
        dependent,
        pages,
    )


@definition(lambda g, *shape: (*_example(g, *shape), None, None, 1e-6, 0.25, 0, *_scratch(torch.zeros, *shape)))
@torch.no_grad()
def decode_attention_reference(
    qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, scale: float, window: int, partial: Tensor, count: Tensor, out: Tensor,
    dependent: int = 0, pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    caches = [(k_cache, None), (v_cache, None)]
    _attend_all(qkv, position, caches, cos, sin, q_norm, k_norm, eps, scale, window, out, pages)
    return out, k_cache, v_cache


def quantized_decode_attention(
    qkv: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int,
    partial: Tensor,
    count: Tensor,
    out: Tensor,
    dependent: int = 0,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`decode_attention` over a cache of 8-bit codes: (out, k_cache, v_cache, k_scale, v_scale).

    The token's k and v are rounded when they are written, and the token itself sees them rounded: what it attends to is what
    later ones will. Caches are torch.int8 or torch.float8_e4m3fn; the scales are their shape without the last dimension, fp32.
    """
    _check(
        "quantized_decode_attention", qkv, position, k_cache, v_cache, cos, sin, q_norm, k_norm, window, partial, count, out,
        pages,
    )  # fmt: skip
    if k_cache.dtype not in LARGEST or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"quantized_decode_attention: caches must both be one of {', '.join(map(str, LARGEST))}, got {k_cache.dtype} and "
            f"{v_cache.dtype}; decode_attention takes the others."
        )
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        shape = tuple(k_cache.shape[:3])
        require("quantized_decode_attention", name, scales, torch.float32, shape, k_cache.device, "it has one for each place")
    unable = None
    if k_cache.dtype == torch.float8_e4m3fn and k_cache.is_cuda and torch.cuda.get_device_capability(k_cache.device) < (8, 9):
        unable = "e4m3 needs compute capability 8.9"
    return implementation("quantized_decode_attention", out, unable, _shape(k_cache, out))(
        qkv, position, k_cache, v_cache, k_scale, v_scale, cos, sin, q_norm, k_norm, eps, scale, min(window, MOST_PLACES),
        partial, count, out, dependent, pages,
    )  # fmt: skip


@definition(
    lambda g, *shape: (
        *_coded_example(g, *shape),
        *(None, None, 1e-6, 0.25, 0),
        *_scratch(lambda *size: draw(g, *size), *shape),
    )
)
@torch.no_grad()
def quantized_decode_attention_reference(
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


@torch.no_grad()
def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes (..., D), scales (...) in fp32) of x (..., D). Where one number is not finite the scale is NaN, the codes 0."""
    x = x.float()
    top = torch.where(x.isfinite(), x.abs(), torch.inf).amax(-1)
    scale = torch.where(top.isfinite(), (top * (1 / LARGEST[dtype])).clamp_min(TINY), torch.nan)
    level = x / scale[..., None]  # divided, as rounded kernels do: times 1 / scale would lie on the other side of some halves
    level = torch.where(level == level, level, 0.0)
    if dtype == torch.int8:
        return level.round().to(dtype), scale
    return torch.where(level.abs() <= LEAST, 0.0, level).clamp(-448.0, 448.0).to(dtype), scale


@torch.no_grad()
def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes (..., D) over scales (...) stand for."""
    wide = codes.to(torch.bfloat16) if codes.dtype == torch.float8_e4m3fn else codes  # exact; fp8 is not promoted
    return (wide * scale[..., None]).to(dtype)


def _check(
    op: str, qkv: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, window: int, partial: Tensor, count: Tensor, out: Tensor, pages: Tensor | None,
) -> None:  # fmt: skip
    device = k_cache.device
    if k_cache.dim() != 4 or k_cache.shape[3] % 2 or out.dim() != 2 or out.shape[1] % max(1, k_cache.shape[3]):
        raise ValueError(
            f"{op}: caches must be (rows, kv heads, places, an even head size) and out (rows, heads x head size), got "
            f"{tuple(k_cache.shape)} and {tuple(out.shape)}."
        )
    B, K, places, D = k_cache.shape
    heads, tokens = out.shape[1] // D, position.shape[1:]
    if pages is not None:
        if (
            pages.dim() != 2 or pages.dtype != torch.int32 or not pages.is_contiguous() or places & (places - 1)
            or pages.device != device
        ):  # fmt: skip
            raise ValueError(
                f"{op}: pages must be a contiguous torch.int32 (rows, pages a row) of pages of a power of two places, got "
                f"{pages.dtype} {tuple(pages.shape)} of {places}."
            )
        B, places = len(pages), min(len(cos), places * pages.shape[1])
    rows = B * tokens.numel()
    if k_cache.shape != v_cache.shape or heads % K or qkv.shape != (rows, (heads + 2 * K) * D) or len(out) != rows:
        raise ValueError(
            f"{op}: qkv must be ({rows}, {(heads + 2 * K) * D}) for {heads} heads and caches {tuple(k_cache.shape)}, got "
            f"{tuple(qkv.shape)} and a v cache {tuple(v_cache.shape)}; all three come from one model."
        )
    require(op, "position", position, torch.int32, (B, *tokens), device, "it says where each row stands")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (places, D // 2) or table.dtype != torch.float32:
            raise ValueError(
                f"{op}: {name} must be torch.float32 ({places}, {D // 2}), got {table.dtype} {tuple(table.shape)}; give one "
                "angle for each place of the cache and pair."
            )
        require(op, name, table, torch.float32, (places, D // 2), device, "the kernel reads row after row")
    _check_rest(op, qkv, k_cache, v_cache, q_norm, k_norm, window, partial, count, out)


def _check_rest(
    op: str, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, window: int,
    partial: Tensor, count: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """What has the right shape or none to fit: layout, devices, norms, scratch."""
    device, (_, K, _, D) = k_cache.device, k_cache.shape
    rows, heads = len(out), out.shape[1] // D
    require(op, "qkv", qkv, None, tuple(qkv.shape), device, "pass the product as norm_product writes it")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(op, name, cache, k_cache.dtype, tuple(k_cache.shape), device, "it is written in place")
    require(op, "out", out, None, tuple(out.shape), device, WRITTEN)
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{op}: q_norm and k_norm go together, got one of them; pass both or neither.")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            require(op, name, norm, None, (D,), device, "it has one weight for each dimension of a head")
    if window < 0:
        raise ValueError(f"{op}: window must be at least 0, got {window}; 0 lets a token see all keys.")
    splits = partial.shape[2] if partial.dim() == 5 else 1
    wanted = (max(rows, len(partial)), K, max(1, splits), heads // K, D + 2)
    require(op, "partial", partial, torch.float32, wanted, device, "it is scratch for (rows, kv heads, splits, group, D + 2)")
    counts = (max(rows * K, count.numel()),)
    require(op, "count", count, torch.int32, counts, device, "it is scratch: a zero for each row and kv head")


def _example(generator: torch.Generator, kv: int = 2, group: int = 2, size: int = 16) -> tuple[Tensor, ...]:
    """A packed product, positions, both caches and the angles of two rows, `group` heads over each of `kv`, ten places."""
    caches = draw(generator, 2, kv, 10, size), draw(generator, 2, kv, 10, size)
    qkv = draw(generator, 2, (group + 2) * kv * size).detach()
    return qkv, ints(9, 3), *caches, *draw_angles(generator, 10, size // 2)


def _coded_example(generator: torch.Generator, *shape: int) -> tuple[Tensor, ...]:
    """The same over caches of codes in int8 and their scales."""
    qkv, positions, keys, values, *angles = _example(generator, *shape)
    (keys, k_scale), (values, v_scale) = (encode(cache, torch.int8) for cache in (keys, values))
    return qkv, positions, keys, values, k_scale, v_scale, *angles


def _scratch(out: Callable[[int, int], Tensor], kv: int = 2, group: int = 2, size: int = 16) -> tuple[Tensor, ...]:
    """Partial sums, counters, and out."""
    return torch.zeros(2, kv, 4, group, size + 2), torch.zeros(2 * kv, dtype=torch.int32), out(2, kv * group * size)


def _shape(cache: Tensor, out: Tensor) -> tuple[int, int, int]:
    """What an example takes: heads of keys, query heads for each of them, and the size of a head."""
    kv, size = cache.shape[1], cache.shape[3]
    return kv, out.shape[1] // size // kv, size
