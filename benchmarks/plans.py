"""What `tune_norms` searches: its cases, where each keeps its plan, and which plans are worth compiling."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

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
        from gpubound.kernels.triton import group_norm as module

        return _constant_knob(module, case.way.upper(), list(_group_plans(case, module.Plan)))
    if case.op.startswith("rope"):
        return _rope_knob(case)
    from gpubound.kernels.triton import _gated

    return _constant_knob(_gated, case.way.upper(), list(_gated_plans(case)))


def _constant_knob(module: Any, name: str, candidates: list) -> Knob:
    today = getattr(module, name)
    file = module.__name__.rpartition(".")[2]
    return Knob(
        today,
        lambda plan: setattr(module, name, today if plan is None else plan),
        lambda plan: f"{file}.{name} = {plan}",
        candidates,
    )


def _row_knob(case: Case) -> Knob:
    from gpubound.kernels.triton._launch import OVERRIDE, multiprocessors, schedule

    cols, crowd = case.shape.hidden, multiprocessors(case.device)
    sums = 2 if case.op in ("layer_norm", "dynamic_tanh") else 1
    key = (case.op, case.way, cols)

    def put(plan: Any) -> None:
        OVERRIDE.pop(key, None) if plan is None else OVERRIDE.__setitem__(key, plan)

    def line(plan: Any) -> str:
        kept = (plan.rows, plan.programs // crowd, plan.warps, plan.stages, plan.hint)
        return f"_launch.SEARCHED[{(case.op, case.way, plan.block)}] = {kept}".replace("'", '"')

    return Knob(schedule(case.op, case.way, cols, case.device, sums), put, line, list(_row_plans(case, cols, crowd)))


def _row_plans(case: Case, cols: int, crowd: int) -> Iterator[Any]:
    """8 to 64 elements a thread and tensor: fewer leave threads without a whole 16-byte load, more spill. Tiles in flight in up
    to 200 KB of shared memory.
    """
    from gpubound.kernels.triton._launch import Plan, power_of_two

    block = power_of_two(cols)
    if case.dry:
        yield from (Plan(block, 2, 0 if case.way == "forward" else 2, 1), Plan(block, 1, 2, 1, 2))
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
            yield from (
                Plan(block, rows, each * crowd, warps, stages, hint) for each in (1, 2, 3, 4, 6, 8) if each * warps <= 32
            )
        elif stages == 1:
            yield Plan(block, rows, 0, warps, 1, hint)
        elif stages == 3 and not hint:
            yield from (Plan(block, rows, each * crowd, warps, stages, hint) for each in (2, 4, 8) if each * warps <= 64)


def _group_plans(case: Case, plan: Callable[..., Any]) -> Iterator[Any]:
    if case.dry:
        yield from (plan(64, 1), plan(256, 1))
        return
    most = case.shape.hidden // GROUPS * BATCHES[case.width][1]  # a group
    for elements, warps in product((2048, 4096, 8192, 16384, 32768), (2, 4, 8, 16)):
        if elements <= most and 16 <= elements / (32 * warps) <= 64:
            yield plan(elements, warps)
            yield plan(elements, warps, hint="evict_first")


def _rope_knob(case: Case) -> Knob:
    from gpubound.kernels.triton.rope import SEARCHED, Plan, _plan

    pairs = case.shape.head_dim // 2
    before = dict(SEARCHED)

    def put(chosen: Any) -> None:
        SEARCHED.clear()
        SEARCHED.update(before if chosen is None else before | {pairs: chosen})

    block = 1 << (pairs - 1).bit_length()
    tiles = product((2, 4, 8, 16, 32), (1, 2, 4), (1, 2, 4))
    candidates = [
        Plan(heads, tokens, warps)
        for heads, tokens, warps in tiles
        if heads <= case.shape.heads and 8 <= heads * tokens * block / (32 * warps) <= 32
    ]
    if case.dry:
        candidates = [Plan(2, 1, 1), Plan(2, 2, 1)]
    return Knob(_plan(pairs, case.shape.heads), put, lambda chosen: f"rope.SEARCHED[{pairs}] = {chosen}", candidates)


def _gated_plans(case: Case) -> Iterator[tuple[int, int, str]]:
    for elements, warps, hint in product((256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16), ("", "evict_first")):
        if (elements, warps) == (256, 1) if case.dry else 8 <= elements / (32 * warps) <= 32:
            yield elements, warps, hint
