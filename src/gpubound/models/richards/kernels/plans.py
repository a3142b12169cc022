"""Launch plans of the ops of Richards models (kernels/plans)."""

from typing import NamedTuple

from ....kernels.plans import RULES, Job
from ....kernels.plans.defaults import SEARCHED, Rule, decode_attention, first, norm_rows, width
from ....kernels.plans.types import AttentionPlan, MatrixPlan, RowPlan, power_of_two


class StridePlan(NamedTuple):
    """Plan of an elementwise kernel whose programs stride over tiles. A few hundred of them compute something once, such as a
    curve's constants, or each sums something."""

    elements: int  # of a tile
    each: int  # programs a multiprocessor
    warps: int
    stages: int = 1  # tiles in flight, this one counted
    hint: str = ""

    def grid(self, tiles: int, job: Job) -> tuple[int]:
        return (max(1, min(self.each * job.chip.sms, tiles)),)

    def shared(self, job: Job) -> int:
        return (self.stages - 1) * job.shape[0] * self.elements * job.bytes

    def smaller(self) -> "StridePlan | None":
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        return self._replace(elements=self.elements // 2) if self.elements > 32 * self.warps else None


class WalkPlan(NamedTuple):
    """Plan of attention over sequences: a program owns tokens of a head, and reads the others tile by tile."""

    own: int
    other: int  # tokens of a tile that is walked along
    stages: int  # tiles in flight
    warps: int

    def shared(self, job: Job) -> int:
        """Bytes of the two tensors that are read tile by tile, in flight, and of the owned ones that tensor cores read."""
        owned = 1 if job.way == "forward" else 2
        return power_of_two(max(16, job.shape[0])) * job.bytes * (2 * self.stages * self.other + owned * self.own)

    def smaller(self) -> "WalkPlan | None":
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        if self.other > 16:
            return self._replace(other=self.other // 2)
        return self._replace(own=self.own // 2) if self.own > 16 else None


def richards(job: Job) -> StridePlan:
    """shape: tensors that it reads. 8 elements a thread are 16 bytes of each tensor in 16 bits.

    Under a GPU's power limit the clock falls, and instructions are the time: forward has none for tiles in flight, since 64
    programs wait their turn on each multiprocessor, and backward, whose sums want few programs, 16 elements a thread. 16384 x
    4096 of the gated unit in bf16, H200: 104 us forward, 175 backward, 203 with h again (96, 156 and 193 at the copy rate).
    """
    if job.way == "forward":
        return StridePlan(1024, 64, 4)
    return StridePlan(2048, 3, 4, 3)


CHUNKS = 64  # of a sequence at most: a program folds the ends of all chunks before its own


def rg_lru(job: Job) -> MatrixPlan:
    """shape: tokens, up to a power of two, and channels. rows: tokens of a chunk, which a program takes one after the other.

    A warp of four neighbouring channels a thread: 16 sequences of 1,024 tokens, 1,024 wide, are 2,048 such programs.
    """
    return MatrixPlan(max(64, job.shape[0] // CHUNKS), 128, 1)


def poly_attention(job: Job) -> WalkPlan:
    """shape: a head's width. Compiled for sm_90 in bf16 these spill nothing. A walk of keys holds two tiles of results and two
    of scores: 128 wide, with 64 queries a tile instead of 32, it spills 40 bytes a thread.
    """
    if job.bytes > 2:
        return WalkPlan(32, 32, 1, 4)
    if job.way == "forward":
        return WalkPlan(128, 64, 3, 8)
    return WalkPlan(128, 32 if job.way == "keys" and job.shape[0] > 64 else 64, 2, 8)


RULES |= {
    **dict.fromkeys(("dynamic_tanh", "add_dynamic_tanh"), Rule(RowPlan, norm_rows, width)),
    "poly_attention": Rule(WalkPlan, poly_attention, first(1)),
    "poly_attention_step": Rule(AttentionPlan, decode_attention, first(3)),
    "richards": Rule(StridePlan, richards, first(1)),
    "rg_lru": Rule(MatrixPlan, rg_lru, first(1)),
}

# H200: rows, programs a multiprocessor, warps, stages, hint.
SEARCHED[90] |= {
    ("dynamic_tanh", "forward", (1024,), 0): (1, 0, 4, 1, "evict_first"),
    ("dynamic_tanh", "forward", (4096,), 0): (2, 0, 16, 1, ""),
    ("dynamic_tanh", "backward", (1024,), 0): (4, 2, 4, 3, "evict_first"),
    ("dynamic_tanh", "backward", (4096,), 0): (2, 1, 16, 3, "evict_first"),
}
