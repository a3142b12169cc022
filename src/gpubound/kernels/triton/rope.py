"""Rotary position embedding of q and k, and of a packed q, k, v product. One launch, one pass over memory each way.

Every program takes one token and as many of its heads as fit; q, k and v heads are numbered through, and each element is read
from and written to the one tensor its head belongs to. So the packed form is the same kernel with its three sources (forward)
or three results (backward) side by side in one tensor. Backward is the rotation by minus the angle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import first_order_only, power_of_two

# Pairs a program holds, and how many of a head's pairs one warp takes: few warps with many loads in flight each. H200, 16384
# tokens packed: 24 heads of 64 take 27.5 us with 1 warp (copying as much: 26.6), 31.3 with 4, 95 with 8 and a quarter of the
# pairs; 48 heads of 128 take 103.5 us with 2 (copying: 97.6).
PAIRS_AT_ONCE = 1024
PAIRS_A_WARP = 32


@triton.jit
def _load(q_from, k_from, v_from, col, is_q, is_k, is_v, V: tl.constexpr):
    x = tl.load(q_from + col, mask=is_q, other=0.0).to(tl.float32)
    x += tl.load(k_from + col, mask=is_k, other=0.0).to(tl.float32)
    if V:
        x += tl.load(v_from + col, mask=is_v, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store(x, q_to, k_to, v_to, col, is_q, is_k, is_v, V: tl.constexpr):
    tl.store(q_to + col, x.to(q_to.dtype.element_ty), mask=is_q)
    tl.store(k_to + col, x.to(k_to.dtype.element_ty), mask=is_k)
    if V:
        tl.store(v_to + col, x.to(v_to.dtype.element_ty), mask=is_v)


@triton.jit
def _rope_kernel(q_ptr, k_ptr, v_ptr, q_out, k_out, v_out, cos_ptr, sin_ptr, tokens, q_batch, q_token, q_head,
                 k_batch, k_token, k_head, v_batch, v_token, v_head, q_row, k_row, v_row, cos_batch, cos_token,
                 Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
                 BLOCK: tl.constexpr, REST: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, t = row // tokens, row % tokens
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    k_number, v_number = head - Q, head - Q - K
    q_from = q_ptr + b * q_batch + t * q_token + head * q_head
    k_from = k_ptr + b * k_batch + t * k_token + k_number * k_head
    v_from = v_ptr + b * v_batch + t * v_token + v_number * v_head
    q_to, k_to, v_to = q_out + row * q_row + head * D, k_out + row * k_row + k_number * D, v_out + row * v_row + v_number * D

    col = tl.arange(0, BLOCK)[None]
    at = b * cos_batch + t * cos_token + col
    c, s = tl.load(cos_ptr + at, mask=col < PAIRS, other=1.0), tl.load(sin_ptr + at, mask=col < PAIRS, other=0.0)
    if BACK:
        s = -s
    is_q, is_k = (head < Q) & (col < PAIRS), (head >= Q) & (head < Q + K) & (col < PAIRS)
    is_v = (head >= Q + K) & (head < Q + K + V) & (col < PAIRS)
    first = _load(q_from, k_from, v_from, col, is_q, is_k, is_v, V)
    second = _load(q_from, k_from, v_from, col + PAIRS, is_q, is_k, is_v, V)
    turned = head < Q + K
    _store(tl.where(turned, first * c - second * s, first), q_to, k_to, v_to, col, is_q, is_k, is_v, V)
    _store(tl.where(turned, second * c + first * s, second), q_to, k_to, v_to, col + PAIRS, is_q, is_k, is_v, V)
    if REST:  # dimensions beyond the pairs pass through
        col = 2 * PAIRS + tl.arange(0, REST)[None]
        is_q, is_k = (head < Q) & (col < D), (head >= Q) & (head < Q + K) & (col < D)
        is_v = (head >= Q + K) & (head < Q + K + V) & (col < D)
        rest = _load(q_from, k_from, v_from, col, is_q, is_k, is_v, V)
        _store(rest, q_to, k_to, v_to, col, is_q, is_k, is_v, V)


def _launch(sources: list[Tensor], results: list[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Turn sources (q, k or q, k, v; any strides but unit last) into results, whose token rows may lie in a wider tensor."""
    sources = [x if x.stride(-1) == 1 else x.contiguous() for x in sources]
    batch, tokens, _, size = sources[0].shape
    pairs, counts = cos.shape[-1], [x.shape[2] for x in sources]
    if len(sources) == 2:  # no v: its pointers are never followed
        sources, results, counts = [*sources, sources[0]], [*results, results[0]], [*counts, 0]
    block = power_of_two(pairs)
    heads = min(power_of_two(sum(counts)), max(1, PAIRS_AT_ONCE // block))
    rest = power_of_two(size - 2 * pairs) if size > 2 * pairs else 0
    _rope_kernel[(batch * tokens, triton.cdiv(sum(counts), heads))](
        *sources, *results, cos, sin, tokens, *(stride for x in sources for stride in x.stride()[:3]),
        *(x.stride(1) for x in results), 0 if cos.dim() == 2 else cos.stride(0), cos.stride(-2),
        *counts, size, pairs, heads, block, rest, back, num_warps=max(1, min(4, block // PAIRS_A_WARP)),
    )  # fmt: skip


def _angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both with one set of strides and a unit last one; a slice of a wider table is read where it lies."""
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return (cos[0], sin[0]) if cos.dim() == 3 and cos.shape[0] == 1 else (cos, sin)  # one table for every sequence


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        cos, sin = _angles(cos, sin)
        ctx.save_for_backward(cos, sin)
        results = [torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k)]
        _launch([q, k], results, cos, sin, back=False)
        return tuple(results)

    @staticmethod
    def backward(ctx, dq, dk):
        first_order_only("rope")
        results = [torch.empty(g.shape, device=g.device, dtype=g.dtype) for g in (dq, dk)]
        cos, sin = ctx.saved_tensors
        _launch([dq, dk], results, cos, sin, back=True)
        return *results, None, None


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv_heads):
        cos, sin = _angles(cos, sin)
        ctx.save_for_backward(cos, sin)
        ctx.counts = [heads, kv_heads, kv_heads]
        sources = _heads_of(qkv, ctx.counts)
        results = [torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in sources]
        _launch(sources, results, cos, sin, back=False)
        return tuple(results)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        first_order_only("rope_qkv")
        batch, tokens, _, size = dq.shape
        packed = torch.empty(batch, tokens, sum(ctx.counts) * size, device=dq.device, dtype=dq.dtype)
        cos, sin = ctx.saved_tensors
        _launch([dq, dk, dv], _heads_of(packed, ctx.counts), cos, sin, back=True)
        return packed, None, None, None, None


def _heads_of(packed: Tensor, counts: list[int]) -> list[Tensor]:
    """The q, k and v heads of a packed (B, T, heads · D) tensor, as views."""
    return list(packed.unflatten(-1, (sum(counts), packed.shape[-1] // sum(counts))).split(counts, 2))


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _Rope.apply(q, k, cos, sin)


def rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return _RopeQKV.apply(qkv, cos, sin, heads, kv_heads)
