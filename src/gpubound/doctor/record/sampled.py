"""Sampled stacks of the launching thread: where it is while the GPU has nothing to do, without a profiler.

The tape shows launches and waits, but not what the host does between them. So in some steps another thread takes the stack of
the launching thread twice a millisecond, and asks the driver whether all work that was launched is done. If it is, the host is
late, and the line it is in is the reason. In backward autograd's own thread launches, while this thread is in the line that
called it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...trace import hooked
from ...watch.source_line import Stack, stack_of
from .phases import Period, Phase

EVERY_S = 0.0005  # from one sample to the next
SWITCH_S = 0.0001  # after which Python's code lets the sampling thread run; by default 5 ms, as long as some steps
ENOUGH_S, MOST = 0.7, 100  # seconds and steps, whichever is reached first


@dataclass(frozen=True)
class Samples:
    """Numbers of samples by stack: all, and those in which the device was idle."""

    stacks: Mapping[Stack, int] = field(default_factory=dict)
    late: Mapping[Stack, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.stacks.values())


def device_idle() -> Callable[[], bool]:
    """Return a function that returns whether this thread's device has done all work of this thread's streams."""
    streams = {torch.cuda.default_stream(), torch.cuda.current_stream()}
    return lambda: all(stream.query() for stream in streams)


class SampledPhase(Phase):
    """Steps in which the stack of the thread that runs them is sampled, in whole periods, for ENOUGH_S or MOST steps."""

    name = "sampled"

    def __init__(self, steps: int, period: Period, idle: Callable[[], Callable[[], bool]] = device_idle):
        super().__init__(steps, period)
        self._idle_of = idle
        self._stacks: Counter[Stack] = Counter()
        self._late: Counter[Stack] = Counter()

    def begin(self) -> None:
        super().begin()
        self._home, self._idle = threading.get_ident(), self._idle_of()
        self._over, self._lock = threading.Event(), threading.Lock()
        self.ending.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
        self.ending.enter_context(hooked(torch.cuda.CUDAGraph, "capture_begin", self._captured))
        self._thread = threading.Thread(target=self._sample, name="gpubound-samples", daemon=True)
        self._thread.start()
        self.ending.callback(self._thread.join)
        self.ending.callback(self._over.set)  # before it is waited for

    def _captured(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Stop before a capture, which a query of a stream would end."""
        with self._lock:
            self._over.set()
        self.absent["lines of the host"] = "the script captured a graph while they were sampled"
        return original(*args, **kwargs)

    def _sample(self) -> None:
        while not self._over.wait(EVERY_S):
            with self._lock:
                if self._over.is_set():
                    return
                frame = sys._current_frames().get(self._home)
                late = self._idle()
            if frame is not None:
                stack = stack_of(frame)
                self._stacks[stack] += 1
                self._late[stack] += late

    def step(self) -> None:
        super().step()
        if self.done == self.steps and self.done < MOST and time.perf_counter() - self.began < ENOUGH_S:
            self.steps += self.period.steps

    @property
    def samples(self) -> Samples:
        return Samples(self._stacks, +self._late)
