"""A sparse MLP of one decoding step: memory-bound, the chosen experts' weights once, everything else inside.

Products are cut as in decode_product.py: a program owns some rows of a weight and all of its columns, for one row of x and, of
gate and up, one slot. Which expert's weight that is it reads on the device. Programs of a row know nothing of other rows, so it
gets the same bits alone and in a batch; slots are summed in their order.

`route` is one launch: each program computes some logits of a row, and the last of them to finish reads all and chooses. Chosen
are the experts before which fewer than S stand, counted by comparing each with each: E²/128 comparisons a thread, without the S
rounds of reductions, each behind barriers, that finding one greatest after the other would take.

Dependent launch: ids and weights are known before `add_routed` may start, although they come from the kernel before the one
that it waits for. `routed_gate_up` lets its successor in when it has waited itself, and then `route` is over. So `add_routed`
asks for its first weights while gates and ups are still computed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_product import Norm
from ..gated import INFINITE
from ..plans.types import job_of, power_of_two
from ._launch import bump_versions, launch_product
from ._pdl import _begin, _end, _row, _tile, _wait
from .decode_product import _gated

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
    EVEN: tl.constexpr = K % C == 0
    left = experts - first
    router_ptr += first.to(tl.int64) * K
    w = _tile(router_ptr, row, col, left, K, K, WHOLE)
    _wait(DEPENDENT)
    total, square = tl.zeros([R, C], tl.float32), tl.zeros([C], tl.float32)
    for start in range(0, K, C):
        x = _row(x_ptr + b * K + start, col, K - start, EVEN)
        total += w.to(tl.float32) * (x * _row(norm_ptr + start, col, K - start, EVEN))[None]
        square += x * x
        if start + C < K:
            w = _tile(router_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
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
    EVEN: tl.constexpr = K % C == 0
    left = rows - first
    _wait(DEPENDENT)
    _begin(DEPENDENT)
    expert, poison = _expert(ids_ptr + pair, experts)
    gate_ptr = gate_up_ptr + (expert * 2 * rows + first) * K
    up_ptr = gate_up_ptr + ((expert * 2 + 1) * rows + first) * K
    x_ptr += pair // S * K
    gate, up, square = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32), tl.zeros([C], tl.float32)
    g, u = _tile(gate_ptr, row, col, left, K, K, WHOLE), _tile(up_ptr, row, col, left, K, K, WHOLE)
    for start in range(0, K, C):
        x = _row(x_ptr + start, col, K - start, EVEN)
        normed = (x * _row(norm_ptr + start, col, K - start, EVEN))[None]
        gate += g.to(tl.float32) * normed
        up += u.to(tl.float32) * normed
        square += x * x
        if start + C < K:
            g = _tile(gate_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
            u = _tile(up_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
    _end(DEPENDENT)
    factor = 1.0 / tl.sqrt(tl.sum(square, 0) / K + eps)
    y, z = tl.sum(gate, 1) * factor, tl.sum(up, 1) * factor
    y, z = tl.where(y > limit, limit, y), tl.where(z > limit, limit, tl.where(z < -limit, -limit, z))  # a NaN stays
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
def route(
    x: Tensor, norm: Norm, router: Tensor, normalise: bool, logits: Tensor, count: Tensor, ids: Tensor, weights: Tensor,
    dependent: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    experts, width = router.shape
    block = power_of_two(experts)
    launch_product(
        _route_kernel, job_of("product", "router", (experts, width, experts), router), width, len(x), dependent, x, norm.weight,
        router, logits, count, ids, weights, norm.eps, experts, S=ids.shape[1], E=block,
        EB=max(1, min(block, COMPARED // block)), NORMALISE=normalise,
    )  # fmt: skip
    bump_versions(logits, count, ids, weights)
    return ids, weights


@torch.no_grad()
def routed_gate_up(
    x: Tensor, norm: Norm, gate_up: Tensor, ids: Tensor, out: Tensor, dependent: int = 0, limit: float = INFINITE,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    rows, width = out.shape[2], x.shape[1]
    launch_product(
        _routed_gate_up_kernel, job_of("product", "routed_gate_up", (rows, width, rows), gate_up), width, ids.numel(),
        dependent, x, norm.weight, gate_up, ids, out, norm.eps, limit, len(gate_up), rows, S=ids.shape[1],
        ACTIVATION=activation,
    )  # fmt: skip
    bump_versions(out)
    return out


@torch.no_grad()
def add_routed(h: Tensor, down: Tensor, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    experts, rows, width = down.shape
    launch_product(
        _add_routed_kernel, job_of("product", "add_routed", (rows, width, rows), down), width, len(x), dependent, h, down, ids,
        weights, x, experts, rows, S=ids.shape[1],
    )  # fmt: skip
    bump_versions(x)
    return x
