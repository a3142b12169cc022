"""The plans that a search tries for a job: those that a GPU may run well, and that fit this one."""

from collections.abc import Callable, Iterator
from itertools import product

from . import RULES, Job, Plan, fits, power_of_two
from .kinds import AttentionPlan, MatrixPlan, RopePlan, RowPlan, TilePlan


def candidates(job: Job) -> list[Plan]:
    kind = RULES[job.op].kind
    return [plan for plan in CANDIDATES[kind](job) if fits(job, plan)]


def _rows(job: Job) -> Iterator[RowPlan]:
    """8 to 64 elements a thread and tensor: fewer leave threads without a whole 16-byte load, more spill."""
    block = power_of_two(job.shape[0])
    flights = ((1, ""), (2, ""), (3, ""), (4, ""), (1, "evict_first"), (3, "evict_first"))
    for rows, warps, (stages, hint) in product((1, 2, 4, 8), (1, 2, 4, 8, 16), flights):
        each_thread = rows * block / (32 * warps)
        if not block // 1024 <= warps <= max(1, block // 128) or not 8 <= each_thread <= (32 if hint or stages == 4 else 64):
            continue
        if job.way == "backward":
            yield from (RowPlan(rows, each, warps, stages, hint) for each in (1, 2, 3, 4, 6, 8) if each * warps <= 32)
        elif stages == 1:
            yield RowPlan(rows, 0, warps, 1, hint)
        elif stages == 3 and not hint:
            yield from (RowPlan(rows, each, warps, stages, hint) for each in (2, 4, 8) if each * warps <= 64)


def _tiles(job: Job) -> Iterator[TilePlan]:
    """8 to 64 elements a thread; a loss's row of logits, a few of which are kept at a time, up to 128."""
    most = 2 * power_of_two(job.shape[0]) if job.op == "losses" else 32768 if job.op == "group_norm" else 16384
    hints = ("",) if job.op in ("losses", "swiglu_backward") else ("", "evict_first")
    tiles = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    for elements, warps, hint in product(tiles, (1, 2, 4, 8, 16), hints):
        if elements <= most and 8 <= elements / (32 * warps) <= (128 if job.op == "losses" else 64):
            yield TilePlan(elements, warps, hint)


def _matrices(job: Job) -> Iterator[MatrixPlan]:
    """Rows of a weight, and how far along them; no program may span two parts of a weight, or change the head's stretches."""
    if job.op == "quantize":
        yield from (MatrixPlan(rows, cols, warps) for rows, cols, warps in product((64, 128), (64, 128), (4, 8)))
        return
    _, columns, *parts = job.shape
    packed = job.op == "packed_product"
    longest = power_of_two(parts[0] if packed else columns)
    heights = (16,) if job.way.endswith("head") else (1, 2, 4, 8, 16)
    for height, wide, warps in product(heights, (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        apart = [] if packed else parts
        if wide > longest or any(part % height for part in apart if len(apart) > 1):
            continue
        if (4 if packed else 8) <= height * wide / (32 * warps) <= 128:
            yield MatrixPlan(height, wide, warps)


def _ropes(job: Job) -> Iterator[RopePlan]:
    pairs, most = job.shape
    for heads, tokens, warps in product((2, 4, 8, 16, 32), (1, 2, 4), (1, 2, 4)):
        if heads <= power_of_two(most) and 8 <= heads * tokens * power_of_two(pairs) / (32 * warps) <= 32:
            yield RopePlan(heads, tokens, warps)


def _attentions(job: Job) -> Iterator[AttentionPlan]:
    yield from (AttentionPlan(*plan) for plan in product((32, 64, 128), (2, 3, 4), (2, 4, 8)))


CANDIDATES: dict[Callable, Callable[[Job], Iterator[Plan]]] = {
    AttentionPlan: _attentions,
    MatrixPlan: _matrices,
    RopePlan: _ropes,
    RowPlan: _rows,
    TilePlan: _tiles,
}
