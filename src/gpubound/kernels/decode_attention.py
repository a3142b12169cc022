"""Attention in one decoding step, for one or a few tokens of each of B rows.

q and k are normed and rotated, k and v are written to the cache, and attention is over its live positions. All outputs are
written in place.

With several tokens a row, attention is computed for the first, then for the second, and so on. A paged cache is read as if the
pages of each row were contiguous; an 8-bit cache is dequantised, the new token included. Keys and values are quantised with a
separate scale for each token and kv head:

int8   integers from -127 to 127; the scale is the largest magnitude / 127
fp8    e4m3 values; the scale is the largest magnitude / 448

For normally distributed values, 128 wide, int8 loses 0.6 % of their standard deviation and fp8 2.6 %. The kernels round as
`encode` does, bit for bit: a prefill leaves in the cache what single steps would have left for the same keys.

Legend: B rows, H query heads, K key and value heads, L positions in the cache, D width of a head, M pages a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .decode_product import WRITTEN, Norm, capped_, rms_normed
from .dispatch import SIXTEEN_BITS, implementation, require
from .invariant import BLOCK, MEMBERS, SharedKeys
from .registry import definition, draw, frozen, ints, zeros
from .rope import apart, draw_angles, rotate

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MANY = 1024  # rows times heads of keys that fill a GPU with one program each
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 2.0**-100  # the smallest scale: of zeros, and of numbers that fp32 would soon lose
LEAST = 2.0**-10  # of e4m3 the largest that becomes 0; put there by hand, or a small negative number would become -0


class LayerCache(NamedTuple):
    """A layer's keys and values of every row.

    (B, K, L, D) each, in any dtype, or quantised to torch.int8 or torch.float8_e4m3fn with scales (B, K, L) in fp32. With
    `pages` (B, M) int32, caches are (P, K, S, D) of P pages with S positions each, a power of two: positions m S to (m + 1) S
    of row b are in page pages[b, m]. The results have the same bits as with contiguous rows. A page that does not exist is
    neither read nor written, and results that depend on it are NaN. Positions beyond a row's own are never read.

    shared: the rows that begin with equal keys and values, which are read once for a group, those of the row that is at the
    largest position, for the rows that are beyond them. Of a call that `reads_shared`; in another order of summation.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    pages: Tensor | None = None
    shared: SharedKeys | None = None


class Heads(NamedTuple):
    """RoPE tables, norms and score settings of a layer's heads. They do not change between steps."""

    cos: Tensor  # (L, D/2) fp32, of every position; or fewer pairs, of the first dimensions: the others are not rotated
    sin: Tensor
    q_norm: Norm | None  # weights (D,) for models that norm their heads; (H D,) and (K D,) for those that norm whole rows
    k_norm: Norm | None  # of q_norm's eps and offset
    scale: float
    window: int = 0  # the nearest keys that a token sees, itself among them; 0: all
    cap: float = 0.0  # scores are cap · tanh(score / cap); 0: no cap
    interleaved: bool = False  # rotate pairs (2i, 2i + 1); the cache holds keys with these pairs `apart`
    sinks: Tensor | None = None  # (H,): a further score of each head's softmax, without a value
    gated: bool = False  # after each head's q, a product has a gate: the head's output is multiplied by its sigmoid
    v_eps: float = 0.0  # of a norm of each head's values, which has no weights; 0: there is none

    @property
    def q_width(self) -> int:
        """The width of a query head in a product, in heads."""
        return 2 if self.gated else 1


class Scratch(NamedTuple):
    partial: Tensor  # (B, K, splits, H/K, D + 2) fp32; splits is over how many programs a row's kv head may spread
    # (B · K,) int32, or (B · H,) by query: programs of a row and head that are done. Zeros, and each launch leaves zeros
    finished: Tensor
    tiles: int = 1  # of keys, that a program takes at least
    most: int = 0  # keys that rows are known to read at most; 0: all positions. With more, programs take larger parts
    parts: Tensor | None = None  # (N,) int32, instead of `most`: each row's parts, one after the other (`listed`); or -1: none
    many: bool = False  # rows have so many keys that their parts fill a GPU as MANY rows do: the plan is that of these
    together: bool = False  # a row's tokens may be summed in another order than if they came separately
    by_query: bool = False  # each query head has its own programs: in registers they are small, and shared keys are read again


def listed(row: int, part: int, parts: int) -> int:
    """Return an entry of `Scratch.parts`: part number `part` of the `parts` of a row. A row that reads none has one."""
    return row + (part << 16) + (parts << 24)


def decode_attention(
    qkv: Tensor, position: Tensor, cache: LayerCache, heads: Heads, scratch: Scratch, out: Tensor, dependent: int = 0
) -> tuple[Tensor, ...]:
    """Attention of one new token per row over the cache: out, and the cache's tensors. The token's k and v are written to them.

    In a cache of 8-bit codes they are rounded when they are written, and the token itself attends to the rounded values, as
    later tokens will.

    A row may have T new tokens. qkv, out and the scratch then have B·T rows, all of one row before those of the next. Each
    token sees the cache and the new tokens before it. Its result has the same bits as if it had come alone.

    qkv       (B, (H + 2K) D), as norm_product writes it: neither normed nor rotated yet; of gated heads (B, (2H + 2K) D). Of
              (H + K) D, k before its norm and rotation is v, too. Of H D, the cache has the new tokens' k and v already, by
              another layer that shares it, whose launch may have any mode; heads.k_norm is not read. Or (P, B, width) fp32,
              whose sum it is (`split_product`); not of gated heads
    position  (B,) int32: the token's place, which is also the number of keys that its row has already; or (B, T), places in
              order without a gap. Tokens beyond the cache may share its last place, and their results mean nothing. At a
              place outside the cache nothing is written and out is NaN, as for every token of a row that begins there
    out       (B, H D) in the cache's dtype or any other
    dependent as of a product, and positions, old keys and pages are read before the wait: a FENCE, a LATE launch or a plain
              one stands between what wrote them and this (triton/_launch.py);
              by query, in a LATE launch, the new tokens' keys of another layer, too
    """
    _check("decode_attention", qkv, position, cache, heads, scratch, out)
    shape = _shape(qkv, cache, heads, out, scratch.by_query)
    if cache.k_scale is None and cache.k.dtype not in LARGEST:
        kernel = implementation("decode_attention", cache.k, None, shape)
    else:
        _check_codes("decode_attention", cache)
        codes, unable = cache.k, None
        if codes.dtype == torch.float8_e4m3fn and codes.is_cuda and torch.cuda.get_device_capability(codes.device) < (8, 9):
            unable = "e4m3 needs compute capability 8.9"
        kernel = implementation("quantized_decode_attention", out, unable, shape)
    return kernel(qkv, position, cache, _countable(heads), scratch, out, dependent)


@definition(lambda g, *shape: _example(g, False, *shape))
def decode_attention_reference(qkv, position, cache, heads, scratch, out, dependent=0):
    tokens, qkv = position.numel() // len(position), qkv.sum(0) if qkv.dim() == 3 else qkv
    known = (position >= 0) & (position < len(heads.cos))  # a place that the cache has
    first = known.view(len(position), -1)[:, :1].view(-1, *[1] * (position.dim() - 1))
    known = known & first  # a place that the cache has, and so has its row's first token
    at, count = torch.where(known, position, 0).long(), out.shape[1] // cache.k.shape[3]
    for t in range(tokens):
        mine = slice(t, None, tokens)
        here, exists = at.flatten()[mine], known.flatten()[mine]
        out[mine] = torch.where(exists[:, None], _attend(qkv[mine], here, exists, cache, heads, count), torch.nan)
    return written(cache, out)


quantized_decode_attention_reference = definition(
    lambda g, *shape: _example(g, True, *shape), "quantized_decode_attention", variant_of="decode_attention"
)(decode_attention_reference)


def reads_shared(cache: LayerCache, heads: Heads, dtype: torch.dtype) -> bool:
    """Return whether a launch of one token a row may read the keys that rows share once. dtype: of the products.

    In 16 bits: in fp32 a row's result does not depend on the others.
    """
    full_rows = heads.q_norm is not None and len(heads.q_norm.weight) > cache.k.shape[3]  # norms are over full rows
    return dtype in SIXTEEN_BITS and not (full_rows or heads.window or heads.sinks is not None)


def written(cache: LayerCache, out: Tensor) -> tuple[Tensor, ...]:
    """Return out and the tensors of the cache that both ops write."""
    return out, *(part for part in cache[:4] if part is not None)


def new_heads(qkv: Tensor, cache: LayerCache, out: Tensor, heads: Heads) -> int:
    """Return how many heads of qkv a kv head has besides its queries': 2, a key and a value; 1, one that is both; or 0."""
    return (qkv.shape[-1] - heads.q_width * out.shape[1]) // (cache.k.shape[1] * cache.k.shape[3])


def _attend(qkv: Tensor, at: Tensor, known: Tensor, cache: LayerCache, heads: Heads, count: int) -> Tensor:
    """One token of every row. Nothing is written for a row whose place is not `known`. count: of query heads"""
    B, (K, _, D), pages = len(at), cache.k.shape[1:], cache.pages
    packed = qkv.view(B, -1, D).to(heads.cos.dtype)
    queries = packed[:, : count * heads.q_width]
    queries, gate = (queries[:, ::2], queries[:, 1::2]) if heads.gated else (queries, None)
    c, s = heads.cos[at][:, None], heads.sin[at][:, None]

    def turned(x: Tensor, norm: Norm | None) -> Tensor:
        x = _normed(x, norm)
        return rotate(apart(x, c.shape[-1]) if heads.interleaved else x, c, s)

    q, parts = turned(queries, heads.q_norm), ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    if packed.shape[1] > (first := count * heads.q_width):
        k, v = packed[:, first : first + K], packed[:, -K:]
        v = rms_normed(v, Norm(torch.ones_like(v[0, 0]), heads.v_eps)) if heads.v_eps else v
        for new, (codes, scales) in zip((turned(k, heads.k_norm), v), parts):
            _write(new, at, known, codes, scales, pages)
    keys, values = (_read(codes, scales, pages, B).to(q.dtype) for codes, scales in parts)
    place = torch.arange(keys.shape[2], device=qkv.device)
    live = place <= at[:, None]
    if heads.window:
        live &= place > at[:, None] - heads.window
    scores = q.view(B, K, -1, D) @ keys.transpose(2, 3) * heads.scale
    scores = capped_(scores, heads.cap)
    if pages is not None:  # a key of a page that there is not
        exists = _page_exists(pages, cache.k).repeat_interleave(cache.k.shape[2], 1)
        scores = scores.masked_fill(~exists[:, None, None], torch.nan)
    scores = torch.where(live[:, None, None], scores, float("-inf"))
    if heads.sinks is not None:
        sinks = heads.sinks.to(scores.dtype).view(K, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
    values = torch.where(live[:, None, :, None], values, 0.0)  # what lies beyond may be anything, NaN too
    mixed = (weights @ values).reshape(B, -1)
    return mixed if gate is None else mixed * gate.reshape(B, -1).sigmoid()


def _page_exists(pages: Tensor, cache: Tensor) -> Tensor:
    """Return which entries of the table name an existing page."""
    return (pages >= 0) & (pages < len(cache))


def _write(new: Tensor, at: Tensor, known: Tensor, cache: Tensor, scales: Tensor | None, pages: Tensor | None) -> None:
    """Write (B, K, D) at the rows' positions; for a position that does not exist, write an existing value again."""
    rows = torch.arange(len(at), device=at.device)
    if pages is not None:
        known = known & _page_exists(pages, cache)[rows, at // cache.shape[2]]
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


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    full = x.flatten(1) if norm is not None and len(norm.weight) > x.shape[-1] else x
    return rms_normed(full, norm).view_as(x)


@torch.no_grad()
def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise x (..., D) to (codes (..., D), scales (...) in fp32). If a value is not finite the scale is NaN, the codes 0."""
    x = x.float()
    top = torch.where(x.isfinite(), x.abs(), torch.inf).amax(-1)
    scale = torch.where(top.isfinite(), (top * (1 / LARGEST[dtype])).clamp_min(TINY), torch.nan)
    level = x / scale[..., None]  # divided, as rounded kernels do: times 1 / scale would round some halves the other way
    level = torch.where(level == level, level, 0.0)
    if dtype == torch.int8:
        return level.round().to(dtype), scale
    return torch.where(level.abs() <= LEAST, 0.0, level).clamp(-448.0, 448.0).to(dtype), scale


@torch.no_grad()
def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise codes (..., D) with scales (...)."""
    wider = codes.to(torch.bfloat16) if codes.dtype == torch.float8_e4m3fn else codes  # exact; fp8 is not promoted
    return (wider * scale[..., None]).to(dtype)


def _countable(heads: Heads) -> Heads:
    """Return the heads with a window that fits an int32. A larger one hides no more keys."""
    return heads if heads.window < 2**31 else heads._replace(window=2**31 - 1)


def _check(op: str, qkv: Tensor, position: Tensor, cache: LayerCache, heads: Heads, scratch: Scratch, out: Tensor) -> None:
    device, shape = cache.k.device, cache.k.shape
    if len(shape) != 4 or shape[3] % 2 or out.dim() != 2 or out.shape[1] % max(1, shape[1] * shape[3]):
        raise ValueError(
            f"{op}: caches must be (rows, kv heads, places, an even head size) and out (rows, heads x head size) with as many "
            f"heads for each kv head, got {tuple(shape)} and {tuple(out.shape)}."
        )
    B, K, positions, D = shape
    H, tokens = out.shape[1] // D, position.shape[1:]
    if cache.pages is not None:
        _check_pages(op, cache.pages, cache.k)
        B, positions = len(cache.pages), min(len(heads.cos), positions * cache.pages.shape[1])
    rows = B * tokens.numel()
    require(op, "position", position, torch.int32, (B, *tokens), device, "it says where each row stands")
    angles = positions, min(D // 2, heads.cos.shape[-1])
    for name, table in (("heads.cos", heads.cos), ("heads.sin", heads.sin)):
        require(op, name, table, torch.float32, angles, device, "give one angle for each place of the cache and pair")
    widths = [(heads.q_width * H + new * K) * D for new in (0, 1, 2)]
    new = widths.index(qkv.shape[-1]) if qkv.dim() in (2, 3) and qkv.shape[-1] in widths else 2
    terms = (len(qkv),) if qkv.dim() == 3 and not heads.gated else ()
    dtype = torch.float32 if terms else None
    require(op, "qkv", qkv, dtype, (*terms, rows, widths[new]), device, "pass the product as norm_product writes it")
    for name, part in (("cache.k", cache.k), ("cache.v", cache.v)):
        require(op, name, part, cache.k.dtype, tuple(shape), device, "it is written in place")
    require(op, "out", out, None, (rows, H * D), device, WRITTEN)
    _check_heads(op, heads if new else heads._replace(k_norm=None), (D, H, K), device, new > 0)
    (sums, finished, _, _, parts, *_), why = scratch, "it has (rows, kv heads, splits, group, D + 2), or more rows than a call"
    require(op, "scratch.partial", sums, torch.float32, (max(rows, len(sums)), K, "splits", H // K, D + 2), device, why)
    if parts is not None:
        require(op, "scratch.parts", parts, torch.int32, ("parts",), device, "it lists the parts of rows")
    if cache.shared is not None:
        require(op, "cache.shared.rows", cache.shared.rows, torch.int32, ("groups", MEMBERS), device, "the kernel reads it")
        require(op, "cache.shared.counts", cache.shared.counts, torch.int32, (rows,), device, "it has one number for each row")
        if not reads_shared(cache, heads, torch.bfloat16):
            raise ValueError(
                f"{op}: cache.shared: got a window, sinks or norms of full rows in heads, with which no launch reads shared "
                f"keys; leave it out."
            )
    counts = (max(rows * (H if scratch.by_query else K), finished.numel()),)
    why = "it has a zero for each row and kv head, or query head, by query"
    require(op, "scratch.finished", finished, torch.int32, counts, device, why)


def _check_pages(op: str, pages: Tensor, cache: Tensor) -> None:
    positions = cache.shape[2]
    fits = pages.dim() == 2 and pages.dtype == torch.int32 and pages.is_contiguous() and pages.device == cache.device
    if not fits or positions & (positions - 1):
        raise ValueError(
            f"{op}: cache.pages must be a contiguous torch.int32 (rows, pages a row) of pages of a power of two places, got "
            f"{pages.dtype} {tuple(pages.shape)} of {positions}."
        )


def _check_codes(op: str, cache: LayerCache) -> None:
    if cache.k.dtype not in LARGEST:
        dtypes = ", ".join(map(str, LARGEST))
        raise ValueError(f"{op}: caches with scales must be one of {dtypes}, got {cache.k.dtype}; leave the scales out.")
    if cache.k_scale is None or cache.v_scale is None:
        raise ValueError(f"{op}: cache.k_scale and cache.v_scale belong to codes, got None; give one scale for each place.")
    for name, scales in (("cache.k_scale", cache.k_scale), ("cache.v_scale", cache.v_scale)):
        require(op, name, scales, torch.float32, tuple(cache.k.shape[:3]), cache.k.device, "it has one for each place")


def _check_heads(op: str, heads: Heads, sizes: tuple[int, int, int], device: torch.device, keys: bool) -> None:
    width, *counts = sizes
    q_norm, k_norm = heads.q_norm, heads.k_norm
    if keys and (q_norm is None) != (k_norm is None):
        raise ValueError(f"{op}: heads.q_norm and heads.k_norm go together, got one of them; pass both or neither.")
    if q_norm and k_norm and q_norm[1:] != k_norm[1:]:
        got = f"got eps and offset {q_norm[1:]} and {k_norm[1:]}"
        raise ValueError(f"{op}: heads.q_norm and heads.k_norm must share eps and offset, {got}; give both the same.")
    full = q_norm is not None and len(q_norm.weight) > width
    if full and heads.gated:
        raise ValueError(f"{op}: heads.gated: gates are between the heads of a row, so norm single heads.")
    for name, norm, count in zip(("heads.q_norm.weight", "heads.k_norm.weight"), (q_norm, k_norm), counts):
        if norm is not None:
            columns, of = (count * width, "row") if full else (width, "head")
            require(op, name, norm.weight, None, (columns,), device, f"it has one weight for each dimension of a {of}")
    if heads.sinks is not None:
        require(op, "heads.sinks", heads.sinks, None, (counts[0],), device, "each query head has one")
    if heads.window < 0:
        raise ValueError(f"{op}: heads.window must be at least 0, got {heads.window}; 0 lets a token see all keys.")


def _shape(qkv: Tensor, cache: LayerCache, heads: Heads, out: Tensor, by_query: bool) -> tuple:
    """Return the example arguments: KV heads, query heads per KV head, head size; then the options that few models have."""
    _, kv, _, size = cache.k.shape
    shape = kv, out.shape[1] // size // kv, size
    pairs, norm = heads.cos.shape[1], heads.q_norm
    full, offset = (False, 0.0) if norm is None else (len(norm.weight) > size, norm.offset)
    others, values = (heads.interleaved, heads.sinks is not None, heads.gated), (new_heads(qkv, cache, out, heads), heads.v_eps)
    last = (cache.shared is not None, qkv.dim() == 3, by_query)
    own = values != (2, 0.0) or any(last)
    usual = pairs == size // 2 and not (full or offset or heads.cap or any(others) or own)
    rare = pairs, full, offset, heads.cap, *(others if any(others) or own else ())
    rare += (*(values if own else ()), *(last[: 3 if by_query else 1 + last[1]] if any(last) else ()))
    return shape if usual else (*shape, *rare)


def _example(generator, coded, kv=2, group=2, size=16, *rare):
    """Two rows of `group` heads over each of `kv`, ten places, or some more, where the rows share a block. `coded`: in int8,
    and out has the dtype of the call."""
    pairs, full, offset, cap, *others = rare or (size // 2, False, 0.0, 0.0)
    usual = [False, False, False, 2, 0.0, False, False, False]
    interleaved, sinks, gated, new, v_eps, shared, apart, by_query = others + usual[len(others) :]
    positions = BLOCK + 10 if shared else 10
    caches = [draw(generator, 2, kv, positions, size) for _ in range(2)]
    if shared:
        caches = [frozen(torch.cat([t[1:, :, :BLOCK].expand(2, -1, -1, -1), t[:, :, BLOCK:]], 2)) for t in caches]
    cache = LayerCache(caches[0], caches[1])
    if coded:
        (k, k_scale), (v, v_scale) = (encode(part.detach(), torch.int8) for part in cache[:2])
        cache = LayerCache(k, v, k_scale, v_scale)
    if shared:
        cache = cache._replace(shared=SharedKeys(ints(1, 0, *[-1] * (MEMBERS - 2)).view(1, -1), ints(BLOCK, BLOCK)))
    qkv = draw(generator, *([3] if apart else []), 2, ((2 if gated else 1) * group + new) * kv * size).detach()
    heads = Heads(*draw_angles(generator, positions, pairs), None, None, 0.25, 0, cap, interleaved, gated=gated, v_eps=v_eps)
    if sinks:
        heads = heads._replace(sinks=draw(generator, kv * group).detach())
    if full or offset:
        weights = (draw(generator, size * (count if full else 1)).detach() for count in (kv * group, kv))
        q_norm, k_norm = (Norm(weight, 1e-6, offset) for weight in weights)
        heads = heads._replace(q_norm=q_norm, k_norm=k_norm)
    finished = torch.zeros(2 * kv * (group if by_query else 1), dtype=torch.int32, device="cpu")
    scratch = Scratch(zeros(2, kv, 4, group, size + 2), finished, by_query=by_query)
    out = draw(generator, 2, kv * group * size) if coded else zeros(2, kv * group * size)
    return qkv, ints(9, 3) + (BLOCK if shared else 0), cache, heads, scratch, out
