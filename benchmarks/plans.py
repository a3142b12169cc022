"""What `tune_norms` searches: its cases, where each keeps its plan, and which plans are worth compiling."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import torch

from gpubound.device import chip
from gpubound.kernels import plans
from gpubound.kernels.plans.types import RopePlan, RowPlan, TilePlan

from .candidates import candidates
from .door import Door, Drawer
from .doors import DOORS, GROUPS
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
    """The plan of a case: what it is today, what else may be tried, and how a plan is written down."""

    job: plans.Job
    today: plans.Plan
    candidates: list[plans.Plan]

    def turned(self, plan: plans.Plan) -> AbstractContextManager[None]:
        return plans.trying(self.job, plan)

    def line(self, plan: plans.Plan) -> str:
        return table_line(plans.keys_of(self.job)[1], plan)


def table_line(key: tuple, plan: plans.Plan) -> str:
    """As it stands in kernels/plans/defaults.py."""
    return f"{key}: {tuple(plan)},".replace("'", '"')  # type: ignore[call-overload]  # a named tuple


# A dry run shows that the script works: two plans a kind, of a few elements.
DRY: dict[Callable, tuple] = {
    RopePlan: (RopePlan(2, 1, 1), RopePlan(2, 2, 1)),
    RowPlan: (RowPlan(2, 1, 1), RowPlan(1, 1, 1, 2)),
    TilePlan: (TilePlan(256, 1), TilePlan(256, 1, "evict_first")),
}


@cache
def _knob(case: Case) -> Knob:
    shape = case.shape
    if case.op in ROWS:
        op, dimensions = case.op, (shape.hidden, 2 if case.op in ("layer_norm", "dynamic_tanh") else 1)
    elif case.op == "group_norm":
        op, dimensions = case.op, (shape.hidden // GROUPS, 1)
    elif case.op.startswith("rope"):
        op, dimensions = "rope", (shape.head_dim // 2, shape.heads)
    else:
        op, dimensions = "gated", (shape.hidden,)
    job = plans.Job(op, "" if op == "rope" else case.way, dimensions, 2, chip(case.device))
    return Knob(job, plans.plan_for(job), list(DRY[plans.RULES[op].kind]) if case.dry else candidates(job))
