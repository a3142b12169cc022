"""Launch of a kernel with its plan, or with the next smaller one if the GPU has less memory than the compiler asks for; and
functions shared by the kernels of a decoding step: programmatic dependent launch (PDL), and loads of x and of weights.

PDL (`dependent`): a kernel starts while its predecessor still runs and requests its first weights, which depend on no kernel,
before it waits for x. An EARLY kernel lets its successor start at once, so that the weights of later kernels stream early; a
LATE one after it has loaded its own weights, because where a weight keeps the GPU busy, successors only take its room; a FENCE
after its wait. In a LATE chain, kernels without weights (norms, activations, attention) are EARLY, and some small products.

Reads before the wait. A wait ends when the previous launch, and all launches before it, have ended. A launch begins when every
program of its predecessor has triggered it or ended, which implies nothing about older launches: where all are EARLY, several
run at once. But a kernel that triggers its successor after its wait (FENCE, LATE, and a plain launch, which triggers none) has
seen all kernels before it end. So after such a fence, however many launches later, data written before the fence may be read
without a wait:

weights, norms, tables      in every kernel: no step writes them
position, old keys, pages   in attention: written by the previous token choice; the q k v product of the first layer is a fence
position, state             in recurrences: likewise; the matrix and the ring are as the previous step has left them
sums of hc_write            written by the previous hc_write; turn_heads and routed_gate_up are fences; of fp4 experts it
                            is the launch that rounds the x of routed_gate_up
the exchanged streams       likewise
x of an AHEAD product       if a fence is between it and the writer of x: the shared expert's down, after routed_gate_up
ids of a down product       written by the choice of experts before that fence; of fp4's gate and up likewise
another layer's new key     in attention by query: gate and up, and down, stand between, and are LATE where it is
x, qkv, gated, the new key  never: written by the previous launch, or the one before that

All writes come after the wait: launches that still run may read the old values.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from ...device import interpreted
from ..decode_product import AHEAD, EARLY, FENCE, LATE, chain_mode
from ..plans import Job, plan_for, plan_traced, step_down
from ..plans.types import MatrixPlan

Result = TypeVar("Result")


def launch(job: Job, run: Callable[[Any], Result]) -> Result:
    """`run(plan)`, which launches what `job` is of. A launch that asks for too much runs nothing, so it may be repeated."""
    if torch.compiler.is_compiling():
        return run(plan_traced(*job[:4]))
    plan = plan_for(job)
    while True:
        try:
            return run(plan)
        except OutOfResources as error:
            smaller = step_down(job, plan, str(error))
            if smaller is None:
                raise
            plan = smaller


def launch_product(
    kernel: Any, job: Job, length: int, across: int, dependent: int, *arguments: Any, height: int | None = None,
    weights: int = 0, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel whose programs each own some rows of a weight, and loop over all of their `length` elements or words.

    An argument that is None is a tensor that this variant of the kernel does not read: the first one is passed instead.

    across   number of programs for each range of rows. Kernels of packed weights (KIND) have them as the first grid dimension
    height   rows of a program, where the plan does not choose them
    weights  whose tiles a program holds, of a kernel that multiplies SOME rows of x at once; 0: of others
    ahead    in `constants`: number of programs in front of all others, with another task
    """
    rows, args = job.shape[0], [arguments[0] if argument is None else argument for argument in arguments]

    def run(plan: MatrixPlan) -> None:
        plan = plan if height is None else plan._replace(rows=height)
        along = plan.along(rows)
        if weights:
            constants["SOME"] = _at_a_time(plan, constants["B"], length, weights)
        kernel[(across, along) if "KIND" in constants else (along + constants.get("ahead", 0), across)](
            *args, **constants, K=job.shape[1], R=plan.rows, C=plan.columns, WHOLE=plan.divides(rows, length),
            **options(plan.warps, dependent),
        )  # fmt: skip

    launch(job, run)


HELD = 128  # numbers a thread that rows of x take which are multiplied at once: with more, tiles of weights spill


def _at_a_time(plan: MatrixPlan, count: int, length: int, weights: int) -> int:
    """Return how many of `count` rows of x a program multiplies at once. Over several tiles, registers hold their sums."""
    threads, tiles = 32 * plan.warps, -(-length // plan.columns)
    each = max(1, plan.columns // threads) + (weights * plan.rows * plan.columns // threads if tiles > 1 else 0)
    return max(1, min(count, HELD // each)) if tiles <= 8 else 1  # tiles are unrolled


def options(warps: int, dependent: int = 0) -> dict[str, Any]:
    """Return launch options: warps, and programmatic dependent launch (decode_product.py) if caller or step ask for it."""
    dependent = dependent or chain_mode()
    if interpreted() or not dependent:
        return {"num_warps": warps, "DEPENDENT": 0}
    return {"num_warps": warps, "DEPENDENT": dependent, "launch_pdl": True}


def alignment(width: int, *weights: torch.Tensor) -> int:
    """Return the bytes, 16 at most, that the address of each row of `width` elements is a multiple of.

    The compiler does not see it of pointers that a kernel chooses between: gate and up of a tiled GEMM took 160 loads of 2
    bytes a thread, and 260 such stores to shared memory (compiled for 9.0, 32 rows of 576 columns by 4 warps).
    """
    return math.gcd(16, width * weights[0].element_size(), *(weight.data_ptr() for weight in weights))


def at_once(dependent: int) -> int:
    """Return the mode of a kernel without weights. In a LATE chain too, its successor asks for weights while it runs: there is
    room, for it begins when all programs of the product before it have theirs."""
    return EARLY if dependent == LATE else dependent


def bump_versions(*tensors: torch.Tensor | None) -> None:
    """Count a kernel's write to each of these as torch counts its own in-place ops, so that autograd, and code that compares
    versions, notices it. A kernel writes through an address, of which torch knows nothing. It takes 0.7 µs for a call."""
    if not torch.compiler.is_compiling():  # there a launch is an op, whose writes torch knows
        torch.autograd.graph.increment_version([t for t in tensors if t is not None])


def in_place(function: Callable) -> Callable:
    """Run the function without autograd, and count a write to each tensor that it returns."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            written = function(*arguments, **options)
            bump_versions(*(written if isinstance(written, tuple) else (written,)))
        return written

    return run


def first_order_only(op: str) -> None:
    """Called by every backward: under create_graph its result would silently count as a constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{op}: its kernel has no second derivative (create_graph=True); "
            f"call gpubound.kernels.reference({op!r}) where one is needed."
        )


AT_ONCE, AFTER, BEHIND, BEFORE = tl.constexpr(EARLY), tl.constexpr(LATE), tl.constexpr(FENCE), tl.constexpr(AHEAD)


@triton.jit
def _begin(DEPENDENT: tl.constexpr):
    if DEPENDENT == AT_ONCE or DEPENDENT == BEFORE:  # noqa: SIM109 - Triton knows no `in`
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _end(DEPENDENT: tl.constexpr):
    if DEPENDENT == AFTER:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    if DEPENDENT > 0:
        tl.extra.cuda.gdc_wait()
    if DEPENDENT == BEHIND:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _tile(w_ptr, row, col, rows, columns, K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a weight of row length K: `rows` and `columns` of it are left from w_ptr on. WHOLE: no mask is needed."""
    at = w_ptr + row[:, None] * K + col[None]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(row < rows)[:, None] & (col < columns)[None], other=0.0)


@triton.jit
def _row(x_ptr, col, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_ptr + col).to(tl.float32)
    return tl.load(x_ptr + col, mask=col < K, other=0.0).to(tl.float32)


@triton.jit
def _fresh_row(x_ptr, col, K: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """Bypass the L1 before the wait: only a wait on this multiprocessor invalidates the L1."""
    if DEPENDENT != BEFORE:
        return _row(x_ptr, col, K, EVEN)
    return tl.load(x_ptr + col, mask=col < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _gained(x, norm_ptr, col, K: tl.constexpr, EVEN: tl.constexpr, GAIN: tl.constexpr):
    """x times a norm's gain, which is GAIN + its weight."""
    if GAIN is not None:
        gain = _row(norm_ptr, col, K, EVEN)
        if GAIN != 0.0:
            gain += GAIN
        x = x * gain
    return x


@triton.jit
def _products(x_ptr, norm_ptr, w_ptr, w, row, col, left, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
              WHOLE: tl.constexpr, GAIN: tl.constexpr, DEPENDENT: tl.constexpr = 0):  # fmt: skip
    """A row of x, times its norm's gain, with R rows of a weight, `left` of which are there, by column; and x's squares.

    w: the first tile of the weight, which was asked for before x was there."""
    EVEN: tl.constexpr = K % C == 0
    total, square = tl.zeros([R, C], tl.float32), tl.zeros([C], tl.float32)
    for start in range(0, K, C):
        x = _fresh_row(x_ptr + start, col, K - start, EVEN, DEPENDENT)
        total += w.to(tl.float32) * _gained(x, norm_ptr + start, col, K - start, EVEN, GAIN)[None]
        square += x * x
        if start + C < K:
            w = _tile(w_ptr + start + C, row, col, left, K - start - C, K, WHOLE)
    return total, square


@triton.jit
def _earlier(ring_ptr, conv_ptr, bias_ptr, channel, inside, position, C, PLACES: tl.constexpr, TAPS: tl.constexpr):
    """Return the last tap of some channels, and the sum of the others times earlier inputs, and of the bias.

    It may be called before the wait (_launch.py): the ring is read past an L1 that may hold what was there before.
    """
    place = position + tl.zeros_like(channel)
    own = tl.load(conv_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros_like(own)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TAPS):
        tap = tl.load(conv_ptr + channel * TAPS + TAPS - 1 - j, mask=inside, other=0.0).to(tl.float32)
        here = ring_ptr + tl.maximum(place - j, 0) % PLACES * C + channel
        total += tap * tl.load(here, mask=inside & (place >= j), other=0.0, cache_modifier=".cg").to(tl.float32)
    return own, total


@triton.jit
def _convolved(x_ptr, own, total, ring_ptr, channel, inside, position, writes, C, PLACES: tl.constexpr):
    """Return silu of the convolution, of what `_earlier` returned and the newest inputs at x_ptr, which go to the ring.

    No program reads the place that is written: a ring has a place for each tap, and the newest input is that of the product.
    """
    place = position + tl.zeros_like(channel)
    newest = tl.load(x_ptr, mask=inside, other=0.0).to(ring_ptr.dtype.element_ty)
    tl.store(ring_ptr + tl.maximum(place, 0) % PLACES * C + channel, newest, mask=inside & (place >= 0) & writes)
    total += own * newest.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _apart(both, part, AXIS: tl.constexpr):
    """Return the rows of a tile (2, N), whose row numbers are `part` (2, 1).

    Numbers that two rows of programs need in other layouts come as one such tile: of a vector with fewer numbers than threads
    the compiler repeats all loads in each layout, 280 a thread instead of 17 in a step of the delta rule (compiled for 9.0).
    """
    return tl.sum(tl.where(part == 0, both, 0.0), AXIS), tl.sum(tl.where(part == 1, both, 0.0), AXIS)


def warps_of(vector: int, matrix: int) -> int:
    """Return the warps of a program. `_apart` wants no more threads than the 2 `vector` numbers of a tile. 64 numbers of the
    matrix a thread take 128 registers, with which two programs of 8 warps share a multiprocessor (compiled for 9.0)."""
    return max(1, min(8, vector // 16), min(16, matrix // 2048))
