"""What `tune_norms` searches: its cases, where each keeps its plan, and which plans are worth compiling."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from gpubound.device import chip
from gpubound.kernels import plans
from gpubound.kernels.plans.kinds import RopePlan, RowPlan, TilePlan

from .doors import DOORS, GROUPS, Door, Drawer
from .shapes import SHAPES, Shape

ROWS = ("rms_norm", "add_rms_norm", "layer_norm", "dynamic_tanh")
OPS = (*ROWS, "group_norm", "rope", "rope_qkv", "swiglu", "swiglu_packed", "geglu")
BATCHES = {"8b": (8, 2048), "350m": (16, 1024), "tiny": (2, 3)}  # 16k tokens, as in bench_kernels
WAYS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    op: str
    way: str
    width: str
    dry: bool

    @property
    def shape(self) -> Shape:
        return SHAPES[self.width]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())

    def door(self, batch: int | None = None) -> Door:
        dtype = torch.float32 if self.dry else torch.bfloat16
        rows, seq = BATCHES[self.width]
        return DOORS[self.op](self.shape, Drawer(self.device, dtype, batch or rows, seq))

    @property
    def knob(self) -> "Knob":
        return _knob(self)

    def __str__(self) -> str:
        return f"{self.op} {self.way} {self.width}"


@dataclass(frozen=True)
class Knob:
    """Where a case's plan is kept: what it is today, how to put another there (None: today's again), how to write it down."""

    today: Any
    put: Callable[[Any], None]
    line: Callable[[Any], str]
    candidates: list

    @contextmanager
    def turned(self, plan: Any) -> Iterator[None]:
        self.put(plan)
        try:
            yield
        finally:
            self.put(None)


@cache
def _knob(case: Case) -> Knob:
    if case.op in ROWS:
        return _row_knob(case)
    if case.op == "group_norm":
        return _knob_of(case, "group_norm", (case.shape.hidden // GROUPS, 1), _group_plans(case))
    if case.op.startswith("rope"):
        return _knob_of(case, "rope", (case.shape.head_dim // 2, case.shape.heads), _rope_plans(case))
    return _knob_of(case, "gated", (case.shape.hidden,), _gated_plans(case))


def _row_knob(case: Case) -> Knob:
    sums = 2 if case.op in ("layer_norm", "dynamic_tanh") else 1
    return _knob_of(case, case.op, (case.shape.hidden, sums), _row_plans(case))


def _knob_of(case: Case, op: str, shape: tuple[int, ...], candidates: Iterator[plans.Plan]) -> Knob:
    way = "" if op == "rope" else case.way
    job = plans.Job(op, way, shape, 2, chip(case.device))
    key = (op, way, plans.RULES[op].bucket(job))

    def put(plan: Any) -> None:
        plans.TRIED.pop(key, None) if plan is None else plans.TRIED.__setitem__(key, plan)

    return Knob(plans.plan_for(job), put, lambda plan: f"{(*key, 0)}: {tuple(plan)},".replace("'", '"'), list(candidates))


def _row_plans(case: Case) -> Iterator[RowPlan]:
    """8 to 64 elements a thread and tensor: fewer leave threads without a whole 16-byte load, more spill. Tiles in flight in up
    to 200 KB of shared memory.
    """
    block = plans.power_of_two(case.shape.hidden)
    if case.dry:
        yield from (RowPlan(2, 0 if case.way == "forward" else 1, 1), RowPlan(1, 1, 1, 2))
        return
    tensors = 3 if case.op == "add_rms_norm" else 2
    for rows, warps, (stages, hint) in product(
        (1, 2, 4, 8), (2, 4, 8, 16), ((1, ""), (2, ""), (3, ""), (4, ""), (1, "evict_first"), (3, "evict_first"))
    ):
        each_thread = rows * block / (32 * warps)
        if not block // 1024 <= warps <= block // 128 or not 8 <= each_thread <= (32 if hint or stages == 4 else 64):
            continue
        if stages > 1 and stages * tensors * rows * block * 2 > 200 << 10:
            continue
        if case.way == "backward":
            yield from (RowPlan(rows, each, warps, stages, hint) for each in (1, 2, 3, 4, 6, 8) if each * warps <= 32)
        elif stages == 1:
            yield RowPlan(rows, 0, warps, 1, hint)
        elif stages == 3 and not hint:
            yield from (RowPlan(rows, each, warps, stages, hint) for each in (2, 4, 8) if each * warps <= 64)


def _group_plans(case: Case) -> Iterator[TilePlan]:
    if case.dry:
        yield from (TilePlan(64, 1), TilePlan(256, 1))
        return
    most = case.shape.hidden // GROUPS * BATCHES[case.width][1]  # a group
    for elements, warps in product((2048, 4096, 8192, 16384, 32768), (2, 4, 8, 16)):
        if elements <= most and 16 <= elements / (32 * warps) <= 64:
            yield TilePlan(elements, warps)
            yield TilePlan(elements, warps, "evict_first")


def _rope_plans(case: Case) -> Iterator[RopePlan]:
    if case.dry:
        yield from (RopePlan(2, 1, 1), RopePlan(2, 2, 1))
        return
    block = plans.power_of_two(case.shape.head_dim // 2)
    for heads, tokens, warps in product((2, 4, 8, 16, 32), (1, 2, 4), (1, 2, 4)):
        if heads <= case.shape.heads and 8 <= heads * tokens * block / (32 * warps) <= 32:
            yield RopePlan(heads, tokens, warps)


def _gated_plans(case: Case) -> Iterator[TilePlan]:
    for elements, warps, hint in product((256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16), ("", "evict_first")):
        if (elements, warps) == (256, 1) if case.dry else 8 <= elements / (32 * warps) <= 32:
            yield TilePlan(elements, warps, hint)
