"""A sparse MLP of one decoding step: memory-bound, the chosen experts' weights once, everything else inside.

Products are cut as in decode_product.py: a program owns some rows of a weight and all of its columns, for one row of x and, of
gate and up, one slot. Which expert's weight that is it reads on the device. Programs of a row know nothing of other rows, so it
gets the same bits alone and in a batch; slots are summed in their order.

`route` is one launch: each program computes some logits of a row, and the last of them to finish reads all and chooses. Chosen
are the experts before which fewer than S stand, counted by comparing each with each: E²/128 comparisons a thread, without the S
rounds of reductions, each behind barriers, that finding one greatest after the other would take. `select_experts`, a program
for each row, chooses in the same way. Of groups, each expert's value counts for its group's total where it is one of the BEST
there; an expert is eligible where fewer than `top_groups` groups have a greater total than its group. These go through memory
between passes of one program.

Dependent launch: ids and weights are known before `add_routed` may start, although they come from the kernel before the one
that it waits for. `routed_gate_up` lets its successor in when it has waited itself, and then `route` is over. So `add_routed`
asks for its first weights while gates and ups are still computed.

Of weights stored by column, a program owns COLUMNS of an expert's weight, for one slot of one row. Its loads are rows of
COLUMNS neighbours, of C inputs at a time; the next tile is requested before the last one is used. With slots in the grid, one
row of a model of 2,880 columns has 360 programs. Another launch adds the slots' outputs, in their order.
"""

import torch
import triton
import triton.language as tl

from ..experts import LEAST
from ..gated import INFINITE
from ..plans.types import job_of, power_of_two
from ._launch import _begin, _end, _products, _row, _tile, _wait, bump_versions, in_place, launch_product, options
from .decode_product import _gated, _sums
from .gated import _limited

COMPARED = 4096  # pairs of experts that a program compares at a time


@triton.jit
def _comparable(line, i, experts):
    """Logits of a row that other programs wrote, so from the L2; a NaN counts as infinite."""
    logit = tl.load(line + i, mask=i < experts, other=float("-inf"), cache_modifier=".cg")
    return tl.where(logit != logit, float("inf"), logit)


@triton.jit
def _choose(line, ids_ptr, weights_ptr, b, experts, S: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
            NORMALISE: tl.constexpr):  # fmt: skip
    i = tl.arange(0, E)
    in_range = i < experts
    mine = _comparable(line, i, experts)
    place = tl.zeros([E], tl.int32)
    for start in range(0, E, EB):
        j = start + tl.arange(0, EB)
        other = _comparable(line, j, experts)
        before = (other[None] > mine[:, None]) | ((other[None] == mine[:, None]) & (j[None] < i[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    chosen = in_range & (place < S)
    share = tl.where(in_range, tl.exp(mine - tl.max(mine, 0)), 0.0)  # ∞ - ∞ is NaN, which the sum then is too
    full = tl.sum(tl.where(chosen, share, 0.0), 0) if NORMALISE else tl.sum(share, 0)
    tl.store(ids_ptr + b * S + place, i, mask=chosen)
    tl.store(weights_ptr + b * S + place, share / full, mask=chosen)


@triton.jit
def _route_kernel(x_ptr, norm_ptr, router_ptr, logits_ptr, count_ptr, ids_ptr, weights_ptr, eps, experts, S: tl.constexpr,
                  K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
                  NORMALISE: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first, b = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, R), tl.arange(0, C)
    left = experts - first
    router_ptr += first.to(tl.int64) * K
    w = _tile(router_ptr, row, col, left, K, K, WHOLE)
    _wait(DEPENDENT)
    total, square = _products(x_ptr + b * K, norm_ptr, router_ptr, w, row, col, left, K, R, C, WHOLE, 0.0)
    _end(DEPENDENT)
    line = logits_ptr + b * experts
    tl.store(line + first + row, tl.sum(total, 1) / tl.sqrt(tl.sum(square, 0) / K + eps), mask=row < left)
    tl.debug_barrier()  # every thread's stores before the one thread that counts
    if tl.atomic_add(count_ptr + b, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _choose(line, ids_ptr, weights_ptr, b, experts, S, E, EB, NORMALISE)
        tl.store(count_ptr + b, 0)


@triton.jit
def _expert(id_ptr, experts):
    """(the expert to read, 1), or for an id that none of them has (the first, NaN)."""
    expert = tl.load(id_ptr, cache_modifier=".cg").to(tl.int64)
    known = (expert >= 0) & (expert < experts)
    return tl.where(known, expert, 0), tl.where(known, 1.0, float("nan"))


@triton.jit
def _routed_gate_up_kernel(x_ptr, norm_ptr, gate_up_ptr, ids_ptr, out_ptr, eps, limit, experts, rows, S: tl.constexpr,
                           ACTIVATION: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                           WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    first, pair = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, R), tl.arange(0, C)
    left = rows - first
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    expert, poison = _expert(ids_ptr + pair, experts)
    gate_ptr = gate_up_ptr + (expert * 2 * rows + first) * K
    up_ptr = gate_up_ptr + ((expert * 2 + 1) * rows + first) * K
    x_ptr += pair // S * K
    g, u = _tile(gate_ptr, row, col, left, K, K, WHOLE), _tile(up_ptr, row, col, left, K, K, WHOLE)
    gates, ups, squares = _sums(x_ptr, norm_ptr, gate_ptr, g, up_ptr, u, row, col, left, 1, K, R, C, WHOLE, 0.0)
    _end(DEPENDENT)
    factor = 1.0 / tl.sqrt(tl.sum(squares[0], 0) / K + eps)
    y, z = _limited(tl.sum(gates[0], 1) * factor, tl.sum(ups[0], 1) * factor, limit)
    y = _gated(y, z, ACTIVATION) * poison
    tl.store(out_ptr + pair * rows + first + row, y.to(out_ptr.dtype.element_ty), mask=row < left)


@triton.jit
def _add_routed_kernel(h_ptr, down_ptr, ids_ptr, weights_ptr, x_ptr, stacked, rows, S: tl.constexpr, K: tl.constexpr,
                       R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    first, b = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, R), tl.arange(0, C)
    EVEN: tl.constexpr = K % C == 0
    left = rows - first
    experts, poisons = (), ()
    for slot in tl.static_range(S):
        expert, poison = _expert(ids_ptr + b * S + slot, stacked)
        experts += (expert,)  # type: ignore[assignment]
        poisons += (poison,)  # type: ignore[assignment]
    w = _tile(down_ptr + (experts[0] * rows + first) * K, row, col, left, K, K, WHOLE)  # type: ignore[misc]
    _wait(DEPENDENT)
    to = x_ptr + b * rows + first + row
    x = tl.load(to, mask=row < left, other=0.0)
    total = tl.zeros([R, C], tl.float32)
    for slot in tl.static_range(S):
        w_ptr = down_ptr + (experts[slot] * rows + first) * K
        if slot > 0:
            w = _tile(w_ptr, row, col, left, K, K, WHOLE)
        weight = tl.load(weights_ptr + b * S + slot, cache_modifier=".cg") * poisons[slot]  # type: ignore[misc]
        for start in range(0, K, C):
            h = _row(h_ptr + (b * S + slot) * K + start, col, K - start, EVEN) * weight
            total += w.to(tl.float32) * h[None]
            if start + C < K:
                w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
    _end(DEPENDENT)
    tl.store(to, x + tl.sum(total, 1), mask=row < left)


@torch.no_grad()
def route(x, norm, router, normalise, logits, count, ids, weights, dependent=0):
    experts, width = router.shape
    block = power_of_two(experts)
    launch_product(
        _route_kernel, job_of("product", "router", (experts, width, experts), router), width, len(x), dependent, x, norm.weight,
        router, logits, count, ids, weights, norm.eps, experts, S=ids.shape[1], E=block,
        EB=max(1, min(block, COMPARED // block)), NORMALISE=normalise,
    )  # fmt: skip
    bump_versions(logits, count, ids, weights)
    return ids, weights


@in_place
def routed_gate_up(x, norm, gate_up, ids, out, dependent=0, limit=INFINITE, activation="silu"):
    rows, width = out.shape[2], x.shape[1]
    launch_product(
        _routed_gate_up_kernel, job_of("product", "routed_gate_up", (rows, width, rows), gate_up), width, ids.numel(),
        dependent, x, norm.weight, gate_up, ids, out, norm.eps, limit, len(gate_up), rows, S=ids.shape[1],
        ACTIVATION=activation,
    )  # fmt: skip
    return out


@in_place
def add_routed(h, down, ids, weights, x, dependent=0):
    experts, rows, width = down.shape
    launch_product(
        _add_routed_kernel, job_of("product", "add_routed", (rows, width, rows), down), width, len(x), dependent, h, down, ids,
        weights, x, experts, rows, S=ids.shape[1],
    )  # fmt: skip
    return x


_LEAST = tl.constexpr(LEAST)


@triton.jit
def _score(line, i, experts):
    logit = tl.load(line + i, mask=i < experts, other=0.0, cache_modifier=".cg")
    return 1.0 / (1.0 + tl.exp(-logit))


@triton.jit
def _value(line, correction_ptr, i, experts):
    """Value that an expert is chosen by; a NaN counts as infinite."""
    if correction_ptr is None:
        value = tl.load(line + i, mask=i < experts, other=0.0, cache_modifier=".cg")
    else:
        value = _score(line, i, experts) + tl.load(correction_ptr + i, mask=i < experts, other=0.0).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    return tl.where(i < experts, value, float("-inf"))


@triton.jit
def _select_experts_kernel(logits_ptr, correction_ptr, spare_ptr, ids_ptr, shares_ptr, factor, experts, size, top_groups,
                           S: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, GROUPED: tl.constexpr,
                           NORMALISE: tl.constexpr, BEST: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, E)
    inside = i < experts
    line = logits_ptr + b * experts
    best, totals = spare_ptr + b * 2 * experts, spare_ptr + b * 2 * experts + experts
    _wait(DEPENDENT)
    _end(DEPENDENT)
    mine = _value(line, correction_ptr, i, experts)
    allowed = inside
    if GROUPED:
        place = tl.zeros([E], tl.int32)
        for start in range(0, E, EB):
            j = start + tl.arange(0, EB)
            other = _value(line, correction_ptr, j, experts)
            before = (other[None] > mine[:, None]) | ((other[None] == mine[:, None]) & (j[None] < i[:, None]))
            place += tl.sum((before & (j[None] // size == i[:, None] // size)).to(tl.int32), 1)
        tl.store(best + i, tl.where(place < BEST, mine, 0.0), mask=inside)
        tl.debug_barrier()
        total = tl.zeros([E], tl.float32)
        for start in range(0, E, EB):
            j = start + tl.arange(0, EB)
            part = tl.load(best + j, mask=j < experts, other=0.0, cache_modifier=".cg")
            total += tl.sum(tl.where(j[None] // size == i[:, None] // size, part[None], 0.0), 1)
        tl.store(totals + i, total, mask=inside)
        tl.debug_barrier()
        rank = tl.zeros([E], tl.int32)
        for start in range(0, E, EB):
            j = start + tl.arange(0, EB)
            other = tl.load(totals + j, mask=j < experts, other=0.0, cache_modifier=".cg")
            first = (j < experts) & (j % size == 0)  # one expert for each group
            ahead = (other[None] > total[:, None]) | ((other[None] == total[:, None]) & (j[None] // size < i[:, None] // size))
            rank += tl.sum((ahead & first[None]).to(tl.int32), 1)
        allowed = inside & (rank < top_groups)
        tl.debug_barrier()
        tl.store(totals + i, tl.where(allowed, mine, float("-inf")), mask=inside)
        tl.debug_barrier()
    mine = tl.where(allowed, mine, float("-inf"))
    place = tl.zeros([E], tl.int32)
    for start in range(0, E, EB):
        j = start + tl.arange(0, EB)
        if GROUPED:
            other = tl.load(totals + j, mask=j < experts, other=float("-inf"), cache_modifier=".cg")
        else:
            other = _value(line, correction_ptr, j, experts)
        before = (other[None] > mine[:, None]) | ((other[None] == mine[:, None]) & (j[None] < i[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    chosen = allowed & (place < S)
    if correction_ptr is None:  # a softmax over those that are chosen, or all
        logit = tl.load(line + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
        summed = chosen if NORMALISE else inside
        share = tl.where(summed, tl.exp(logit - tl.max(tl.where(summed, logit, float("-inf")), 0)), 0.0)
        share = share / tl.sum(share, 0)
    elif NORMALISE:
        share = _score(line, i, experts)
        share = share / (tl.sum(tl.where(chosen, share, 0.0), 0) + _LEAST)
    else:
        share = _score(line, i, experts)
    tl.store(ids_ptr + b * S + place, i, mask=chosen)
    tl.store(shares_ptr + b * S + place, share * factor, mask=chosen)


@triton.jit
def _gate_rows_kernel(x_ptr, norm_ptr, weight_ptr, h_ptr, eps, width, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
                      DEPENDENT: tl.constexpr):  # fmt: skip
    _begin(DEPENDENT)
    col, row = tl.arange(0, C), tl.program_id(0).to(tl.int64)
    gain = tl.load(norm_ptr + col, mask=col < K, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col < K, other=0.0).to(tl.float32)
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x = tl.load(x_ptr + row * K + col, mask=col < K, other=0.0)
    y = tl.sum(x * gain * weight, 0) / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    gate = 1.0 / (1.0 + tl.exp(-y))
    for start in range(0, width, W):
        at = start + tl.arange(0, W)
        h = tl.load(h_ptr + row * width + at, mask=at < width, other=0.0)
        tl.store(h_ptr + row * width + at, (h.to(tl.float32) * gate).to(h_ptr.dtype.element_ty), mask=at < width)


@torch.no_grad()
def select_experts(logits, routing, spare, ids, shares, dependent=0):
    rows, experts = logits.shape
    block = power_of_two(experts)
    _select_experts_kernel[(rows,)](
        logits, routing.correction, spare, ids, shares, routing.factor, experts, experts // routing.groups, routing.top_groups,
        ids.shape[1], block, max(1, min(block, COMPARED // block)), routing.groups > 1, routing.normalise,
        routing.best, **options(4, dependent),
    )  # fmt: skip
    bump_versions(spare, ids, shares)
    return ids, shares


@in_place
def gate_rows(x, norm, weight, h, dependent=0):
    hidden = x.shape[1]
    block = power_of_two(hidden)
    _gate_rows_kernel[(len(x),)](
        x, norm.weight, weight, h, norm.eps, h.shape[1], hidden, block, 1024, **options(max(1, min(8, block // 512)), dependent)
    )
    return h


ROWS, GATE_UP_COLUMNS, DOWN_COLUMNS, WARPS = 64, 64, 32, 4
BLOCK = 512  # columns of a program that adds slots


@triton.jit
def _weight_tile(w_ptr, row, col, rows, columns, N: tl.constexpr):
    return tl.load(w_ptr + row[:, None] * N + col[None], mask=(row < rows)[:, None] & (col < columns)[None], other=0.0)


@triton.jit
def _clamped_unit(both, alpha, limit, R: tl.constexpr):
    """Return the clamped units of R / 2 pairs of gate and up."""
    gate, up = tl.split(tl.reshape(both, [R // 2, 2]))
    gate, up = _limited(gate, up, limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def _column_gate_up_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr, eps, alpha, limit, experts, S: tl.constexpr,
                           K: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
                           DEPENDENT: tl.constexpr):  # fmt: skip
    first, pair = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, C), tl.arange(0, R)
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    expert, poison = _expert(ids_ptr + pair, experts)
    w_ptr += expert * K * N + first
    left = N - first
    total, square = tl.zeros([C, R], tl.float32), tl.zeros([C], tl.float32)
    w = _weight_tile(w_ptr, row, col, K, left, N)
    for start in range(0, K, C):
        x = tl.load(x_ptr + pair // S * K + start + row, mask=start + row < K, other=0.0)
        gain = tl.load(norm_ptr + start + row, mask=start + row < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * (x * gain)[:, None]
        square += x * x
        if start + C < K:
            w = _weight_tile(w_ptr + (start + C) * N, row, col, K - start - C, left, N)
    _end(DEPENDENT)
    bias = tl.load(bias_ptr + expert * N + first + col, mask=col < left, other=0.0).to(tl.float32)
    both = tl.sum(total, 0) / tl.sqrt(tl.sum(square, 0) / K + eps) + bias
    y = _clamped_unit(both, alpha, limit, R) * poison
    unit = tl.arange(0, R // 2)
    tl.store(out_ptr + pair * (N // 2) + first // 2 + unit, y.to(out_ptr.dtype.element_ty), mask=2 * unit < left)


@triton.jit
def _column_down_kernel(h_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr, experts, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
                        R: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    first, pair = tl.program_id(0) * R, tl.program_id(1).to(tl.int64)
    row, col = tl.arange(0, C), tl.arange(0, R)
    _begin(DEPENDENT)
    expert, poison = _expert(ids_ptr + pair, experts)
    w_ptr += expert * K * N + first
    left = N - first
    total = tl.zeros([C, R], tl.float32)
    w = _weight_tile(w_ptr, row, col, K, left, N)
    _wait(DEPENDENT)
    for start in range(0, K, C):
        h = tl.load(h_ptr + pair * K + start + row, mask=start + row < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * h[:, None]
        if start + C < K:
            w = _weight_tile(w_ptr + (start + C) * N, row, col, K - start - C, left, N)
    _end(DEPENDENT)
    bias = tl.load(bias_ptr + expert * N + first + col, mask=col < left, other=0.0).to(tl.float32)
    tl.store(out_ptr + pair * N + first + col, (tl.sum(total, 0) + bias) * poison, mask=col < left)


@triton.jit
def _add_slots_kernel(y_ptr, shares_ptr, x_ptr, columns, S: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    _begin(DEPENDENT)
    b, col = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < columns
    _wait(DEPENDENT)
    _end(DEPENDENT)
    x = tl.load(x_ptr + b * columns + col, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(S):
        share = tl.load(shares_ptr + b * S + slot, cache_modifier=".cg")
        total += share * tl.load(y_ptr + (b * S + slot) * columns + col, mask=inside, other=0.0)
    tl.store(x_ptr + b * columns + col, x + total, mask=inside)


@in_place
def column_gate_up(x, norm, gate_up, bias, ids, out, alpha, limit, dependent=0):
    experts, hidden, columns = gate_up.shape
    _column_gate_up_kernel[(triton.cdiv(columns, GATE_UP_COLUMNS), ids.numel())](
        x, norm.weight, gate_up, bias, ids, out, norm.eps, alpha, limit, experts, ids.shape[1], hidden, columns, ROWS,
        GATE_UP_COLUMNS, **options(WARPS, dependent),
    )  # fmt: skip
    return out


@in_place
def column_down(h, down, bias, ids, out, dependent=0):
    experts, units, columns = down.shape
    _column_down_kernel[(triton.cdiv(columns, DOWN_COLUMNS), ids.numel())](
        h, down, bias, ids, out, experts, units, columns, ROWS, DOWN_COLUMNS, **options(WARPS, dependent)
    )
    return out


@in_place
def add_slots(y, shares, x, dependent=0):
    rows, slots, columns = y.shape
    _add_slots_kernel[(triton.cdiv(columns, BLOCK), rows)](y, shares, x, columns, slots, BLOCK, **options(4, dependent))
    return x
