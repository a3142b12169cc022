"""Launch plans: (op, way, shape, bytes of an element, GPU) -> how the work is divided into programs.

The plan of a job is the first of these that exists and fits the GPU:

1. TRIED: the plan that a test or a running search sets
2. the smaller plan of an earlier launch, for which the compiler asked for more shared memory than the GPU has
3. the result of a search on this architecture       defaults.py
4. the op's rule, made smaller until it fits         defaults.py

If even the smallest plan is too large for a GPU, the launch raises in the op's self-test, and the call takes the reference,
counted as a fallback (dispatch.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...device import chip, constant
from ...trace import count, notice
from .defaults import RULES as RULES, SEARCHED, Key
from .types import (
    ADAPTED as ADAPTED,
    SPARE as SPARE,
    Job as Job,
    Plan as Plan,
    cdiv as cdiv,
    job_of as job_of,
    power_of_two as power_of_two,
)  # fmt: skip

# (op, way, bucket) -> a plan of the op's kind
TRIED: dict[tuple[str, str, tuple[int, ...]], Any] = {}

_settled: dict[Job, Any] = {}


def plan_for(job: Job) -> Any:
    """Return the plan of `job`, of its op's kind."""
    if TRIED and (tried := TRIED.get(_like(job))) is not None:
        return tried
    if (plan := _settled.get(job)) is None:
        plan = _settled[job] = _first_that_fits(job)
    return plan


@constant
def plan_traced(op: str, way: str, shape: tuple[int, ...], size: int) -> Any:
    """`plan_for` while dynamo traces, which cannot follow dictionaries that change. The chip is the current GPU's: torch 2.11
    reads no field of a named tuple that another constant function has returned."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return plan_for(Job(op, way, shape, size, chip(torch.device("cpu" if index is None else f"cuda:{index}"))))


def step_down(job: Job, plan: Any, why: str) -> Any:
    """Set and return the next smaller plan for `job`, because `plan` did not fit. None if there is none, or during a search."""
    smaller = plan.smaller()
    if smaller is None or _like(job) in TRIED:
        return None
    _settled[job] = smaller
    count("smaller plan")
    notice(f"{job.op}, {job.way or 'forward'}, {'x'.join(map(str, job.shape))}: {why}; a smaller plan runs: {tuple(smaller)}.")
    return smaller


def asked_by(run: Callable[[], Any]) -> list[Job]:
    """Return the jobs whose plans `run()` asks for."""
    global _settled
    before, _settled = _settled, {}
    try:
        run()
        return list(_settled)
    finally:
        _settled = before


@contextmanager
def trying(job: Job, plan: Plan) -> Iterator[None]:
    """Use `plan` for jobs like `job` in the block; a launch that does not fit raises."""
    TRIED[_like(job)] = plan
    try:
        yield
    finally:
        del TRIED[_like(job)]


def keys_of(job: Job) -> list[Key]:
    """Return the keys of a searched plan for `job`: with its element size, or with any.

    A product with adapters takes the plan without them if none was found with them.
    """
    op, way, bucket = _like(job)
    names = dict.fromkeys((way, way.removeprefix(ADAPTED)))
    return [(op, way, bucket, size) for way in names for size in (job.bytes, 0)]


def _like(job: Job) -> tuple[str, str, tuple[int, ...]]:
    """Return the bucket of `job`: all jobs with the same one share a plan."""
    return job.op, job.way, RULES[job.op].bucket(job)


def fits(job: Job, plan: Plan) -> bool:
    asked = plan.shared(job)
    return not asked or asked + SPARE <= job.chip.shared_bytes


def _first_that_fits(job: Job) -> Plan:
    table = SEARCHED.get(job.chip.capability, {})
    for key in keys_of(job):
        if key in table and fits(job, plan := RULES[job.op].kind(*table[key])):
            return plan
    plan = RULES[job.op].plan(job)
    while not fits(job, plan) and (smaller := plan.smaller()) is not None:
        plan = smaller
    return plan
