"""Measurements that have the GPU and half of the cores to themselves from their script's first step on, while others start.

    python -m benchmarks.doctor_wild.alone LOCK NOTES plain | doctor | fix | run  [arguments]

A script starts for several seconds (imports, data, CUDA) and is then measured in one. So a process takes the lock when its
first step has ended, and gives it back when it is measured: while others are, it reads its tape, reports and exits. NOTES
receives when the first step was, and how long the process waited for its turn.

A loader's worker or a launching thread that shares its core with a process that starts takes longer: steps bound by the host
differed by 20 to 50 % from run to run (H200). So LOCK names cores that only the process that has it runs on.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

import torch

from gpubound import cli
from gpubound.doctor.fix import prove
from gpubound.doctor.record.phases import Phases
from gpubound.doctor.record.script import Steps
from gpubound.trace import replaced

from .peers import steps_of

PLAIN = 80  # steps: whole periods of loops that print every 10th and roll out every 16th


def move(cores: Collection[int]) -> None:
    """Let all threads of this process and of its loaders' workers run on these cores alone."""
    for process in (os.getpid(), *(child.pid for child in active_children())):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)


class Turn:
    """The lock of the GPU, taken at the first step. The kernel gives it back when the process ends, whatever ends it."""

    def __init__(self, lock: str, notes: str):
        self.lock, self.notes = lock, Path(notes)
        self.file: int | None = None

    def stepped(self) -> None:
        if self.file is not None:
            return
        first = time.time()
        self.file = os.open(self.lock, os.O_RDWR | os.O_CREAT)
        fcntl.lockf(self.file, fcntl.LOCK_EX)  # a record lock: a forked worker of a loader does not keep it
        self.notes.write_text(json.dumps({"first": first, "waited": time.time() - first}), encoding="utf-8")
        self.starting = os.sched_getaffinity(0)
        move(json.loads(Path(self.lock).read_text(encoding="utf-8")) or self.starting)

    def measured(self) -> None:
        if self.file is not None:
            move(self.starting)
            fcntl.lockf(self.file, fcntl.LOCK_UN)


def plain(argv: Sequence[str], turn: Turn) -> int:
    """Print the milliseconds of a step of a script that nothing looks at."""
    script, *arguments = argv
    times: list[float] = []

    def clock() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    def end() -> None:
        clock()
        turn.measured()

    steps_of(Path(script), arguments, PLAIN, clock, end)
    print("\n" + json.dumps({"plain_ms": 1e3 * (times[1] - times[0]) / PLAIN}), flush=True)
    return 0


def main(argv: list[str]) -> int:
    lock, notes, name, *arguments = argv
    if name == "fix":  # its runs take turns, not this process
        prove.RUN = ("benchmarks.doctor_wild.alone", lock, notes, "run")
        return cli.main(["fix", *arguments])
    turn = Turn(lock, notes)

    def left(original: Callable[..., None]) -> Callable[..., None]:
        """Replace Phases.__exit__, which is called when the doctor has stopped the script."""

        def leave(*error: object) -> None:
            original(*error)
            turn.measured()

        return leave

    with Steps(turn.stepped), replaced(Phases, "__exit__", left):
        if name == "plain":
            return plain(arguments, turn)
        return prove.main(arguments) if name == "run" else cli.main([name, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
