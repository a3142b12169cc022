"""Launch plans of the ops of DeepSeek-V4 (kernels/plans)."""

from ....kernels.plans import RULES, Job
from ....kernels.plans.defaults import SEARCHED, Rule, first, width
from ....kernels.plans.types import MatrixPlan, TilePlan


def hyper_connections(job: Job) -> MatrixPlan:
    """shape: tokens, up to a power of two, and the numbers of one. rows: tokens of a program, which walks along columns."""
    if job.way == "few":
        return MatrixPlan(1, 128, 4)
    return MatrixPlan(64, 64, 4) if job.shape[0] > 2048 else MatrixPlan(16, 64, 4)


RULES |= {
    "compress": Rule(TilePlan, lambda job: TilePlan(4096, 4), first(1)),
    "hc_mix": Rule(TilePlan, lambda job: TilePlan(2048 if job.way == "read" else 1024, 4), first(0)),
    "hc_pre": Rule(MatrixPlan, hyper_connections, first(2)),
    "index_scores": Rule(TilePlan, lambda job: TilePlan(64, 4), first(2)),
    "index_topk": Rule(TilePlan, lambda job: TilePlan(8192, 16), width),  # 16 numbers a thread: 32 spill
    "sinkhorn": Rule(TilePlan, lambda job: TilePlan(512, 4), first(0)),  # a row of four a thread
    "sparse_attention": Rule(MatrixPlan, lambda job: MatrixPlan(16, 32 if job.bytes == 2 else 16, 8), first(2)),  # heads, keys
    "turn_heads": Rule(TilePlan, lambda job: TilePlan(job.shape[0], 4), first(1)),
}
SEARCHED[90] |= {("sparse_attention", "", (16, 512), 2): (16, 16, 8)}
