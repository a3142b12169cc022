"""A contender of whole training steps in a process of its own: it builds its step, runs it once, says how that went, and obeys.

Lines on stdin are wishes: {"steps": 5} times five steps, {"losses": 20} gives the losses of twenty, {"profile": 1} lists the
kernels of one, {"busy": 50} tells how busy fifty keep the GPU. Every answer is one line on stdout that begins with MARK.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubound.device import uncounted_bytes
from gpubound.measure.memory_phases import MemoryPhases

from .harness import host_syncs

MARK = "@@ "

Step = Callable[[], Tensor]
"""one optimizer step; gives the (last) loss, on the device"""


@dataclass(frozen=True)
class Job:
    """Who runs what. The data and the initial weights depend on nothing else, so that first losses can be compared."""

    who: str
    shape: str
    seq: int
    micro: int
    accumulate: int
    device: str
    recompute: str = "cheap"
    lr: float = 1e-4


@dataclass
class Contender:
    """A model on its device, and how to make its step ready: what `start` does is on the clock of the first step."""

    start: Callable[[], Step]
    parameters: int
    graph_captured: Callable[[], bool] = lambda: False
    memory: MemoryPhases | None = None
    """Peaks of the phases of `start`, where it measures them."""


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def introduce(job: Job, contender: Contender) -> tuple[Step, dict[str, Any]]:
    """The step, ready, and what is known of it: seconds to the first one done, its loss, peak memory, host syncs."""
    torch.ones(256, 256, device=job.device) @ torch.ones(256, 256, device=job.device)  # the context is nobody's first step
    settle(job.device)
    if job.device != "cpu":  # what drawing fp32 weights has left is not reserved by a phase
        torch.cuda.empty_cache()
    memory = contender.memory or MemoryPhases(torch.device(job.device))
    began = time.perf_counter()
    step = contender.start()
    with memory("first step"):
        loss = step()
        settle(job.device)
    facts: dict[str, Any] = {"first_step_s": time.perf_counter() - began, "loss": loss.item()}
    facts |= {"parameters": contender.parameters, "captured": contender.graph_captured()}
    with memory("steps"):
        step()
        settle(job.device)
    facts["phases"] = {phase: peak._asdict() for phase, peak in memory.peaks.items()}
    if job.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        facts["syncs"] = host_syncs(step)
        settle(job.device)
        # What the process has held of the GPU. A graph's own memory is reserved, not allocated: so all are counted by it. The
        # most of a step, not what is left: an allocator that finds the GPU full gives back what it keeps, and goes on.
        facts["peak_gib"] = (torch.cuda.max_memory_reserved() + uncounted_bytes(torch.device(job.device))) / 2**30
    return step, facts


def seconds_a_step(step: Step, steps: int, device: str) -> float:
    settle(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    settle(device)
    return (time.perf_counter() - began) / steps


def busy_percent(step: Step, steps: int) -> float:
    """How much of the time the device was inside a step, by events around each. For captured steps: in others it may idle."""
    step()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for begin, end in marks:
        begin.record()
        step()
        end.record()
    settle("cuda")
    return 100 * sum(begin.elapsed_time(end) for begin, end in marks) / marks[0][0].elapsed_time(marks[-1][1])


def kernels_of(step: Step, device: str) -> list[tuple[str, float, int]]:
    """(name, milliseconds, launches) of one step, longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU if device == "cpu" else activity.CUDA]) as profile:
        step()
        settle(device)
    rows = [
        (e.key, (e.self_cpu_time_total if device == "cpu" else e.self_device_time_total) / 1e3, e.count)
        for e in profile.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])


def answer(what: Any) -> None:
    print(MARK + json.dumps(what), flush=True)


def obey(wish: dict[str, Any], step: Step, device: str) -> Any:
    if "profile" in wish:
        return kernels_of(step, device)
    if "busy" in wish:
        return busy_percent(step, wish["busy"])
    if "losses" in wish:
        return [step().item() for _ in range(wish["losses"])]
    return seconds_a_step(step, wish["steps"], device)


def job_given() -> Job:
    """The only argument of a contender's process."""
    return Job(**json.loads(sys.argv[1]))


def serve(contenders: Mapping[str, Callable[[Job], Contender]]) -> None:
    """The whole life of a contender's process."""
    job = job_given()
    step, facts = introduce(job, contenders[job.who](job))
    answer(facts)
    for line in sys.stdin:
        answer(obey(json.loads(line), step, job.device))
