"""Running a script of the corpus in this process, as `python train.py` would, and how long its steps take there."""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpubound.errors import MeasureError

WARMUP = 2


@contextmanager
def as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """The argv, the path and the modules that `python script` starts with; what it imported from its folder is forgotten."""
    argv, path, folder = sys.argv, sys.path[:], str(script.parent)
    sys.argv, sys.path[0:0] = [str(script), *arguments], [folder]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(folder + os.sep):
                del sys.modules[name]


def run(script: Path, arguments: Sequence[str]) -> None:
    with as_main(script, arguments):
        runpy.run_path(str(script), run_name="__main__")


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


def step_ms(script: Path, arguments: Sequence[str], steps: int, warmup: int) -> float:
    """Milliseconds a step between the optimizer steps `warmup` and `steps`, with nothing in between: the host waits at both."""
    seen, ends = 0, []

    def stepped(*_) -> None:
        nonlocal seen
        seen += 1
        if seen in (warmup, steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(perf_counter())

    hook = register_optimizer_step_post_hook(stepped)
    try:
        run(script, [*arguments, "--steps", str(steps)])
    finally:
        hook.remove()
    if len(ends) != 2:
        raise MeasureError(f"{script}: {seen} optimizer steps were seen, wanted {steps}.")
    return (ends[1] - ends[0]) / (steps - warmup) * 1e3
