"""Products of a SwiGLU MLP for Hopper, in Gluon: the unit and its gradient are computed as a product's tiles are written.

Persistent, warp-specialized programs with a ping-pong schedule: a producer warp loads tiles of both factors by TMA into a ring
of STAGES, and two consumer warpgroups take tiles of 128 x 128 sums alternately. While one multiplies, the other runs its
epilogue. At 16,384 rows of 350m (1,024 to 2 x 4,096) forward takes 444 us and backward 317, where cuBLAS's products alone take
430 and 210, and with a pass of the unit 492 and 405 (H200, bf16). Backward is bound by what a multiprocessor exchanges with the
L2: without reading gate and up it takes 278 us, without writing gradients 285, without both 224.

A consumer waits for its turn before it waits for its stages: the parity of a barrier cannot tell a phase from the one two
rounds later.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...device import chip
from ..plans.types import cdiv

# Named so from Triton 3.8 on.
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

STAGES = gl.constexpr(5)  # of 32 KB; with 4 forward took 466 us
DEPTH = gl.constexpr(64)  # of a stage's tiles, 128 bytes: a row of the swizzled shared memory
PART = gl.constexpr(32)  # columns of the sums whose gradient is computed at a time: of 64, registers spill


@gluon.jit
def _place(tile, tall, across, GROUP: gl.constexpr):
    """Return the first row of a tile and its number along the columns. GROUP rows of tiles are taken together, for the L2."""
    band = tile // (GROUP * across)
    height = gl.minimum(tall - band * GROUP, GROUP)
    return (band * GROUP + tile % (GROUP * across) % height) * 128, tile % (GROUP * across) // height


@gluon.jit
def _produce(x, weight, a, b, full, empty, tall, across, I, K, FORWARD: gl.constexpr, GROUP: gl.constexpr):
    """Load all tiles of the program's products into the ring, as its stages become empty."""
    at = 0
    for tile in range(gl.program_id(0), tall * across, gl.num_programs(0)):
        top, column = _place(tile, tall, across, GROUP)
        for k in range(0, K, DEPTH):
            stage = at % STAGES
            mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, 2 * 128 * DEPTH * 2)
            fetch(x, [top, k], loaded, a.index(stage))
            if FORWARD:  # half of the columns are of the gate, half of up
                fetch(weight, [column * 64, k], loaded, b.index(stage).slice(0, 64))
                fetch(weight, [column * 64 + I, k], loaded, b.index(stage).slice(64, 64))
            else:
                fetch(weight, [k, column * 128], loaded, b.index(stage))
            at += 1


@gluon.jit
def _multiply(a, b, full, empty, turns, n, steps, FORWARD: gl.constexpr, CONSUMER: gl.constexpr):
    """Return the sums of the program's tile number n, which `steps` stages hold, 128 x 128 in fp32."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    total = gl.zeros([128, 128], gl.float32, MMA)
    first = n * steps
    mbarrier.wait(turns.index(CONSUMER), (n // 2 + 1 - CONSUMER) & 1)
    for k in range(steps):
        stage = (first + k) % STAGES
        mbarrier.wait(full.index(stage), ((first + k) // STAGES) & 1)
        factor = b.index(stage).permute((1, 0)) if FORWARD else b.index(stage)
        total = warpgroup_mma(a.index(stage), factor, total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        mbarrier.arrive(empty.index((first + k + STAGES - 1) % STAGES), count=1, pred=k > 0)  # of the step before
    mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    mbarrier.arrive(empty.index((first + steps - 1) % STAGES), count=1)
    return total


@gluon.jit
def _halves(t, COLUMNS: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(t, (128, 2, COLUMNS)), (0, 2, 1)))


@gluon.jit
def _sigmoid(z):
    root = gl.rsqrt(1.0 + gl.exp2(-1.4426950408889634 * z))  # as in _math.py
    return root * root


@gluon.jit
def _consume_forward(
    packed, out, a, b, gates, ups, full, empty, turns, tall, across, I, K, CONSUMER: gl.constexpr, GROUP: gl.constexpr
):
    """Multiply and compute every second tile of the program, from number CONSUMER on."""
    steps = K // DEPTH
    count = gl.cdiv(tall * across - gl.program_id(0), gl.num_programs(0))
    gate_at, up_at = gates.index(CONSUMER), ups.index(CONSUMER)
    for n in range(CONSUMER, count, 2):
        top, column = _place(gl.program_id(0) + n * gl.num_programs(0), tall, across, GROUP)
        left = column * 64
        gate, up = _halves(_multiply(a, b, full, empty, turns, n, steps, True, CONSUMER), 64)
        gate, up = gate.to(out.dtype), up.to(out.dtype)  # the unit is that of the rounded ones, as backward finds them
        tma.store_wait(0)
        gate_at.store(gate)
        up_at.store(up)
        z = gate.to(gl.float32)
        h = (z * _sigmoid(z) * up.to(gl.float32)).to(out.dtype)
        fence_async_shared()
        store(packed, [top, left], gate_at)
        store(packed, [top, left + I], up_at)
        tma.store_wait(1)
        gate_at.store(h)
        fence_async_shared()
        store(out, [top, left], gate_at)
    tma.store_wait(0)


@gluon.jit
def _request(packed, gate_at, up_at, arrival, top, left, I):
    mbarrier.expect(arrival, 2 * 128 * PART * 2)
    fetch(packed, [top, left], arrival, gate_at)
    fetch(packed, [top, left + I], arrival, up_at)


@gluon.jit
def _differentiate(dh, gradient, out, gate_at, up_at, arrival, phase, top, left, I):
    """Compute and store the gradients of the gate and up that have arrived, and h, which takes the gate's place."""
    mbarrier.wait(arrival, phase)
    gate, up = gate_at.load(dh.type.layout).to(gl.float32), up_at.load(dh.type.layout).to(gl.float32)
    s = _sigmoid(gate)
    value = gate * s
    gate_at.store((dh * up * (s + value * (1.0 - s))).to(out.dtype))
    up_at.store((dh * value).to(out.dtype))
    fence_async_shared()
    store(gradient, [top, left], gate_at)
    store(gradient, [top, left + I], up_at)
    tma.store_wait(1)
    gate_at.store((value * up).to(out.dtype))
    fence_async_shared()
    store(out, [top, left], gate_at)


@gluon.jit
def _consume_backward(packed, gradient, out, a, b, gates, ups, arrivals, full, empty, turns, tall, across, I, K,
                      CONSUMER: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Multiply and compute every second tile of the program, from number CONSUMER on."""
    steps = K // DEPTH
    count = gl.cdiv(tall * across - gl.program_id(0), gl.num_programs(0))
    g0, u0, first = gates.index(2 * CONSUMER), ups.index(2 * CONSUMER), arrivals.index(2 * CONSUMER)
    g1, u1, second = gates.index(2 * CONSUMER + 1), ups.index(2 * CONSUMER + 1), arrivals.index(2 * CONSUMER + 1)
    for n in range(CONSUMER, count, 2):
        top, column = _place(gl.program_id(0) + n * gl.num_programs(0), tall, across, GROUP)
        left = column * 128
        tma.store_wait(0)
        _request(packed, g0, u0, first, top, left, I)
        _request(packed, g1, u1, second, top, left + PART, I)
        near, far = _halves(_multiply(a, b, full, empty, turns, n, steps, False, CONSUMER), 2 * PART)
        one, other = _halves(near, PART)
        _differentiate(one, gradient, out, g0, u0, first, 0, top, left, I)
        _differentiate(other, gradient, out, g1, u1, second, 0, top, left + PART, I)
        tma.store_wait(3)
        _request(packed, g0, u0, first, top, left + 2 * PART, I)
        tma.store_wait(0)
        _request(packed, g1, u1, second, top, left + 3 * PART, I)
        one, other = _halves(far, PART)
        _differentiate(one, gradient, out, g0, u0, first, 1, top, left + 2 * PART, I)
        _differentiate(other, gradient, out, g1, u1, second, 1, top, left + 3 * PART, I)
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit(do_not_specialize=["N"])
def _swiglu_product_kernel(x, weight, packed, out, N, I, K, GROUP: gl.constexpr):
    a = gl.allocate_shared_memory(x.dtype, [STAGES, 128, DEPTH], x.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, 128, DEPTH], x.layout)
    gates = gl.allocate_shared_memory(x.dtype, [2, 128, 64], out.layout)
    ups = gl.allocate_shared_memory(x.dtype, [2, 128, 64], out.layout)
    full, empty, turns = _barriers(STAGES), _barriers(STAGES), _barriers(2)
    fence_async_shared()
    tall, across = gl.cdiv(N, 128), I // 64
    gl.warp_specialize(
        [
            (_consume_forward, (packed, out, a, b, gates, ups, full, empty, turns, tall, across, I, K, 0, GROUP)),
            (_consume_forward, (packed, out, a, b, gates, ups, full, empty, turns, tall, across, I, K, 1, GROUP)),
            (_produce, (x, weight, a, b, full, empty, tall, across, I, K, True, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit(do_not_specialize=["N"])
def _swiglu_product_backward_kernel(g, weight, packed, gradient, out, N, I, K, GROUP: gl.constexpr):
    a = gl.allocate_shared_memory(g.dtype, [STAGES, 128, DEPTH], g.layout)
    b = gl.allocate_shared_memory(g.dtype, [STAGES, DEPTH, 128], weight.layout)
    gates = gl.allocate_shared_memory(g.dtype, [4, 128, PART], out.layout)
    ups = gl.allocate_shared_memory(g.dtype, [4, 128, PART], out.layout)
    full, empty, turns, arrivals = _barriers(STAGES), _barriers(STAGES), _barriers(2), _barriers(4)
    fence_async_shared()
    tall, across = gl.cdiv(N, 128), I // 128
    gl.warp_specialize(
        [
            (
                _consume_backward,
                (packed, gradient, out, a, b, gates, ups, arrivals, full, empty, turns, tall, across, I, K, 0, GROUP),
            ),
            (
                _consume_backward,
                (packed, gradient, out, a, b, gates, ups, arrivals, full, empty, turns, tall, across, I, K, 1, GROUP),
            ),
            (_produce, (g, weight, a, b, full, empty, tall, across, I, K, False, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )


def swiglu_product(x: Tensor, weight: Tensor, packed: Tensor, out: Tensor) -> None:
    """Write x weightᵀ into `packed` (N, 2 I), and its SwiGLU into `out` (N, I)."""
    (rows, width), cols = x.shape, out.shape[1]
    _swiglu_product_kernel[_grid(x, rows, cols // 64)](
        _tiles(x, 128, 64), _tiles(weight, 64, 64), _tiles(packed, 128, 64), _tiles(out, 128, 64), rows, cols, width, 16,
        num_warps=4,
    )  # fmt: skip


def swiglu_product_backward(g: Tensor, weight: Tensor, packed: Tensor, gradient: Tensor, out: Tensor) -> None:
    """Write the gradient of `packed` into `gradient`, which may be in its memory, and h into `out`, from g weight."""
    (rows, width), cols = g.shape, out.shape[1]
    _swiglu_product_backward_kernel[_grid(g, rows, cols // 128)](
        _tiles(g, 128, 64), _tiles(weight, 64, 128), _tiles(packed, 128, 32), _tiles(gradient, 128, 32), _tiles(out, 128, 32),
        rows, cols, width, 8, num_warps=4,
    )  # fmt: skip


def _grid(x: Tensor, rows: int, across: int) -> tuple[int]:
    return (min(chip(x.device).sms, cdiv(rows, 128) * across),)


def _tiles(t: Tensor, rows: int, columns: int) -> Any:
    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(t, [rows, columns], layout)
