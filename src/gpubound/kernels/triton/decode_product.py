"""Products of one decoding step, a token a row: memory-bound, one pass over the weights, everything else fused.

A program owns some rows of a weight and all of the columns; each row of x is multiplied by the same code in the same order,
whatever the number of rows, so that a sequence decodes to the same bits alone and in a batch. The norm is fused: its sum of
squares is computed from the x that the product reads, and its factor applied to the sum. GAIN is the norm's offset, or None
without a norm.

Norms that are fused into no product have a program for each row, which holds the whole row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_adapters import StepAdapters
from ..decode_product import Norm
from ..plans import ADAPTED, job_of, power_of_two
from ._launch import _begin, _end, _gained, _row, _tile, _wait, at_once, bump_versions, in_place, launch_product, options
from ._math import activated, capped
from .decode_adapters import _adapter_arguments, _added, _asked, _down, _empty, _up
from .peer_exchange import SCALARS, _addresses, _mail_arguments, _send, _stamp


@triton.jit
def _stacked(row, q_ptr, k_ptr, v_ptr, q_rows, k_rows, K: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the rows of K elements of up to three matrices, one below the other. ALIGNED: `alignment` of them."""
    in_q, in_k = row < q_rows, row < q_rows + k_rows
    of_k, of_v = row - q_rows, row - (q_rows + k_rows)
    at = tl.where(in_q, q_ptr + row.to(tl.int64) * K,
                  tl.where(in_k, k_ptr + of_k.to(tl.int64) * K, v_ptr + of_v.to(tl.int64) * K))  # fmt: skip
    return tl.multiple_of(at, ALIGNED)


@triton.jit
def _sums(x_ptr, norm_ptr, w_ptr, w, u_ptr, u, row, col, left, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
          C: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """N rows of x, times their norm's gain, with R rows of a weight, `left` of which are there, and of a second (u) or None:
    three tuples, by column, the last of x's squares. w, u: the first tiles, which were asked for before x was there.

    All rows are asked for at once: if they come separately, each waits for the L2 and for its sum, 2.5 us a row (H200, gate and
    up of 576 x 1536).
    """
    EVEN: tl.constexpr = K % C == 0
    if N == 1:
        total, square, second = tl.zeros([R, C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([R, C], tl.float32)
        for start in range(0, K, C):
            x = _row(x_ptr + start, col, K - start, EVEN)
            normed = _gained(x, norm_ptr + start, col, K - start, EVEN, GAIN)[None]
            total += w.to(tl.float32) * normed
            if u_ptr is not None:
                second += u.to(tl.float32) * normed
            square += x * x
            if start + C < K:
                w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
                if u_ptr is not None:
                    u = _tile(u_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
        return (total,), (second,), (square,)
    else:
        totals, seconds, squares = (), (), ()
        for _ in tl.static_range(N):
            totals += (tl.zeros([R, C], tl.float32),)
            seconds += (tl.zeros([R, C], tl.float32),)
            squares += (tl.zeros([C], tl.float32),)
        for start in tl.static_range(0, K, C):
            xs = ()
            for n in tl.static_range(N):
                xs += (_row(x_ptr + n * K + start, col, K - start, EVEN),)
            gain = _gained(1.0, norm_ptr + start, col, K - start, EVEN, GAIN)
            news, ups, parts = (), (), ()
            for n in tl.static_range(N):
                normed = (xs[n] * gain)[None]
                news += (totals[n] + w.to(tl.float32) * normed,)
                if u_ptr is not None:
                    ups += (seconds[n] + u.to(tl.float32) * normed,)
                parts += (squares[n] + xs[n] * xs[n],)
            totals, squares = news, parts
            if u_ptr is not None:
                seconds = ups
            if start + C < K:
                w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
                if u_ptr is not None:
                    u = _tile(u_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
        return totals, seconds, squares


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    return activated(gate, ACTIVATION) * up


@triton.jit
def _norm_product_kernel(x_ptr, norm_ptr, q_ptr, k_ptr, v_ptr, q_bias, k_bias, v_bias, out_ptr, best_ptr, arg_ptr, eps,
                         q_rows, k_rows, rows, table, ids, narrow, before, columns, split, second, emptied, ahead, by,
                         B: tl.constexpr, SOME: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                         BIAS: tl.constexpr, BEST: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr, CAP: tl.constexpr,
                         RANKS: tl.constexpr, MORE: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr,
                         ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    program = tl.program_id(0)
    if table is not None:
        if program < ahead:
            _down(program, x_ptr, norm_ptr, eps, table, ids, narrow, columns, B, K, REACH, GAIN, TYPE, DEPENDENT)
            return
        program -= ahead
    first = program * R
    in_k, in_v = first >= q_rows, first >= q_rows + k_rows
    w_ptr = tl.where(in_v, v_ptr, tl.where(in_k, k_ptr, q_ptr))
    local = first - tl.where(in_v, q_rows + k_rows, tl.where(in_k, q_rows, 0))
    w_ptr += local.to(tl.int64) * K
    row, col = tl.arange(0, R), tl.arange(0, C)
    w = _tile(w_ptr, row, col, rows - first, K, K, WHOLE)
    offset = tl.zeros([R], tl.float32)
    if BIAS:
        bias = tl.where(in_v, v_bias, tl.where(in_k, k_bias, q_bias)) + local + row
        offset = tl.load(bias, mask=first + row < rows, other=0.0).to(tl.float32)
    if table is not None:
        low = tl.where(in_v, second, tl.where(in_k, split, 0))
        high = tl.where(in_v, columns, tl.where(in_k, second, split))
        up = _up(table, low, high, columns, local + row, first + row < rows, RANKS, TYPE)
    _wait(DEPENDENT)
    if table is not None:
        _empty(before, emptied, program, tl.num_programs(0) - ahead)
    for at in tl.static_range(0, B, SOME):
        if at > 0 and C < K:
            w = _tile(w_ptr, row, col, rows - first, K, K, WHOLE)
        totals, _, squares = _sums(x_ptr + at * K, norm_ptr, w_ptr, w, None, w, row, col, rows - first,
                                    SOME if at + SOME < B else B - at, K, R, C, WHOLE, GAIN)  # fmt: skip
        if at + SOME >= B:
            _end(DEPENDENT)
        for b in tl.static_range(at, at + SOME if at + SOME < B else B):
            if table is not None:
                words = _asked(narrow, b, low, high, columns, RANKS)
            if GAIN is None:
                y = tl.sum(totals[b - at], 1) + offset
            else:
                y = tl.sum(totals[b - at], 1) / tl.sqrt(tl.sum(squares[b - at], 0) / K + eps) + offset
            if table is not None:
                y += _added(words, up, narrow, table, b, low, high, columns, local + row, first + row < rows, RANKS, MORE,
                            TYPE)  # fmt: skip
            if CAP > 0.0:
                y = capped(y, CAP)
            in_range = first + row < rows
            to = b * rows.to(tl.int64) + first + row
            if ACTIVATION != "":
                y = activated(y, ACTIVATION)
            if by is not None:
                y *= tl.load(by + to, mask=in_range, other=0.0)
            tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=in_range)
            if BEST:
                y = tl.where(in_range, y, float("-inf"))
                top = tl.where(tl.sum((y != y).to(tl.int32), 0) > 0, float("nan"), tl.max(y, 0))
                part = b * (tl.num_programs(0) - ahead) + program
                tl.store(best_ptr + part, top)
                tl.store(arg_ptr + part, first + tl.argmax(y, 0))


@triton.jit
def _norm_gate_up_kernel(x_ptr, norm_ptr, gate_ptr, up_ptr, gate_bias, up_bias, out_ptr, eps, rows, table,
                         ids, narrow, before, columns, split, second, emptied, ahead, B: tl.constexpr,
                         SOME: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
                         WHOLE: tl.constexpr, GAIN: tl.constexpr, ACTIVATION: tl.constexpr, RANKS: tl.constexpr,
                         MORE: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    program = tl.program_id(0)
    if table is not None:
        if program < ahead:
            _down(program, x_ptr, norm_ptr, eps, table, ids, narrow, columns, B, K, REACH, GAIN, TYPE, DEPENDENT)
            return
        program -= ahead
    first = program * R
    row, col = tl.arange(0, R), tl.arange(0, C)
    left = rows - first
    gate_ptr += first.to(tl.int64) * K
    up_ptr += first.to(tl.int64) * K
    g, u = _tile(gate_ptr, row, col, left, K, K, WHOLE), _tile(up_ptr, row, col, left, K, K, WHOLE)
    in_range = row < left
    g_offset, u_offset = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    if BIAS:
        g_offset = tl.load(gate_bias + first + row, mask=in_range, other=0.0).to(tl.float32)
        u_offset = tl.load(up_bias + first + row, mask=in_range, other=0.0).to(tl.float32)
    if table is not None:
        g_up = _up(table, 0, split, columns, first + row, in_range, RANKS, TYPE)
        u_up = _up(table, split, columns, columns, first + row, in_range, RANKS, TYPE)
    _wait(DEPENDENT)
    if table is not None:
        _empty(before, emptied, program, tl.num_programs(0) - ahead)
    for at in tl.static_range(0, B, SOME):
        if at > 0 and C < K:
            g, u = _tile(gate_ptr, row, col, left, K, K, WHOLE), _tile(up_ptr, row, col, left, K, K, WHOLE)
        gates, ups, squares = _sums(
            x_ptr + at * K,
            norm_ptr,
            gate_ptr,
            g,
            up_ptr,
            u,
            row,
            col,
            left,
            SOME if at + SOME < B else B - at,
            K,
            R,
            C,
            WHOLE,
            GAIN,
        )
        if at + SOME >= B:
            _end(DEPENDENT)
        for b in tl.static_range(at, at + SOME if at + SOME < B else B):
            if table is not None:
                g_words = _asked(narrow, b, 0, split, columns, RANKS)
                u_words = _asked(narrow, b, split, columns, columns, RANKS)
            factor = 1.0
            if GAIN is not None:
                factor = 1.0 / tl.sqrt(tl.sum(squares[b - at], 0) / K + eps)
            g_sum, u_sum = tl.sum(gates[b - at], 1) * factor + g_offset, tl.sum(ups[b - at], 1) * factor + u_offset
            if table is not None:
                g_sum += _added(g_words, g_up, narrow, table, b, 0, split, columns, first + row, in_range, RANKS, MORE,
                                TYPE)  # fmt: skip
                u_sum += _added(u_words, u_up, narrow, table, b, split, columns, columns, first + row, in_range, RANKS,
                                MORE, TYPE)  # fmt: skip
            y = _gated(g_sum, u_sum, ACTIVATION)
            tl.store(out_ptr + b * rows.to(tl.int64) + first + row, y.to(out_ptr.dtype.element_ty), mask=in_range)


@triton.jit(do_not_specialize=SCALARS)
def _add_product_kernel(h_ptr, w_ptr, bias_ptr, x_ptr, rows, table, ids, narrow, before, columns, split, second,
                        emptied, ahead, boxes, box, state, number, sender, room, keep, apart, B: tl.constexpr,
                        SOME: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
                        WHOLE: tl.constexpr, RANKS: tl.constexpr, MORE: tl.constexpr, REACH: tl.constexpr, TYPE: tl.constexpr,
                        BOXES: tl.constexpr, SENDERS: tl.constexpr, S: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    program = tl.program_id(0)
    if table is not None:
        if program < ahead:
            _down(program, h_ptr, h_ptr, 0.0, table, ids, narrow, columns, B, K, REACH, None, TYPE, DEPENDENT)
            return
        program -= ahead
    first = program * R
    row, col = tl.arange(0, R), tl.arange(0, C)
    left = rows - first
    w_ptr += first.to(tl.int64) * K
    w = _tile(w_ptr, row, col, left, K, K, WHOLE)
    in_range = row < left
    offset = tl.zeros([R], tl.float32)
    if BIAS:
        offset = tl.load(bias_ptr + first + row, mask=in_range, other=0.0).to(tl.float32)
    if table is not None:
        up = _up(table, 0, columns, columns, first + row, in_range, RANKS, TYPE)
    if boxes is not None:
        addresses = _addresses(boxes, BOXES)
    _wait(DEPENDENT)
    if boxes is not None:
        stamp = _stamp(state, number)
    if table is not None:
        _empty(before, emptied, program, tl.num_programs(0) - ahead)
    for at in tl.static_range(0, B, SOME):
        if at > 0 and C < K:
            w = _tile(w_ptr, row, col, left, K, K, WHOLE)
        before_them = ()
        if boxes is None:
            for b in tl.static_range(at, at + SOME if at + SOME < B else B):
                before_them += (tl.load(x_ptr + b * rows.to(tl.int64) + first + row, mask=in_range, other=0.0),)
        totals, _, _ = _sums(
            h_ptr + at * K, h_ptr, w_ptr, w, None, w, row, col, left, SOME if at + SOME < B else B - at, K, R, C, WHOLE, None
        )
        if at + SOME >= B:
            _end(DEPENDENT)
        for b in tl.static_range(at, at + SOME if at + SOME < B else B):
            if table is not None:
                words = _asked(narrow, b, 0, columns, columns, RANKS)
            y = tl.sum(totals[b - at], 1) + offset
            if table is not None:
                y += _added(words, up, narrow, table, b, 0, columns, columns, first + row, in_range, RANKS, MORE, TYPE)
            if boxes is not None:
                _send(addresses, sender * room + b * rows + first + row, y.to(tl.int32, bitcast=True), stamp, in_range)
            else:
                y += before_them[b - at]
                tl.store(x_ptr + b * rows.to(tl.int64) + first + row, y, mask=in_range)
                if keep is not None:
                    tl.store(keep + b * apart + first + row, y, mask=in_range)


def _way(use: str, adapters: StepAdapters | None) -> str:
    """A product that adds adapters waits for their programs in front, and holds rows of b: other plans win there."""
    return use if adapters is None else ADAPTED + use


def _norm_parts(norm: Norm | None) -> tuple[Tensor | None, float, float | None]:
    """Weight, eps and GAIN of a kernel whose norm may be absent."""
    return (None, 0.0, None) if norm is None else norm


@in_place
def norm_product(
    x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, best, arg, dependent=0, cap=0.0, adapters=None,
    activation="", by=None,
):  # fmt: skip
    norm_weight, eps, gain = _norm_parts(norm)
    k, v = (w if w is not None else weight for w in (k_weight, v_weight))
    k_bias, v_bias = (b if b is not None else bias for b in (k_bias, v_bias))  # pointers of one type for tl.where
    q_rows, k_rows, rows, width = weight.shape[0], k.shape[0], out.shape[1], x.shape[1]
    parts = tuple(w.shape[0] for w in (weight, k_weight, v_weight) if w is not None)
    use, height = "qkv", None
    if best is not None:
        use, height = "head", power_of_two(-(-rows // best.shape[1]))  # a partial maximum a program
    launch_product(
        _norm_product_kernel, job_of("product", _way(use, adapters), (rows, width, *parts), weight), width, 1, dependent, x,
        norm_weight, weight, k, v, bias, k_bias, v_bias, out, best, arg, eps, q_rows, k_rows, rows, height=height, weights=1,
        B=len(x), BIAS=bias is not None, BEST=best is not None, GAIN=gain, CAP=cap, by=by, ACTIVATION=activation,
        **_adapter_arguments(adapters, len(x), width),
    )  # fmt: skip
    return out, best, arg


@in_place
def norm_gate_up(x, norm, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu", adapters=None):
    norm_weight, eps, gain = _norm_parts(norm)
    rows, width = gate.shape
    launch_product(
        _norm_gate_up_kernel, job_of("product", _way("gate_up", adapters), (rows, width, rows), gate), width, 1, dependent, x,
        norm_weight, gate, up, gate_bias, up_bias, out, eps, rows, weights=2, B=len(x), BIAS=gate_bias is not None, GAIN=gain,
        ACTIVATION=activation, **_adapter_arguments(adapters, len(x), width),
    )  # fmt: skip
    return out


@in_place
def add_product(h, weight, bias, x, dependent=0, adapters=None, keep=None):
    more = _adapter_arguments(adapters, len(h), weight.shape[1]) | _mail_arguments(None)
    _launch_add(_way("add", adapters), h, weight, bias, x, dependent, keep, **more)
    return x if keep is None else (x, keep)


@in_place
def send_product(h, weight, bias, mail, dependent=0):
    adapters = _adapter_arguments(None, len(h), weight.shape[1])
    _launch_add("add", h, weight, bias, None, dependent, **adapters, **_mail_arguments(mail))
    return mail.boxes


def _launch_add(
    way: str, h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor | None, dependent: int, keep: Tensor | None = None,
    **more: Any,
) -> None:  # fmt: skip
    rows, width = weight.shape
    launch_product(
        _add_product_kernel, job_of("product", way, (rows, width, rows), weight), width, 1, dependent, h, weight,
        bias, x, rows, weights=1, keep=keep, apart=0 if keep is None else keep.stride(0), B=len(h), BIAS=bias is not None,
        **more,
    )  # fmt: skip


@triton.jit
def _norm_rows_kernel(x_ptr, norm_ptr, out_ptr, parts_ptr, eps, B, K: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr,
                      PARTS: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """A program has a row of K, or one of its GROUPS."""
    _begin(DEPENDENT)
    col = tl.arange(0, C)
    row = tl.program_id(0) * K
    if GROUPS > 1:
        norm_ptr += tl.program_id(0) % GROUPS * K
    gain = _gained(1.0, norm_ptr, col, K, False, GAIN)
    _wait(DEPENDENT)
    x = tl.load(x_ptr + row + col, mask=col < K, other=0.0)
    for part in tl.static_range(PARTS):
        x += tl.load(parts_ptr + part * B * K + row + col, mask=col < K, other=0.0)
    _end(DEPENDENT)
    y = x / tl.sqrt(tl.sum(x * x, 0) / K + eps) * gain
    if PARTS > 0:
        tl.store(x_ptr + row + col, x, mask=col < K)
    tl.store(out_ptr + row + col, y.to(out_ptr.dtype.element_ty), mask=col < K)


@triton.jit
def _add_norm_kernel(y_ptr, norm_ptr, x_ptr, factor_ptr, eps, K: tl.constexpr, C: tl.constexpr, GAIN: tl.constexpr,
                     DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col = tl.arange(0, C)
    at, in_range = tl.program_id(0) * K + col, col < K
    gain = _gained(1.0, norm_ptr, col, K, False, GAIN)
    _wait(DEPENDENT)
    x, y = tl.load(x_ptr + at, mask=in_range, other=0.0), tl.load(y_ptr + at, mask=in_range, other=0.0)
    _end(DEPENDENT)
    x += y / tl.sqrt(tl.sum(y * y, 0) / K + eps) * gain
    if factor_ptr is not None:
        x *= tl.load(factor_ptr).to(tl.float32)
    tl.store(x_ptr + at, x, mask=in_range)
    tl.store(y_ptr + at, tl.zeros([C], tl.float32), mask=in_range)


@in_place
def norm_rows(x, norm, out, dependent=0, parts=None, groups=1):
    (weight, eps, offset), (rows, width) = norm, (len(x) * groups, x.shape[1] // groups)
    block, count = power_of_two(width), 0 if parts is None else len(parts)
    warps = max(1, min(8, block // 128)) if count else _warps(block)  # more loads of one thread wait for each other
    _norm_rows_kernel[(rows,)](
        x,
        weight,
        out,
        x if parts is None else parts,
        eps,
        rows,
        width,
        block,
        offset,
        count,
        groups,
        **options(warps, at_once(dependent)),
    )
    return (out, x) if count else out


@torch.no_grad()
def add_norm(y, norm, x, dependent=0, factor=None):
    weight, eps, offset = norm
    block = power_of_two(x.shape[1])
    rest = x.shape[1], block, offset
    _add_norm_kernel[(x.shape[0],)](y, weight, x, factor, eps, *rest, **options(_warps(block), at_once(dependent)))
    bump_versions(y, x)
    return x


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))
