"""Plans that a search tries for a job: those that a GPU may run well (tune_norms, tune_steps)."""

from collections.abc import Iterator
from itertools import product

from gpubound.kernels.plans import RULES, Job, Plan, fits, power_of_two
from gpubound.kernels.plans.types import (
    AttentionPlan,
    MatrixPlan,
    ProductPlan,
    ResidentPlan,
    RopePlan,
    RowPlan,
    SplitPlan,
    TilePlan,
)
from gpubound.models.richards.kernels.plans import StridePlan, WalkPlan


def candidates(job: Job) -> list[Plan]:
    """Return the plans that a search tries for `job`, all of which fit its GPU."""
    return [plan for plan in OF_KIND[RULES[job.op].kind](job) if fits(job, plan)]


def _row(job: Job) -> Iterator[Plan]:
    """8 to 64 elements a thread and tensor: fewer leave threads without a whole 16-byte load, more spill."""
    block = power_of_two(job.shape[0])
    flights = ((1, ""), (2, ""), (3, ""), (4, ""), (1, "evict_first"), (3, "evict_first"))
    for rows, warps, (stages, hint) in product((1, 2, 4, 8), (1, 2, 4, 8, 16), flights):
        held = rows * block / (32 * warps)
        if not block // 1024 <= warps <= max(1, block // 128) or not 8 <= held <= (32 if hint or stages == 4 else 64):
            continue
        if job.way == "backward":
            yield from (RowPlan(rows, each, warps, stages, hint) for each in (1, 2, 3, 4, 6, 8) if each * warps <= 32)
        elif stages == 1:
            yield RowPlan(rows, 0, warps, 1, hint)
        elif stages == 3 and not hint:
            yield from (RowPlan(rows, each, warps, stages, hint) for each in (2, 4, 8) if each * warps <= 64)


def _tile(job: Job) -> Iterator[Plan]:
    """8 to 64 elements a thread; a loss's row of logits, a few of which are kept at a time, up to 128."""
    most = 2 * power_of_two(job.shape[0]) if job.op == "losses" else 32768 if job.op == "group_norm" else 16384
    hints = ("",) if job.op in ("losses", "swiglu_backward") else ("", "evict_first")
    tiles = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    for elements, warps, hint in product(tiles, (1, 2, 4, 8, 16), hints):
        if elements <= most and 8 <= elements / (32 * warps) <= (128 if job.op == "losses" else 64):
            yield TilePlan(elements, warps, hint)


def _stride(job: Job) -> Iterator[Plan]:
    """8 or 16 elements a thread, up to 48 warps a multiprocessor, and of one tile in flight more that wait their turn."""
    for warps, each, held, stages in product((2, 4, 8), (2, 3, 4, 6, 8, 12, 16, 32, 64), (8, 16), (1, 2, 3)):
        if 12 <= each * warps <= (256 if stages == 1 else 48):
            yield from (StridePlan(32 * warps * held, each, warps, stages, hint) for hint in ("", "evict_first"))


def _matrix(job: Job) -> Iterator[Plan]:
    """Rows of a weight, and how far along them. No program may span two of its parts, or change the head's stretches."""
    if job.op == "quantize":
        yield from (MatrixPlan(*plan) for plan in product((64, 128), (64, 128), (4, 8)))
        return
    _, columns, *parts = job.shape
    packed = job.op == "packed_product"
    longest = power_of_two(parts[0] if packed else columns)
    apart = parts if len(parts) > 1 and not packed else []
    heights = (16,) if job.way.endswith("head") else (1, 2, 4, 8, 16)
    for height, wide, warps in product(heights, (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        if wide > longest or any(part % height for part in apart):
            continue
        if (4 if packed else 8) <= height * wide / (32 * warps) <= 128:
            yield MatrixPlan(height, wide, warps)


def _rope(job: Job) -> Iterator[Plan]:
    pairs, most = job.shape
    for heads, tokens, warps in product((2, 4, 8, 16, 32), (1, 2, 4), (1, 2, 4)):
        if heads <= power_of_two(most) and 8 <= heads * tokens * power_of_two(pairs) / (32 * warps) <= 32:
            yield RopePlan(heads, tokens, warps)


def _attention(job: Job) -> Iterator[Plan]:
    return (AttentionPlan(*plan) for plan in product((32, 64, 128), (2, 3, 4), (2, 4, 8)))


def _walk(job: Job) -> Iterator[Plan]:
    for own, other, stages, warps in product((64, 128), (32, 64, 128), (2, 3, 4), (4, 8)):
        if own * other <= 8192 * warps // 4:  # a tile of scores is at most 64 registers a thread
            yield WalkPlan(own, other, stages, warps)


def _product(job: Job) -> Iterator[Plan]:
    rank = job.shape[2]
    if job.way in ("described", "pointers"):
        for plan in product((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4), (1, 2)):
            yield ProductPlan(*plan)
    elif job.way == "up":
        for rows, columns, warps in product((32, 64, 128), (64, 128, 256), (4, 8)):
            yield ProductPlan(rows, columns, rank, warps, 1)
    else:  # the rank is the width of the result
        shared = (1, 2, 4, 8) if job.way == "gradients" else (1,)
        for rows, depth, warps, stages, splits in product((16, 32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4), shared):
            yield ProductPlan(rows, rank, depth, warps, stages, 1, splits)


def _held(job: Job) -> Iterator[Plan]:
    """Up to 128 registers of a thread for weights and 64 for x."""
    _, width, tall = job.shape
    for rows, warps, size in product((16, 32), (2, 4, 8), (1 << 13, 1 << 14)):
        slices = -(-width // (32 * warps))
        held, ahead = (max(1, most // (lines * 32 * job.bytes)) for most, lines in ((size, rows), (size // 2, tall)))
        yield ResidentPlan(rows, warps, min(slices, held), min(slices, ahead))


def _split(job: Job) -> Iterator[Plan]:
    """Weights that are all asked for at once, or a loop; from half to twice as many programs as multiprocessors."""
    outputs, width, _ = job.shape
    for rows, columns, warps, parts in product((16, 64, 128), (64, 128, 256), (4, 8), (1, 2, 4, 8)):
        slices, programs = width // columns // parts, outputs // rows * parts
        if slices < 1 or width % parts or (parts > 1 and (job.way == "gated" or not 0.5 <= programs / job.chip.sms <= 2)):
            continue
        yield from (SplitPlan(rows, columns, warps, parts, stages) for stages in (*([0] if slices <= 8 else []), 3, 4, 6))


OF_KIND = {
    RowPlan: _row,
    TilePlan: _tile,
    StridePlan: _stride,
    MatrixPlan: _matrix,
    RopePlan: _rope,
    AttentionPlan: _attention,
    WalkPlan: _walk,
    ProductPlan: _product,
    ResidentPlan: _held,
    SplitPlan: _split,
}
