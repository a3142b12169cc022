"""Rotary position embedding of q and k, and of a packed q, k, v product. One launch, one pass over memory each way.

A program takes a tile of heads, all of q, all of k or all of v, of one token or a few. Tiles of a token follow each other, so
that programs which run at the same time read and write neighbouring memory. The packed form is the same kernel with its three
sources (forward) or three results (backward) side by side in one tensor. Backward is the rotation by minus the angle.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans.types import RopePlan, cdiv, job_of, power_of_two
from ._launch import first_order_only, launch


@triton.jit
def _turn(from_ptr, to_ptr, head, head_from, D: tl.constexpr, inside, c, s, col, PAIRS: tl.constexpr,
          REST: tl.constexpr, TURN: tl.constexpr):  # fmt: skip
    """Heads at from_ptr + head · head_from, turned or as they are, to to_ptr + head · D."""
    mask = inside & (col < PAIRS)
    first = tl.load(from_ptr + head * head_from + col, mask=mask, other=0.0)
    second = tl.load(from_ptr + head * head_from + PAIRS + col, mask=mask, other=0.0)
    if TURN:
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
    tl.store(to_ptr + head * D + col, first, mask=mask)
    tl.store(to_ptr + head * D + PAIRS + col, second, mask=mask)
    if REST:  # dimensions beyond the pairs pass through
        col = 2 * PAIRS + tl.arange(0, REST)[None]
        mask = inside & (col < D)
        tl.store(to_ptr + head * D + col, tl.load(from_ptr + head * head_from + col, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["tokens", "token_tiles"])  # neither bears on how memory is read; one kernel for all lengths
def _rope_kernel(q_ptr, k_ptr, v_ptr, q_out, k_out, v_out, cos_ptr, sin_ptr, tokens, token_tiles, q_batch, q_token, q_head,
                 k_batch, k_token, k_head, v_batch, v_token, v_head, q_row, k_row, v_row, cos_batch, cos_token,
                 Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
                 TOKENS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    Q_TILES: tl.constexpr = (Q + HEADS - 1) // HEADS
    K_TILES: tl.constexpr = (K + HEADS - 1) // HEADS
    V_TILES: tl.constexpr = (V + HEADS - 1) // HEADS
    tile = tl.program_id(0) % (Q_TILES + K_TILES + V_TILES)
    place = tl.program_id(0) // (Q_TILES + K_TILES + V_TILES)
    b = (place // token_tiles).to(tl.int64)
    line = tl.arange(0, TOKENS * HEADS)[:, None]  # of the tile: a head of a token
    t = (place % token_tiles * TOKENS + line // HEADS).to(tl.int64)
    row = b * tokens + t
    here = t < tokens

    col = tl.arange(0, BLOCK)[None]
    if TOKENS == 1:  # angles of one token, shared by the lines
        at = b * cos_batch + (place % token_tiles).to(tl.int64) * cos_token + col
        mask = col < PAIRS
    else:
        at = b * cos_batch + t * cos_token + col
        mask = here & (col < PAIRS)
    c, s = tl.load(cos_ptr + at, mask=mask, other=1.0), tl.load(sin_ptr + at, mask=mask, other=0.0)
    if BACK:
        s = -s
    if tile < Q_TILES:
        head = tile * HEADS + line % HEADS
        _turn(q_ptr + b * q_batch + t * q_token, q_out + row * q_row, head, q_head, D, here & (head < Q),
              c, s, col, PAIRS, REST, True)  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        head = (tile - Q_TILES) * HEADS + line % HEADS
        _turn(k_ptr + b * k_batch + t * k_token, k_out + row * k_row, head, k_head, D, here & (head < K),
              c, s, col, PAIRS, REST, True)  # fmt: skip
    elif V:
        head = (tile - Q_TILES - K_TILES) * HEADS + line % HEADS
        _turn(v_ptr + b * v_batch + t * v_token, v_out + row * v_row, head, v_head, D, here & (head < V),
              c, s, col, PAIRS, REST, False)  # fmt: skip


def _rotate(sources: list[Tensor], results: list[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Rotate sources (q, k or q, k, v; any strides but unit last) into results, which may be slices of a wider tensor."""
    sources = [x if x.stride(-1) == 1 else x.contiguous() for x in sources]
    batch, tokens, _, size = sources[0].shape
    pairs, counts = cos.shape[-1], [x.shape[2] for x in sources]
    if len(sources) == 2:  # no v: its pointers are never followed
        sources, results, counts = [*sources, sources[0]], [*results, results[0]], [*counts, 0]
    rest = power_of_two(size - 2 * pairs) if size > 2 * pairs else 0

    def run(plan: RopePlan) -> None:
        tiles, token_tiles = sum(cdiv(n, plan.heads) for n in counts), cdiv(tokens, plan.tokens)
        _rope_kernel[(batch * token_tiles * tiles,)](
            *sources, *results, cos, sin, tokens, token_tiles, *(stride for x in sources for stride in x.stride()[:3]),
            *(x.stride(1) for x in results), 0 if cos.dim() == 2 else cos.stride(0), cos.stride(-2),
            *counts, size, pairs, plan.heads, plan.tokens, power_of_two(pairs), rest, back, num_warps=plan.warps,
        )  # fmt: skip

    launch(job_of("rope", "", (pairs, max(counts)), sources[0]), run)


class _Rope(torch.autograd.Function):
    """apply(cos, sin, counts, q, k), or apply(cos, sin, counts, qkv) where one tensor holds `counts` heads of q, k and v."""

    @staticmethod
    def forward(ctx, cos, sin, counts, *sources):
        if cos.stride(-1) != 1 or cos.stride() != sin.stride():  # else a slice of a wider table is read where it lies
            cos, sin = cos.contiguous(), sin.contiguous()
        if cos.dim() == 3 and cos.shape[0] == 1:  # one table for every sequence
            cos, sin = cos[0], sin[0]
        ctx.save_for_backward(cos, sin)
        ctx.counts = counts
        heads = _heads_of(sources, counts)
        results = [torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in heads]
        _rotate(heads, results, cos, sin, back=False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        first_order_only("rope" if ctx.counts is None else "rope_qkv")
        first, counts = gradients[0], ctx.counts
        shapes = [g.shape for g in gradients] if counts is None else [(*first.shape[:2], sum(counts) * first.shape[3])]
        results = [torch.empty(shape, device=first.device, dtype=first.dtype) for shape in shapes]
        cos, sin = ctx.saved_tensors
        _rotate(list(gradients), _heads_of(results, counts), cos, sin, back=True)
        return None, None, None, *results


def _heads_of(tensors: Sequence[Tensor], counts: tuple[int, ...] | None) -> list[Tensor]:
    """q and k, or the q, k and v heads of one packed (B, T, heads · D) tensor, as views."""
    if counts is None:
        return list(tensors)
    (packed,) = tensors
    return list(packed.unflatten(-1, (sum(counts), packed.shape[-1] // sum(counts))).split(counts, 2))


def rope(q, k, cos, sin):
    return _Rope.apply(cos, sin, None, q, k)


def rope_qkv(qkv, cos, sin, heads, kv_heads):
    return _Rope.apply(cos, sin, (heads, kv_heads, kv_heads), qkv)
