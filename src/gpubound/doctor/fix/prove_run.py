"""One seeded run of a script, unmodified or patched: how long its steps take, and its losses to the last bit.

    python -m gpubound.doctor.fix.prove_run JOB.json

The job names the script, its arguments, files to read in place of the script's own, a seed and a number of steps. The result
goes into the file that the job names. The script is run, and its steps are counted, as the doctor does both. A loss is what
backward is called on, or what a gb.TrainStep gives. It is kept on the device until the end, so that the run waits no more than
it would.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np
import torch

from ...distributed.store_messages import numbers, wait_for_ranks
from ...watch import pretend
from ...watch.python_calls import replaced
from ..record.script import Script
from ..record.steps import Steps, TrainSteps

LOSSES = 100_000  # of one run: more of them say no more


@dataclass
class SeededJob:
    """One run. `patched` maps files to the files with their new text. `module`: the script is a module's name."""

    script: str
    arguments: list[str]
    patched: dict[str, str]
    result: str
    seed: int = 0
    steps: int = 0
    """End the run after this many steps; 0: let the script end by itself."""
    module: bool = False
    marker: str = ""
    """What ends a step, if not an optimizer."""
    dry: bool = False
    """On the pretend device."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def result_of(self, rank: int) -> Path:
        """The result file of a rank."""
        return Path(f"{self.result}.{rank}" if rank else self.result)


class Recorder:
    """The ends of the steps and the losses of a run."""

    def __init__(self, steps: int, enough: Callable[[], Any]):
        self.steps, self.enough = steps, enough
        self.ends: list[Any] = []
        self.losses: list[torch.Tensor] = []
        self.train_steps = TrainSteps(lambda _, result: self.lost(result.loss))

    def stepped(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            end: Any = torch.cuda.Event(enable_timing=True)
            end.record()
        else:
            end = perf_counter()
        self.ends.append(end)
        if len(self.ends) == self.steps:
            self.enough()

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for loss in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
                if not self.train_steps.inside:
                    self.lost(loss)
            return original(tensors, *args, **kwargs)

        return run

    def lost(self, loss: torch.Tensor) -> None:
        if loss.numel() == 1 and len(self.losses) < LOSSES:
            self.losses.append(loss.detach().clone())

    @contextmanager
    def listening(self, marker: str = "") -> Iterator[None]:
        """Steps listen last, outside: a loss is recorded before its step's end, which may be the end of the run."""
        losses = replaced(torch.autograd, "backward", self.backward)
        with self.train_steps.listening(), losses, Steps(self.stepped, marker):
            yield

    def as_dict(self) -> dict[str, Any]:
        """Milliseconds between the ends of steps, and the losses as exact numbers (`float.fromhex` reads them)."""
        if self.ends and isinstance(self.ends[0], torch.cuda.Event):
            torch.cuda.synchronize()
            between = [a.elapsed_time(b) for a, b in zip(self.ends, self.ends[1:])]
        else:
            between = [(b - a) * 1e3 for a, b in zip(self.ends, self.ends[1:])]
        return {"step_ms": between, "losses": [float(loss).hex() for loss in self.losses]}


@contextmanager
def reading_instead(patched: Mapping[str, bytes]) -> Iterator[None]:
    """Run and import from other bytes than the files hold. No cached bytecode of such a file is read or written."""
    files = {os.path.realpath(name): data for name, data in patched.items()}
    get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def data_of(loader: SourceFileLoader, path: str) -> bytes:
        return files[real] if (real := os.path.realpath(path)) in files else get_data(loader, path)

    def stats_of(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if os.path.realpath(path) in files:
            raise OSError(f"{path}: is read from elsewhere")  # the import system then compiles what get_data returns
        return path_stats(loader, path)

    def opened(open_code: Callable[[str], IO[bytes]]) -> Callable[[str], IO[bytes]]:
        """A script is read by this, modules by a loader."""
        return lambda path: io.BytesIO(files[real]) if (real := os.path.realpath(path)) in files else open_code(path)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = data_of, stats_of  # type: ignore[method-assign, assignment]
    try:
        with replaced(io, "open_code", opened):
            yield
    finally:
        SourceFileLoader.get_data, SourceFileLoader.path_stats = get_data, path_stats  # type: ignore[method-assign]


def run(job: SeededJob, recorder: Recorder) -> None:
    """Run the job's script in this process."""
    if job.dry:
        pretend.simgpu()
    random.seed(job.seed)
    np.random.seed(job.seed)
    torch.manual_seed(job.seed)
    patched = {name: Path(copy).read_bytes() for name, copy in job.patched.items()}
    with reading_instead(patched), recorder.listening(job.marker):
        Script(job.script, tuple(job.arguments), job.module).run()


def main(argv: list[str]) -> int:
    job = SeededJob(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))

    leave = os._exit  # the script's own ends the script alone

    def save() -> None:
        job.result_of(numbers()[0]).write_text(json.dumps(recorder.as_dict()), encoding="utf-8")

    def enough() -> None:
        save()
        wait_for_ranks()
        sys.stdout.flush()
        leave(0)  # at once: no checkpoint is written, and no handler of the script believes that it failed

    recorder = Recorder(job.steps, enough)
    try:
        run(job, recorder)
    except ValueError as failed:  # its own traceback has been printed
        print(failed, file=sys.stderr)
        return 1
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
