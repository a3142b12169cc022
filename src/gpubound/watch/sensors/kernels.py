"""Launches: Kineto's count of driver calls, and Triton's launch hook."""

import os
import sys
from collections import Counter
from collections.abc import Iterable

import torch

from .base import Sensor

LAUNCH_CALLS = (
    "cudaLaunch",
    "cuLaunch",
    "cudaGraphLaunch",
    "cuGraphLaunch",
    "hipLaunch",
    "hipExtLaunch",
    "hipExtModuleLaunch",
    "hipModuleLaunch",
    "hipGraphLaunch",
)


def launch_calls(events: Iterable) -> Counter[str]:
    """How often each launching driver call was made. A graph is one launch, however many kernels it holds."""
    return Counter(event.name() for event in events if event.name().startswith(LAUNCH_CALLS))


class Kernels(Sensor):
    name = "kernels"
    counts = frozenset({"launches"})
    sees = "every launch call to the CUDA driver, in any thread, without its line"
    blind = ""

    def absent(self) -> str | None:
        if self.ledger.launches != "kernels":
            return 'not asked for: watch(launches="kernels")'
        if not torch.cuda.is_available():
            return "no CUDA GPU"
        if torch.autograd._profiler_enabled():
            return "another profiler is running"
        return None

    def start(self) -> None:
        # There is one cycle, so nothing accumulates; without acc_events torch 2.11 warns that it drops those before.
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        self._profile.__enter__()

    def stop(self) -> None:
        self._profile.__exit__(None, None, None)
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        for name, times in launch_calls(results.events()).items():  # type: ignore[union-attr]
            self.ledger.record("launch", name, count=times, lost=True)


class Triton(Sensor):
    name = "triton"
    counts = frozenset()  # adds to the launches that dispatch counts
    sees = "each Triton launch"
    blind = "Triton kernels, if Triton was first imported while the ledger was open"

    def absent(self) -> str | None:
        if self.ledger.launches == "kernels":
            return "the kernels sensor counts these too"
        return None if "triton" in sys.modules else "Triton is not imported"

    def start(self) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            self._undo = _wrap_interpreter(self._launched)
            return
        from triton import knobs

        hook = self._hook
        knobs.runtime.launch_enter_hook.add(hook)
        self._undo = lambda: knobs.runtime.launch_enter_hook.remove(hook)

    def stop(self) -> None:
        self._undo()

    def _hook(self, metadata) -> None:
        self._launched(getattr(metadata, "data", {}).get("name", "triton kernel"))

    def _launched(self, name: str) -> None:
        self.ledger.triton_launched()
        self.ledger.record("launch", name)


def _wrap_interpreter(launched):
    """The interpreter runs kernels as Python and knows no launch hook."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if not warmup:
            launched(self.fn.__name__)
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run

    def undo():
        InterpretedFunction.run = original

    return undo
