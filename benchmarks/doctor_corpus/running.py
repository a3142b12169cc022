"""Running a script of the corpus in this process, as the doctor does, and how long its steps take there."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpubound.doctor.record.phases import Phase, Phases
from gpubound.doctor.record.script import Script, Steps
from gpubound.errors import MeasureError

WARMUP = 2
FIRST = 20  # steps: they allocate, choose algorithms and compile
LEAST_S, MANY = 0.3, 40
MOST_S, FEW = 0.8, 10


@contextmanager
def forgetting(folder: Path) -> Iterator[None]:
    """What a script imports from its folder is another thing for the next script."""
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(folder) + os.sep):
                del sys.modules[name]


def run(script: Path, arguments: Sequence[str]) -> None:
    with forgetting(script.parent):
        Script(str(script), tuple(arguments)).run()


def watched(script: Path, arguments: Sequence[str], sensor: AbstractContextManager) -> None:
    """Run a script with `sensor` open from its second optimizer step to its end. The first makes the optimizer's state."""
    steps = 0
    with ExitStack() as open_until_the_end:

        def stepped(*_) -> None:
            nonlocal steps
            steps += 1
            if steps == WARMUP:
                open_until_the_end.enter_context(sensor)

        hook = register_optimizer_step_post_hook(stepped)
        open_until_the_end.callback(hook.remove)
        run(script, arguments)
    if steps <= WARMUP:
        raise MeasureError(f"{script}: {steps} optimizer steps were seen, wanted more than the {WARMUP} of the warm-up.")


class Alone(Phase):
    """Steps in which nothing looks, between two waits for the device: their mean is what a step takes.

    As many as fill the time of LEAST_S, of which 1 % is more than a clock or a queue is off; few where each of them is long.
    """

    name = "alone"

    def __init__(self) -> None:
        super().__init__(steps=1_000_000)

    def begin(self) -> None:
        _wait()
        super().begin()

    def step(self) -> None:
        super().step()
        took = time.perf_counter() - self._began
        if (took > LEAST_S and self.done >= MANY) or (took > MOST_S and self.done >= FEW):
            self.steps = self.done

    def end(self) -> None:
        _wait()
        super().end()

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds / self.done


def timed(script: Path, arguments: Sequence[str]) -> float:
    """Milliseconds a step of a script that nothing looks at, behind its first steps."""
    steps = Alone()
    with Phases([Phase(FIRST), steps]) as phases, Steps(phases.ended):
        run(script, arguments)
    if not phases.finished:
        raise MeasureError(f"{script.name}: {phases.total} steps were seen, wanted more: {FIRST} of them are not timed.")
    return steps.ms


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
