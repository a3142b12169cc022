"""Latent attention: products of each head with its part of one weight, and split-K attention over latents that all heads share.

`latent_queries` is one launch. Its programs each have columns of one head's product with W_K, and the first of a head rotates
the rest of it; further programs norm, rotate and cache one token's latent each.

`latent_attention` is three: programs of some heads share the live keys of a token in equal parts, of which a tile is loaded
once, for scores and values; others combine the parts of one head in their order; and the last multiply by W_V. Only as many
parts have keys as the live length needs. The bits of a token depend neither on other rows nor on later tokens of the same row.

Attention with sinks by torch's own attention kernels, which know none.

With the result o and the log-sum-exp l of attention without the sink s, that with it has l' = log(exp(l) + exp(s)) and
o' = o · exp(l − l') = o · sigmoid(l − s). The kernels' backward computes the weights exp(scores − l) from the log-sum-exp that
it is given, and dS = weights · (do · v − do · o) from the result: with l' and o' it returns the gradients of attention with
sinks. That of a sink is −exp(s − l') · (do' · o'), summed over tokens.

16 bits on a GPU take flash attention over the tokens of all rows; fp32 the memory-efficient kernel; the CPU its own flash
attention.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import interpreted
from ..decode_product import EARLY
from ..dispatch import SIXTEEN_BITS
from ..latent_attention import hidden
from ..plans.types import LatentPlan, MatrixPlan, cdiv, job_of, power_of_two
from ._launch import _begin, _wait, bump_versions, in_place, launch, options

NOTHING = tl.constexpr(-1e30)  # below every score; -inf would make NaN of -inf - -inf
DEEP = 64  # of a product's sum, a tile at a time
COMBINED = 128  # numbers of a latent of which a program combines the parts
STRETCH = 32  # numbers of an fp32 latent that are multiplied at a time: all at once spill


@triton.jit
def _head_weight(w_ptr, k, n, K, N, KS: tl.constexpr, NS: tl.constexpr):
    return tl.load(w_ptr + k[:, None] * KS + n[None] * NS, mask=(k < K)[:, None] & (n < N)[None], other=0.0)


@triton.jit
def _head_product(x_ptr, w_ptr, w, n, rows, K: tl.constexpr, N: tl.constexpr, KS: tl.constexpr, NS: tl.constexpr,
                  DEPTH: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Rows of x, whose pointers are x_ptr (rows, 1), times columns n of a (K, N) weight. w: its first DEPTH rows.

    The interpreter multiplies bf16 as if its bits were integers (WIDE).
    """
    k = tl.arange(0, DEPTH)
    total = tl.zeros([x_ptr.shape[0], n.shape[0]], tl.float32)
    for start in range(0, K, DEPTH):
        x = tl.load(x_ptr + start + k[None], mask=rows[:, None] & (start + k < K)[None], other=0.0).to(w.dtype)
        if WIDE:
            total = tl.dot(x.to(tl.float32), w.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(x, w, total, input_precision="ieee")
        if start + DEPTH < K:
            w = _head_weight(w_ptr, start + DEPTH + k, n, K, N, KS, NS)
    return total


@triton.jit
def _latent_place(pages, row, place, mask, positions, total, PAGE: tl.constexpr):
    """Return the offsets, in tokens, of places of a row in the cache, and which of them exist."""
    if PAGE is None:
        return row.to(tl.int64) * positions + place, mask
    else:
        page = tl.load(pages + row * (positions // PAGE) + place // PAGE, mask=mask, other=0).to(tl.int64)
        in_range = (page >= 0) & (page < total)
        return tl.where(in_range, page, 0) * PAGE + place % PAGE, mask & in_range


@triton.jit
def _rotated(x_ptr, angle, cos_ptr, sin_ptr, i, mask, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of rotated pairs. angle: the first index of each row in the tables."""
    first = x_ptr + (2 * i if INTERLEAVED else i)
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + (1 if INTERLEAVED else PAIRS), mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos_ptr + angle + i, mask=mask, other=1.0)
    s = tl.load(sin_ptr + angle + i, mask=mask, other=0.0)
    return a * c - b * s, b * c + a * s


@triton.jit
def _latent_queries_kernel(q_ptr, q_stride, latent_ptr, latent_stride, position_ptr, norm_ptr, up_ptr, cos_ptr, sin_ptr,
                           cache_ptr, pages, out_ptr, eps, tokens, length, positions, total, H: tl.constexpr, D: tl.constexpr,
                           V: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr,
                           PARTS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
                           OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                           WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """PARTS: programs of a head, each of COLUMNS columns."""
    _begin(DEPENDENT)
    task, block = tl.program_id(0), tl.program_id(1) * ROWS
    width: tl.constexpr = R + 2 * PAIRS
    i = tl.arange(0, PP)
    if task < H * PARTS:
        head, part = task // PARTS, task % PARTS
        row, col = block + tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS)
        w_ptr = up_ptr + head * (D + V) * R
        w = _head_weight(w_ptr, tl.arange(0, DEPTH), col, D, R, R, 1)
        _wait(DEPENDENT)
        live = row < tokens
        place = tl.load(position_ptr + row, mask=live, other=0)
        known = (place >= 0) & (place < length)
        lost = tl.where(known, 0.0, float("nan"))[:, None]
        line = row.to(tl.int64)[:, None]
        x_ptr, y_ptr = q_ptr + line * q_stride + head * (D + 2 * PAIRS), out_ptr + (line * H + head) * width
        y = _head_product(x_ptr, w_ptr, w, col, live, D, R, R, 1, DEPTH, WIDE) + lost
        kind = out_ptr.dtype.element_ty
        tl.store(y_ptr + col[None], y.to(kind), mask=live[:, None] & (col < R)[None])
        if part == 0:
            mask = live[:, None] & (i < PAIRS)[None]
            angle = tl.where(known, place, 0)[:, None] * PAIRS
            a, b = _rotated(x_ptr + D, angle, cos_ptr, sin_ptr, i[None], mask, PAIRS, INTERLEAVED)
            tl.store(y_ptr + R + i[None], (a + lost).to(kind), mask=mask)
            tl.store(y_ptr + R + PAIRS + i[None], (b + lost).to(kind), mask=mask)
    else:
        _wait(DEPENDENT)
        token = block + task - H * PARTS
        if token < tokens:
            place = tl.load(position_ptr + token)
            write = (place >= 0) & (place < length)
            if TOKENS > 1:
                before = tl.load(position_ptr + tl.maximum(token - 1, 0))
                write &= (token % TOKENS == 0) | (before != place)
            at, write = _latent_place(pages, token // TOKENS, tl.where(write, place, 0), write, positions, total, PAGE)
            r = tl.arange(0, RP)
            x_ptr = latent_ptr + token.to(tl.int64) * latent_stride
            x = tl.load(x_ptr + r, mask=r < R, other=0.0).to(tl.float32)
            gain = tl.load(norm_ptr + r, mask=r < R, other=0.0).to(tl.float32)
            if OFFSET != 0.0:
                gain += OFFSET
            x = x / tl.sqrt(tl.sum(x * x, 0) / R + eps) * gain
            angle = tl.where(write, place, 0) * PAIRS
            a, b = _rotated(x_ptr + R, angle, cos_ptr, sin_ptr, i, i < PAIRS, PAIRS, INTERLEAVED)
            to = cache_ptr + at * width
            kind = cache_ptr.dtype.element_ty
            ours, pairs = r < tl.where(write, R, 0), i < tl.where(write, PAIRS, 0)
            tl.store(to + r, x.to(kind), mask=ours)
            tl.store(to + R + i, a.to(kind), mask=pairs)
            tl.store(to + R + PAIRS + i, b.to(kind), mask=pairs)


@in_place
def latent_queries(q, latent, position, norm, up, cos, sin, cache, out, interleaved=False, dependent=0):
    (tokens, H, _), R, pairs = out.shape, up.shape[1], cos.shape[1]
    D = q.shape[1] // H - 2 * pairs

    def run(plan: MatrixPlan) -> None:
        parts, blocks = cdiv(R, plan.columns), cdiv(tokens, plan.rows)
        _latent_queries_kernel[(H * parts + min(tokens, plan.rows), blocks)](
            q, q.stride(0), latent, latent.stride(0), position, norm.weight, up, cos, sin, cache.latents, cache.pages, out,
            norm.eps, tokens, min(len(cos), cache.positions), cache.positions, len(cache.latents), H, D, len(up) // H - D, R,
            power_of_two(R), pairs, power_of_two(pairs), parts, tokens // cache.rows,
            None if cache.pages is None else cache.latents.shape[2], interleaved, norm.offset, plan.rows, plan.columns,
            min(DEEP, max(16, power_of_two(D))), interpreted(), **options(plan.warps, EARLY if dependent else 0),
        )  # fmt: skip

    launch(job_of("latent_product", "", (D, R), cache.latents), run)
    return out, cache.latents


@triton.jit
def _latent_attention_kernel(q_ptr, position_ptr, cache_ptr, pages, sum_ptr, weight_ptr, scale, positions, total,
                             H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr,
                             EP: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr,
                             TOKENS: tl.constexpr, PAGE: tl.constexpr, STRETCH: tl.constexpr, WIDE: tl.constexpr,
                             DEPENDENT: tl.constexpr):  # fmt: skip
    """E: the rotated part of a key. TILES: of KEYS keys, that a part has at least. STRETCH < RP: of q and a key at a time."""
    _begin(DEPENDENT)
    n, split = tl.program_id(0), tl.program_id(2)
    h, i, r, e = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, KEYS), tl.arange(0, RP), tl.arange(0, EP)
    _wait(DEPENDENT)
    position = tl.load(position_ptr + n)
    known = (position >= 0) & (position < positions)
    keys = tl.where(known, position + 1, 0)
    each = tl.cdiv(tl.cdiv(keys, SPLITS), KEYS * TILES) * (KEYS * TILES)
    lo = split * each
    hi = tl.minimum(lo + each, keys)
    peak, weight = tl.full([HEADS], NOTHING, tl.float32), tl.zeros([HEADS], tl.float32)
    to = (n.to(tl.int64) * SPLITS + split) * H + h
    if lo < hi:
        heads = (h < H)[:, None]
        mine = q_ptr + (n.to(tl.int64) * H + h[:, None]) * (R + E)
        acc = tl.zeros([HEADS, RP], tl.float32)
        if STRETCH == RP:
            q = tl.load(mine + r[None], mask=heads & (r < R)[None], other=0.0)
            turned = tl.load(mine + R + e[None], mask=heads & (e < E)[None], other=0.0)
        for start in range(lo, hi, KEYS):
            live = start + i < hi
            at, exists = _latent_place(pages, n // TOKENS, start + i, live, positions, total, PAGE)
            line = cache_ptr + at[:, None] * (R + E)
            key = tl.load(line + r[None], mask=exists[:, None] & (r < R)[None], other=0.0)
            if WIDE:  # the interpreter multiplies bf16 as if its bits were integers
                key = key.to(tl.float32)
            if STRETCH == RP:
                rest = tl.load(line + R + e[None], mask=exists[:, None] & (e < E)[None], other=0.0).to(key.dtype)
                score = tl.dot(turned.to(key.dtype), tl.trans(rest), input_precision="tf32x3")
                score = tl.dot(q.to(key.dtype), tl.trans(key), score, input_precision="tf32x3")
            else:
                score = tl.zeros([HEADS, KEYS], tl.float32)
                for first in range(0, RP + EP, STRETCH):
                    c = first + tl.arange(0, STRETCH)
                    inside = tl.where(c < RP, c < R, c - RP < E)
                    c = tl.where(c < RP, c, c - RP + R)
                    some = tl.load(mine + c[None], mask=heads & inside[None], other=0.0)
                    part = tl.load(cache_ptr + at[None] * (R + E) + c[:, None], mask=exists[None] & inside[:, None], other=0.0)
                    score = tl.dot(some.to(key.dtype), part.to(key.dtype), score, input_precision="tf32x3")
            score = tl.where(live[None], score * scale, NOTHING)
            new = tl.maximum(peak, tl.max(score, 1))
            p, fix = tl.exp(score - new[:, None]), tl.exp(peak - new)
            weight = weight * fix + tl.sum(p, 1)
            acc = tl.dot(p.to(key.dtype), key, acc * fix[:, None], input_precision="tf32x3")
            peak = new
            if PAGE is not None:  # a key that is not there makes the result NaN
                weight += tl.where(tl.max((live & (exists == 0)).to(tl.int32), 0) > 0, float("nan"), 0.0)
        tl.store(sum_ptr + to[:, None] * R + r[None], acc, mask=heads & (r < R)[None])
    if (split == 0) & (known == 0):
        weight += float("nan")
    tl.store(weight_ptr + 2 * to, peak, mask=h < H)
    tl.store(weight_ptr + 2 * to + 1, weight, mask=h < H)


@triton.jit
def _latent_combine_kernel(sum_ptr, weight_ptr, out_ptr, H: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
                           SP: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """COLUMNS of the mean of latents of one head of a token, from all parts in their order."""
    _begin(DEPENDENT)
    _wait(DEPENDENT)
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, r = tl.arange(0, SP), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    part = (n * SPLITS + split) * H + h
    peak = tl.load(weight_ptr + 2 * part, mask=split < SPLITS, other=NOTHING)
    weight = tl.load(weight_ptr + 2 * part + 1, mask=split < SPLITS, other=0.0)
    fix = tl.exp(peak - tl.max(peak, 0))
    mask = (weight > 0.0)[:, None] & (r < R)[None]  # a part without keys has no sums
    total = tl.sum(tl.load(sum_ptr + part[:, None] * R + r[None], mask=mask, other=0.0) * fix[:, None], 0)
    y = total / tl.sum(weight * fix, 0)
    tl.store(out_ptr + (n * H + h) * R + r, y.to(out_ptr.dtype.element_ty), mask=r < R)


@triton.jit
def _latent_values_kernel(x_ptr, up_ptr, out_ptr, tokens, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
                          PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                          WIDE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row, col = tl.program_id(1) * ROWS + tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS)
    w_ptr = up_ptr + (head * (D + V) + D) * R
    w = _head_weight(w_ptr, tl.arange(0, DEPTH), col, R, V, 1, R)
    _wait(DEPENDENT)
    live, line = row < tokens, row.to(tl.int64)[:, None] * H + head
    y = _head_product(x_ptr + line * R, w_ptr, w, col, live, R, V, 1, R, DEPTH, WIDE)
    tl.store(out_ptr + line * V + col[None], y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (col < V)[None])


@torch.no_grad()
def latent_attention(q, position, cache, up, scale, scratch, out, dependent=0):
    (tokens, H, width), R, (sums, weights, tiles) = q.shape, up.shape[1], scratch
    V, splits, mode = out.shape[1] // H, sums.shape[1], EARLY if dependent else 0
    D, padded, sixteen_bits = len(up) // H - V, max(16, power_of_two(R)), q.element_size() == 2
    mixed = torch.empty(tokens, H, R, device=q.device, dtype=q.dtype)

    def attend(plan: LatentPlan) -> None:
        _latent_attention_kernel[(tokens, cdiv(H, plan.heads), splits)](
            q, position, cache.latents, cache.pages, sums, weights, scale, cache.positions, len(cache.latents), H, plan.heads,
            R, padded, width - R, max(16, power_of_two(width - R)), plan.keys, splits, tiles, tokens // cache.rows,
            None if cache.pages is None else cache.latents.shape[2], padded if sixteen_bits else min(padded, STRETCH),
            interpreted(), num_stages=plan.stages, **options(plan.warps, mode),
        )  # fmt: skip
        _latent_combine_kernel[(tokens, H, cdiv(R, COMBINED))](
            sums, weights, mixed, H, R, splits, power_of_two(splits), COMBINED, **options(4, mode)
        )

    def multiply(plan: MatrixPlan) -> None:
        parts = cdiv(V, plan.columns)
        _latent_values_kernel[(H * parts, cdiv(tokens, plan.rows))](
            mixed, up, out, tokens, H, D, V, R, parts, plan.rows, plan.columns, min(DEEP, padded), interpreted(),
            **options(plan.warps, mode),
        )  # fmt: skip

    launch(job_of("latent_attention", "", (H, R, width - R), q), attend)
    launch(job_of("latent_product", "", (R, V), q), multiply)
    bump_versions(sums, weights, out)
    return out


def sink_attention(q, k, v, sinks, scale, window=None, bounds=None):
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))  # the CPU's kernel reads others wrongly
    y: Tensor = _SinkAttention.apply(q, k, v, sinks, scale, window, bounds)
    return y


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, window, bounds):
        kernel = (_Flash if q.dtype in SIXTEEN_BITS else _Efficient) if q.is_cuda else _OnCPU
        call = kernel(q, k, scale, window, bounds)
        y, lse = call.forward(q, k, v)
        sink = sinks.to(lse.dtype)[:, None]
        y.mul_(call.by_token((lse - sink).sigmoid())[..., None])
        lse = torch.logaddexp(lse, sink)
        ctx.save_for_backward(q, k, v, y, lse, sinks)
        ctx.call = call
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (q, k, v, y, lse, sinks), call = ctx.saved_tensors, ctx.call
        g, of_sinks = g.contiguous(), None
        if ctx.needs_input_grad[3]:
            shares = call.by_token((sinks.to(lse.dtype)[:, None] - lse).exp())
            of_sinks = -(shares * (g.to(lse.dtype) * y).sum(-1)).sum((0, 1)).to(sinks.dtype)
        return *call.backward(g, q, k, v, y, lse), of_sinks, None, None, None


class _Flash:
    """torch's variable-length flash attention. lse (H, B T)"""

    def __init__(self, q: Tensor, k: Tensor, scale: float, window: int | None, bounds: Tensor | None) -> None:
        (B, T), L = q.shape[:2], k.shape[1]
        if bounds is None:
            begins = [torch.arange(0, B * n + 1, n, dtype=torch.int32, device=q.device) for n in (T, L)]
        else:  # descending ones, or ones beyond the tokens, would let the kernel read beyond its tensors
            begins = [bounds.clamp(0, B * T).cummax(0).values] * 2
        self.rows, self.limits = (B, T), (*begins, T, L, 0.0, True)
        left = -1 if window is None else min(window, L) - 1  # keys before the token; -1: all
        self.options: dict[str, Any] = {"scale": scale, "window_size_left": left, "window_size_right": 0}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = map(_aligned_rows, (q, k, v))
        y, lse, *_ = torch.ops.aten._flash_attention_forward(*rows, *self.limits, False, **self.options)
        return y.unflatten(0, self.rows), lse

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        rows = map(_aligned_rows, (g, q, k, v, y))
        none = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        gradients = torch.ops.aten._flash_attention_backward(*rows, lse, *self.limits, none, none[0], **self.options)
        return tuple(d.unflatten(0, (len(t), -1)) for d, t in zip(gradients, (q, k, v)))

    def by_token(self, t: Tensor) -> Tensor:
        """Return a tensor like lse as (B, T, H)."""
        return t.t().unflatten(0, self.rows)


def _aligned_rows(t: Tensor) -> Tensor:
    """Return t (B, T, H, D) as (B T, H, D), in place where the kernel's loads of 16 bytes can read it."""
    rows = t.flatten(0, 1)
    odd = rows.stride(0) % 8 or rows.stride(1) % 8 or rows.storage_offset() % 8
    return rows.clone(memory_format=torch.contiguous_format) if odd else rows


class _Efficient:
    """torch's memory-efficient attention, for equal head counts and rows that are one sequence. lse (B, H, T or more)"""

    def __init__(self, q: Tensor, k: Tensor, scale: float, window: int | None, bounds: Tensor | None) -> None:
        assert bounds is None
        self.tokens, self.group = q.shape[1], q.shape[2] // k.shape[2]
        self.causal = 2  # as of a mask whose diagonal ends in the lower right corner
        self.options: dict[str, Any] = {"scale": scale, "window_size": None if window is None else min(window, k.shape[1])}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        none = (None,) * 5
        y, lse, *_ = torch.ops.aten._efficient_attention_forward(
            *self.repeated(q, k, v), *none, 0.0, self.causal, True, **self.options
        )
        return y, lse

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        none = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
        dq, *others, _ = torch.ops.aten._efficient_attention_backward(
            g, *self.repeated(q, k, v), None, y, None, None, self.tokens, k.shape[1], lse, 0.0, none, none, self.causal, False,
            **self.options,
        )  # fmt: skip
        return dq, *(d.unflatten(2, (-1, self.group)).sum(3) for d in others)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return q.contiguous(), *(t.repeat_interleave(self.group, 2) for t in (k, v))

    def by_token(self, t: Tensor) -> Tensor:
        return t[..., : self.tokens].transpose(1, 2)


class _OnCPU:
    """The CPU's flash attention. lse (B, H, T)"""

    def __init__(self, q: Tensor, k: Tensor, scale: float, window: int | None, bounds: Tensor | None) -> None:
        mask = hidden(q, k, window, bounds)
        self.options = {"attn_mask": q.new_zeros(mask.shape).masked_fill_(mask, float("-inf")), "scale": scale}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, False, **self.options)
        return y.transpose(1, 2), lse

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        heads = (t.transpose(1, 2) for t in (g, q, k, v, y))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse, 0.0, False, **self.options)
        return tuple(d.transpose(1, 2) for d in gradients)

    def by_token(self, t: Tensor) -> Tensor:
        return t.transpose(1, 2)
