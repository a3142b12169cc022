"""A scan over chunks by a program for each row and some columns of its state, which it holds in registers.

The backward runs the scan again for the states before each chunk, and then one of the gradients, from the last chunk to the
first. All other gradients are products of all chunks at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import power_of_two
from ._launch import first_order_only

COLUMNS = 32  # of the state in a program
WARPS, STAGES = 4, 1  # two stages would ask for 262 kB of shared memory at widths of 128


@triton.jit
def _tile(ptr, at, row, col, rows, cols):
    """A tile (rows, columns) of the matrix number `at`, in fp32."""
    place = ptr + at * rows * cols + row[:, None] * cols + col[None]
    return tl.load(place, mask=(row < rows)[:, None] & (col < cols)[None], other=0.0).to(tl.float32)


@triton.jit
def _put(ptr, at, row, col, rows, cols, value):
    place = ptr + at * rows * cols + row[:, None] * cols + col[None]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=(row < rows)[:, None] & (col < cols)[None])


@triton.jit
def _times(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _chunk_scan_kernel(u_ptr, w_ptr, q_ptr, p_ptr, k_ptr, decay_ptr, state_ptr, out_ptr, last_ptr, new_ptr, states_ptr, n,
                       L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """new_ptr, states_ptr: what each chunk writes, and the state before it; or None."""
    r = tl.program_id(0).to(tl.int64)
    t, d, e = tl.arange(0, L), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    S = _tile(state_ptr, r, d, e, D, E)
    for chunk in range(n):
        at = r * n + chunk
        if states_ptr is not None:
            _put(states_ptr, at, d, e, D, E, S)
        new = _tile(u_ptr, at, t, e, L, E)
        if w_ptr is not None:
            new -= _times(_tile(w_ptr, at, t, d, L, D), S, PRECISION)
        if new_ptr is not None:
            _put(new_ptr, at, t, e, L, E, new)
        if out_ptr is not None:
            o = _times(_tile(q_ptr, at, t, d, L, D), S, PRECISION)
            o += _times(_tile(p_ptr, at, t, t, L, L), new, PRECISION)
            _put(out_ptr, at, t, e, L, E, o)
        k = _tile(k_ptr, at, t, d, L, D)
        S = S * tl.load(decay_ptr + at).to(tl.float32) + _times(tl.trans(k), new, PRECISION)
    if last_ptr is not None:
        _put(last_ptr, r, d, e, D, E, S)


@triton.jit
def _chunk_scan_backward_kernel(dout_ptr, dlast_ptr, w_ptr, q_ptr, p_ptr, k_ptr, decay_ptr, dnew_ptr, dstates_ptr, dstate_ptr,
                                n, L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                                BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of what each chunk writes, of the state after each chunk, and of the first state."""
    r = tl.program_id(0).to(tl.int64)
    t, d, e = tl.arange(0, L), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    dS = _tile(dlast_ptr, r, d, e, D, E)
    for back in range(n):
        at = r * n + n - 1 - back
        _put(dstates_ptr, at, d, e, D, E, dS)
        dout = _tile(dout_ptr, at, t, e, L, E)
        p, k = _tile(p_ptr, at, t, t, L, L), _tile(k_ptr, at, t, d, L, D)
        dnew = _times(tl.trans(p), dout, PRECISION) + _times(k, dS, PRECISION)
        _put(dnew_ptr, at, t, e, L, E, dnew)
        q = _tile(q_ptr, at, t, d, L, D)
        dS = dS * tl.load(decay_ptr + at).to(tl.float32) + _times(tl.trans(q), dout, PRECISION)
        if w_ptr is not None:
            dS -= _times(tl.trans(_tile(w_ptr, at, t, d, L, D)), dnew, PRECISION)
    _put(dstate_ptr, r, d, e, D, E, dS)


def _sizes(u: Tensor, q: Tensor, precise: bool) -> tuple[tuple[int, int], tuple]:
    """Return the grid of a scan, and its constants."""
    R, n, L, E = u.shape
    D = q.shape[-1]
    columns = min(COLUMNS if D <= 128 else 16, max(16, power_of_two(E)))
    return (R, triton.cdiv(E, columns)), (n, L, D, E, max(16, power_of_two(D)), columns, "tf32x3" if precise else "tf32")


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, w, q, p, k, decay, state, precise):
        inputs: list = [t if t is None else t.contiguous() for t in (u, w, q, p, k, decay, state)]
        grid, sizes = _sizes(u, q, precise)
        out, last = torch.empty_like(u, memory_format=torch.contiguous_format), torch.empty_like(inputs[-1])
        _chunk_scan_kernel[grid](*inputs, out, last, None, None, *sizes, num_warps=WARPS, num_stages=STAGES)
        ctx.reads, ctx.precise = w is not None, precise
        ctx.save_for_backward(*(t for t in inputs if t is not None))
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx, dout, dlast):
        first_order_only("chunk_scan")
        u, *rest = ctx.saved_tensors
        w, (q, p, k, decay, state) = (rest[0], rest[1:]) if ctx.reads else (None, rest)
        dout = torch.zeros_like(u) if dout is None else dout.contiguous()
        dlast = torch.zeros_like(state) if dlast is None else dlast.contiguous()
        (R, n, _, E), D = u.shape, q.shape[-1]
        grid, sizes = _sizes(u, q, ctx.precise)
        new, dnew, dstate = torch.empty_like(u), torch.empty_like(u), torch.empty_like(state)
        states, dstates = (torch.empty(R, n, D, E, device=u.device, dtype=u.dtype) for _ in range(2))
        how = {"num_warps": WARPS, "num_stages": STAGES}
        _chunk_scan_kernel[grid](u, w, q, p, k, decay, state, None, None, new, states, *sizes, **how)
        _chunk_scan_backward_kernel[grid](dout, dlast, w, q, p, k, decay, dnew, dstates, dstate, *sizes, **how)
        across = states.transpose(-1, -2)
        dw = None if w is None else -(dnew @ across)
        dk, ddecay = new @ dstates.transpose(-1, -2), (dstates * states).sum((-1, -2))
        return dnew, dw, dout @ across, dout @ new.transpose(-1, -2), dk, ddecay, dstate, None


def chunk_scan(
    u: Tensor, w: Tensor | None, q: Tensor, p: Tensor, k: Tensor, decay: Tensor, state: Tensor, precise: bool = True
) -> tuple[Tensor, Tensor]:
    return _ChunkScan.apply(u, w, q, p, k, decay, state, precise)
