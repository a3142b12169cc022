"""Multi-head latent attention in one decoding step, for one or a few tokens of each row, and attention with sinks.

A token's keys and values of all heads are products of one latent, and the cache holds that latent and the one rotated part of
its keys alone:

    k = [latent · W_K of the head, rotated]      score = q · k = (q · W_Kᵀ) · latent + q's rotated part · rotated
    v = latent · W_V of the head                 output = (Σ weight · latent) · W_V

So a step multiplies its queries by W_K and its results by W_V, and no key or value is computed. `latent_queries` does the
former and writes the tokens' latents to the cache; `latent_attention` does the rest. All outputs are written in place.

`sink_attention` is causal attention with a sink in each head: a further score of the softmax, without a key or a value. The
weights of a token's keys sum to less than 1 by the sink's share, exp(sink) / (exp(sink) + sum of exp(scores)). gpt-oss learns
one sink for each head.

Legend: B rows, T tokens (queries) of a row, N = B·T, H heads, K key and value heads, D width of a head, of latent attention of
its part that is not rotated, P rotated pairs, V width of a value, R width of a latent, L positions in the cache, or keys of a
row, M pages a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .decode_product import WRITTEN, Norm, rms_normed
from .dispatch import SIXTEEN_BITS, implementation, require, transformed
from .registry import definition, draw, ints, load, zeros
from .rope import apart, draw_angles, rotate


class LatentCache(NamedTuple):
    """A layer's normed latents and rotated keys of every row: (B, 1, L, R + 2P).

    With `pages` (B, M) int32 it is (P, 1, S, R + 2P) of P pages with S positions each, a power of two: positions m S to
    (m + 1) S of row b are in page pages[b, m]. A page that does not exist is neither read nor written, and results that depend
    on it are NaN. Positions beyond a row's own are never read.
    """

    latents: Tensor
    pages: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.latents if self.pages is None else self.pages)

    @property
    def positions(self) -> int:
        """Return the positions of a row."""
        return self.latents.shape[2] * (1 if self.pages is None else self.pages.shape[1])


class LatentScratch(NamedTuple):
    sums: Tensor  # (N, splits, H, R) fp32; splits: over how many programs the keys of a token and its heads may spread
    weights: Tensor  # (N, splits, H, 2) fp32: the largest score, and the sum of the softmax
    tiles: int = 1  # of keys, that a program takes at least


def latent_queries(
    q: Tensor,
    latent: Tensor,
    position: Tensor,
    norm: Norm,
    up: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LatentCache,
    out: Tensor,
    interleaved: bool = False,
    dependent: int = 0,
) -> tuple[Tensor, Tensor]:
    """Multiply queries by W_K, rotate the rest of them, and write the tokens' latents to the cache: (out, cache.latents).

    q         (N, H (D + 2P)), as a product gives it; rows may be strided, as those of latent
    latent    (N, R + 2P): what is normed, and the key that is rotated
    position  (B,) int32: the token's place; or (B, T), places in order without a gap. Of tokens at one place the first is
              written. For a place outside the cache or the angles nothing is written, and its row of out is NaN
    up        (H (D + V), R): W_K and W_V of each head
    cos, sin  (positions, P) fp32
    out       (N, H, R + 2P), in the cache's dtype
    """
    op, N, device = "latent_queries", position.numel(), cache.latents.device
    H, R = _check_cache(op, cache, position, up, out)
    pairs, width = cos.shape[-1], cache.latents.shape[3]
    if 2 * pairs != width - R or pairs < 1:
        raise ValueError(f"{op}: cos has {pairs} pairs, wanted {(width - R) / 2:g}: half of what follows a latent.")
    for name, table in (("cos", cos), ("sin", sin)):
        require(op, name, table, torch.float32, ("positions", pairs), device, "its rows are positions")
    if len(cos) != len(sin):
        raise ValueError(f"{op}: cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}.")
    require(op, "norm.weight", norm.weight, None, (R,), device, "it has one weight for each number of a latent")
    require(op, "out", out, cache.latents.dtype, (N, H, R + 2 * pairs), device, WRITTEN)
    operands = ("q", q, q.shape[-1] % H == 0, f"{H} heads"), ("latent", latent, latent.shape[-1] == width, width)
    for name, t, fits, columns in operands:
        rows = t.dim() == 2 and len(t) == N and t.stride(1) == 1 and t.is_floating_point() and t.device == device
        if not rows or not fits:
            raise ValueError(
                f"{op}: {name} must be a floating-point ({N}, {columns}) on {device}, got {t.dtype} {tuple(t.shape)} on "
                f"{t.device}."
            )
    D = q.shape[1] // H - 2 * pairs
    if D < 1 or len(up) // H < D:
        raise ValueError(f"{op}: q has heads of {q.shape[1] // H}, and up {len(up) // H} rows a head; pass those of one layer.")
    shape = H, D, len(up) // H - D, R, pairs, interleaved
    return implementation(op, cache.latents, None, shape)(
        q, latent, position, norm, up, cos, sin, cache, out, interleaved, dependent
    )


def _draw_cache(g, heads, plain, value, rank, pairs):
    """Draw three rows of ten places, their positions, and W_K and W_V."""
    cache = LatentCache(draw(g, 3, 1, 10, rank + 2 * pairs))
    return cache, ints(9, 0, 4), draw(g, heads * (plain + value), rank)


def _queries_example(g, heads=3, plain=24, value=16, rank=32, pairs=4, paired=True):
    cache, position, up = _draw_cache(g, heads, plain, value, rank, pairs)
    q, latent = draw(g, 3, heads * (plain + 2 * pairs)).detach(), draw(g, 3, rank + 2 * pairs).detach()
    norm, out = Norm(draw(g, rank), 1e-6), draw(g, 3, heads, rank + 2 * pairs)
    return q, latent, position, norm, up, *draw_angles(g, 10, pairs), cache, out, paired


@definition(_queries_example)
def latent_queries_reference(q, latent, position, norm, up, cos, sin, cache, out, interleaved=False, dependent=0):
    tokens, place = len(q) // cache.rows, position.flatten().long()
    known = (place >= 0) & (place < min(len(cos), cache.positions))
    first = torch.ones_like(position, dtype=torch.bool)
    if tokens > 1:
        first[:, 1:] = position[:, 1:] != position[:, :-1]
    for t in range(tokens):  # one after the other: the sums of more rows have other bits
        mine = slice(t, None, tokens)
        at = torch.where(known, place, 0)[mine]
        turn = cos[at], sin[at]
        queries = _queries(q[mine], up, turn, out.shape[1], interleaved)
        out[mine] = queries.masked_fill(~known[mine, None, None], float("nan")).to(out.dtype)
        row = _row(latent[mine], norm, turn, interleaved).to(cache.latents.dtype)
        index, offset, exists = _indices(cache, at)
        exists &= (known & first.flatten())[mine]
        cache.latents[index, 0, offset] = torch.where(exists[:, None], row, cache.latents[index, 0, offset])
    return out, cache.latents


def _queries(q: Tensor, up: Tensor, turn: tuple[Tensor, Tensor], heads: int, interleaved: bool) -> Tensor:
    """Return queries (B, H, R + 2P) of one token a row."""
    dtype32 = torch.promote_types(q.dtype, torch.float32)
    pairs, q = turn[0].shape[-1], q.to(dtype32).unflatten(1, (heads, -1))
    plain, rotated = q.split([q.shape[2] - 2 * pairs, 2 * pairs], -1)
    w_k = up.to(dtype32).unflatten(0, (heads, -1))[:, : plain.shape[2]]
    cos, sin = (t[:, None].to(dtype32) for t in turn)
    rotated = rotate(apart(rotated, pairs) if interleaved else rotated, cos, sin)
    return torch.cat([torch.einsum("nhd,hdr->nhr", plain, w_k), rotated], -1)


def _row(latent: Tensor, norm: Norm, turn: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Return what is cached of latents (B, R + 2P) before their norm and rotation."""
    dtype32, pairs = torch.promote_types(latent.dtype, torch.float32), turn[0].shape[-1]
    new, key = latent.to(dtype32).split([len(norm.weight), 2 * pairs], -1)
    cos, sin = (t.to(dtype32) for t in turn)
    return torch.cat([rms_normed(new, norm), rotate(apart(key, pairs) if interleaved else key, cos, sin)], -1)


def latent_attention(
    q: Tensor, position: Tensor, cache: LatentCache, up: Tensor, scale: float, scratch: LatentScratch, out: Tensor,
    dependent: int = 0,
) -> Tensor:  # fmt: skip
    """Compute attention of queries of `latent_queries` over the cache, times W_V: out (N, H V).

    position  (B,) or (B, T) int32: each token attends to the positions of its row up to its own, which the cache holds. At a
              place outside the cache out is NaN
    out       in any dtype. A token's result has the same bits as if it had come alone
    """
    op, device = "latent_attention", cache.latents.device
    H, R = _check_cache(op, cache, position, up, q)
    require(op, "q", q, cache.latents.dtype, (position.numel(), H, cache.latents.shape[3]), device, "latent_queries writes it")
    require(op, "out", out, None, (position.numel(), "heads x width of a value"), device, WRITTEN)
    if out.shape[1] % H or out.shape[1] > len(up):
        raise ValueError(f"{op}: out has {out.shape[1]} columns, wanted a value for each of {H} heads, of up's {len(up)} rows.")
    (sums, weights, _), N, why = scratch, position.numel(), "it may have more rows than the call"
    require(op, "scratch.sums", sums, torch.float32, (max(N, len(sums)), "splits", H, R), device, why)
    require(op, "scratch.weights", weights, torch.float32, (*sums.shape[:3], 2), device, why)
    value = out.shape[1] // H
    shape = H, len(up) // H - value, value, R, (cache.latents.shape[3] - R) // 2
    return implementation(op, cache.latents, None, shape)(q, position, cache, up, scale, scratch, out, dependent)


def _attention_example(g, heads=3, plain=24, value=16, rank=32, pairs=4):
    cache, position, up = _draw_cache(g, heads, plain, value, rank, pairs)
    scratch = LatentScratch(zeros(3, 4, heads, rank), zeros(3, 4, heads, 2))
    return draw(g, 3, heads, rank + 2 * pairs), position, cache, up, 0.2, scratch, zeros(3, heads * value)


@definition(_attention_example)
def latent_attention_reference(q, position, cache, up, scale, scratch, out, dependent=0):
    H, R, tokens, place = q.shape[1], up.shape[1], len(q) // cache.rows, position.flatten().long()
    known = (place >= 0) & (place < cache.positions)
    dtype32, every = torch.promote_types(q.dtype, torch.float32), torch.arange(cache.positions, device=q.device)
    index, offset, exists = _indices(cache, every.expand(cache.rows, -1))
    rows = cache.latents[index, 0, offset].to(dtype32).masked_fill(~exists[..., None], float("nan"))
    w_v = up.to(dtype32).unflatten(0, (H, -1))[:, -(out.shape[1] // H) :]
    for t in range(tokens):
        mine = slice(t, None, tokens)
        live = (every <= place[mine, None]) & known[mine, None]
        keys = rows.masked_fill(~live[..., None], 0.0)  # what lies beyond may be anything, NaN too
        scores = torch.einsum("nhe,nle->nhl", q[mine].to(dtype32), keys) * scale
        weights = scores.masked_fill(~live[:, None], float("-inf")).softmax(-1)  # NaN where no key is live
        mixed = torch.einsum("nhl,nlr->nhr", weights, keys[..., :R])
        out[mine] = torch.einsum("nhr,hvr->nhv", mixed, w_v).flatten(1).to(out.dtype)
    return out


def _indices(cache: LatentCache, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices in the cache of positions (B, ...), and whether they exist."""
    row = torch.arange(len(at), device=at.device).view(-1, *[1] * (at.dim() - 1)).expand_as(at)
    if cache.pages is None:
        return row, at, torch.ones_like(at, dtype=torch.bool)
    page = cache.pages[row, at // cache.latents.shape[2]].long()
    exists = (page >= 0) & (page < len(cache.latents))
    return torch.where(exists, page, 0), at % cache.latents.shape[2], exists


def _check_cache(op: str, cache: LatentCache, position: Tensor, up: Tensor, heads: Tensor) -> tuple[int, int]:
    """Return the number of heads and the width of a latent."""
    latents, pages = cache
    shape, device = latents.shape, latents.device
    if len(shape) != 4 or shape[1] != 1 or not latents.is_contiguous() or not latents.is_floating_point():
        raise ValueError(
            f"{op}: cache.latents must be a contiguous (rows, 1, places, width), got {latents.dtype} {tuple(shape)}."
        )
    if pages is not None:
        fits = pages.dim() == 2 and pages.dtype == torch.int32 and pages.is_contiguous() and pages.device == device
        if not fits or shape[2] & (shape[2] - 1):
            raise ValueError(
                f"{op}: cache.pages must be a contiguous torch.int32 (rows, pages a row), of a power of two places each, got "
                f"{pages.dtype} {tuple(pages.shape)} of {shape[2]}."
            )
    require(op, "position", position, torch.int32, (cache.rows, *position.shape[1:]), device, "it says where each row stands")
    if heads.dim() != 3 or heads.shape[1] < 1:
        raise ValueError(f"{op}: queries must be (tokens, heads, width), got {tuple(heads.shape)}.")
    H = heads.shape[1]
    require(op, "up", up, latents.dtype, ("rows", "width"), device, "it holds W_K and W_V of each head")
    if len(up) % H or up.shape[1] >= shape[3]:
        raise ValueError(
            f"{op}: up must have as many rows for each of {H} heads, and fewer columns than a cached row of {shape[3]}, got "
            f"{tuple(up.shape)}."
        )
    return H, up.shape[1]


WIDEST, SMALL = 256, 192  # heads of torch's flash attention, in multiples of 8, on data centre and on other GPUs


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int | None = None, bounds: Tensor | None = None
) -> Tensor:
    """Attention of q (B, T, H, D), a row's last tokens, to k and v (B, L, K, D) -> (B, T, H, D); under autocast, in its dtype.

    sinks   (H,): a score of each head's softmax, not multiplied by `scale`
    window  a token attends to at most that many, itself included; None: to all before it
    bounds  (S + 1), int32, if T = L: where sequences begin among the B T tokens, ascending from 0 to B T, each in one row. A
            token attends to those of its sequence. None: a row is one
    """
    op, (H, D) = "sink_attention", q.shape[-2:] if q.dim() == 4 else (0, 0)
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or k.shape != v.shape
        or (q.shape[0], D) != (k.shape[0], k.shape[3])
        or k.shape[1] < q.shape[1]
        or k.shape[2] == 0
        or H % k.shape[2]
        or not (q.is_floating_point() and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device)
    ):
        got = ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (q, k, v))
        raise ValueError(
            f"{op}: got q, k and v of {got}; wanted (B, T, H, D) and twice (B, L, K, D) of one floating dtype and device, with "
            f"L from T on and an H that K divides."
        )
    if sinks.shape != (H,) or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"{op}: sinks: got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}, wanted a floating-point tensor ({H},) on "
            f"{q.device}: one score for each head."
        )
    if window is not None and window < 1:
        raise ValueError(f"{op}: window: got {window}, wanted at least 1, the token itself, or None for all tokens.")
    if bounds is not None:
        require(op, "bounds", bounds, torch.int32, ("bounds",), q.device, "it is where sequences begin")
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"{op}: bounds: got {k.shape[1]} keys for {q.shape[1]} tokens of a row, wanted as many.")
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    shape = H, k.shape[2], D, window is not None, bounds is not None
    with torch.autocast(kind, enabled=False):  # it would round the definition's fp32
        # The CPU's flash attention: 0.32 s forward and backward, the definition 0.84, transformers 0.70 (1,024 tokens, 16 heads
        # of 64, fp32, one core).
        torchs = kind == "cpu" and q.numel() > 0 and not transformed() and not torch.compiler.is_compiling()
        function = load("triton", op) if torchs else implementation(op, q, unable(q, bounds), shape)
        return function(q, k, v, sinks, scale, window, bounds)


def unable(q: Tensor, bounds: Tensor | None = None) -> str | None:
    """Return why torch's kernels cannot take q, so that the definition would hold all scores; None if they can."""
    if not q.is_cuda:
        return None
    if q.dtype in SIXTEEN_BITS:
        return no_flash(q.device, q.shape[-1])
    if bounds is not None:
        return f"packed rows are computed in 16 bits, not in {q.dtype}"
    return f"its heads are a multiple of 8 wide, not {q.shape[-1]}" if q.shape[-1] % 8 else None


def no_flash(device: torch.device, width: int) -> str | None:
    """Return why torch's flash attention has no forward and backward of heads of this width on a GPU; None if it has."""
    if width > WIDEST or width % 8:
        return f"its heads are up to {WIDEST} wide, a multiple of 8, not {width}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "it needs a GPU of compute capability 8.0"
    if width > SMALL and capability not in ((8, 0), (9, 0), (10, 0)):
        return f"its backward for heads wider than {SMALL} needs more shared memory than this GPU has"
    return None


def hidden(q: Tensor, k: Tensor, window: int | None, bounds: Tensor | None) -> Tensor:
    """Return which keys each token does not attend to: (B or 1, 1, T, L) bool."""
    (B, T), L = q.shape[:2], k.shape[1]
    key = torch.arange(L, device=q.device)
    age = key[L - T :, None] - key
    far = (age < 0) if window is None else (age < 0) | (age >= window)
    if bounds is None:
        return far[None, None]
    sequence = torch.searchsorted(bounds, torch.arange(B * T, device=q.device, dtype=torch.int32), right=True).view(B, 1, T)
    return far | (sequence[..., None] != sequence[..., None, :])


def _example(g, heads=4, kv_heads=2, width=16, windowed=True, packed=False):
    q, k, v = (draw(g, 2, 40, count, width) for count in (heads, kv_heads, kv_heads))
    bounds = ints(0, 11, 40, 40, 70, 80) if packed else None
    return q, k, v, draw(g, heads), width**-0.5, 7 if windowed else None, bounds


@definition(_example, gradient=True)
def sink_attention_reference(q, k, v, sinks, scale, window=None, bounds=None):
    (B, T, H, D), (L, K), compute = q.shape, k.shape[1:3], torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (t.to(compute).transpose(1, 2) for t in (q, k, v))
    queries = queries.reshape(B, K, H // K * T, D)  # a group's heads as queries of its one key head
    scores = (queries * scale @ keys.mT).view(B, H, T, L).masked_fill(hidden(q, k, window, bounds), float("-inf"))
    sink = sinks.to(compute)[:, None, None]
    most = torch.maximum(scores.detach().amax(-1, keepdim=True), sink.detach())  # the result is the same for any number
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True) + (sink - most).exp()
    y = (weights.view(B, K, -1, L) @ values).view(B, H, T, D) / total
    return y.transpose(1, 2).to(q.dtype)
