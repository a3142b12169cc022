"""Launch plans: (op, way, shape, bytes of an element, GPU) -> how the work is cut into programs.

A plan is taken from the first of these that knows the job and fits the GPU in hand:

1. TRIED: what a test or a running search wants
2. what a launch has found: the compiler asked for more than the GPU has, and the next smaller plan was taken
3. what a search found on this architecture          tuned.py
4. the op's rule, made smaller until it fits         defaults.py

So no plan raises. Where even the least is too large for a GPU, the launch says so to the op's self-test, and the call takes the
reference, counted as a fallback (dispatch.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...device import chip, constant
from ...trace import count, notice
from .defaults import RULES as RULES, WIDEST as WIDEST
from .tuned import SEARCHED, Key
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
    """The plan of `job`, of its op's kind."""
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
    """The plan for `job` from now on, because `plan` did not fit: the next smaller one. None when there is none, or when a
    search wants to know about this very plan.
    """
    smaller = plan.smaller()
    if smaller is None or _like(job) in TRIED:
        return None
    _settled[job] = smaller
    count("smaller plan")
    notice(f"{job.op}, {job.way or 'forward'}, {'x'.join(map(str, job.shape))}: {why}; a smaller plan runs: {tuple(smaller)}.")
    return smaller


def asked_by(run: Callable[[], Any]) -> list[Job]:
    """The jobs whose plans `run()` asks for."""
    global _settled
    before, _settled = _settled, {}
    try:
        run()
        return list(_settled)
    finally:
        _settled = before


@contextmanager
def trying(job: Job, plan: Plan) -> Iterator[None]:
    """`plan` for jobs like `job` inside the block; a launch that it does not fit raises there."""
    TRIED[_like(job)] = plan
    try:
        yield
    finally:
        del TRIED[_like(job)]


def candidates(job: Job) -> list[Plan]:
    """The plans that a search tries for `job`, all of which fit its GPU."""
    return [plan for plan in RULES[job.op].kind.candidates(job) if fits(job, plan)]


def keys_of(job: Job) -> list[Key]:
    """Keys of a searched plan for `job`: with its element size, or with any. A product that adds adapters takes what
    was found without them, where nothing was found with them.
    """
    op, way, bucket = _like(job)
    ways = dict.fromkeys((way, way.removeprefix(ADAPTED)))
    return [(op, way, bucket, size) for way in ways for size in (job.bytes, 0)]


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
