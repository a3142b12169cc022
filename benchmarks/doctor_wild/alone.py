"""Measurements for which this machine does nothing else.

    python -m benchmarks.doctor_wild.alone LOCK NOTES doctor | fix | run  [arguments]

Steps bound by the host differed by 20 to 75 % from run to run while another process started, on other cores as well (H200). So
a process starts, warms up and reports in one room, in which several may be, and is measured in it alone. NOTES receives when
the first step was, and the seconds that the process took to it and waited since.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

GATE, ROOM = 0, 1  # bytes of the lock's file
LAST = 1000  # number of the lock's file, above those of the driver's
SOON = 5  # the step of a verdict after which it is alone: the first ones choose algorithms
BEFORE = 20  # steps before the timed ones of a run, in which a loader's queue may empty again
AT_ONCE = 16  # runs of a proof
RUNS = "runs.jsonl"


class Turn:
    """The machine, shared with other processes until step `at`, and alone from then on until `measured`, or to the end.

    The kernel gives the locks back when the process ends. They are its own: a forked worker of a loader does not keep them. A
    process closes its files in order, and the driver takes down a context when its files are closed, which held up the next
    process's first half second. So the lock's file is the last one.
    """

    def __init__(self, lock: str, notes: str, at: int = SOON):
        self.notes, self.at = Path(notes), at
        self.file = fcntl.fcntl(file := os.open(lock, os.O_RDWR | os.O_CREAT), fcntl.F_DUPFD, LAST)
        os.close(file)  # before it is locked
        self.began, self.steps = time.time(), 0
        self.first = self.start = self.waited = 0.0
        self._wait(self._share)

    def _lock(self, how: int, part: int) -> None:
        fcntl.lockf(self.file, how, 1, part)

    def _share(self) -> None:
        self._lock(fcntl.LOCK_EX, GATE)  # waits for one that is measured, or is about to be
        self._lock(fcntl.LOCK_SH, ROOM)
        self._lock(fcntl.LOCK_UN, GATE)

    def _wait(self, *locks: Callable[[], None]) -> None:
        began = time.time()
        for lock in locks:
            lock()
        self.waited += time.time() - began
        self.note()

    def note(self, **more: float) -> None:
        content = {"first": self.first, "start": self.start, "waited": self.waited, **more}
        self.notes.write_text(json.dumps(content), encoding="utf-8")

    def stepped(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first = time.time()
            self.start, self.waited = self.first - self.began - self.waited, 0.0
        if self.steps == self.at:
            self._lock(fcntl.LOCK_UN, ROOM)
            self._wait(lambda: self._lock(fcntl.LOCK_EX, GATE), lambda: self._lock(fcntl.LOCK_EX, ROOM))

    def leave(self) -> None:
        self._lock(fcntl.LOCK_UN, ROOM)
        self._lock(fcntl.LOCK_UN, GATE)

    def measured(self) -> None:
        self.leave()
        self._wait(self._share)


def main(argv: list[str]) -> int:
    lock, notes, name, *arguments = argv
    if name == "run":
        return run(lock, arguments)
    turn = Turn(lock, notes)
    from gpubound import cli  # torch takes seconds, while no other is measured
    from gpubound.cli import doctor_actions
    from gpubound.doctor.fix import prove
    from gpubound.doctor.record.located import LocatedPhase
    from gpubound.doctor.record.script import Steps
    from gpubound.trace import hooked

    if name == "fix":  # its runs take turns, not this process
        turn.leave()
        prove.RUN = ("benchmarks.doctor_wild.alone", lock, notes, "run")
        with hooked(prove, "run_once", noted), hooked(doctor_actions, "prove", together):
            return cli.main(["fix", *arguments])

    def locating(begin: Callable[..., None], phase: Any) -> None:
        """Call LocatedPhase.begin: its steps give lines, and no times."""
        turn.measured()
        begin(phase)

    with Steps(turn.stepped), hooked(LocatedPhase, "begin", locating):
        code = cli.main([name, *arguments])
    turn.note(ended=time.time())
    if code < 2:
        with open("patches.json", "w", encoding="utf-8") as file, redirect_stdout(file):
            cli.main(["fix", "verdict/doctor.json", "--json"])
    return code


def run(lock: str, arguments: list[str]) -> int:
    """Make one run of a proof, which is alone in its timed steps."""
    job = Path(arguments[0])
    content = json.loads(job.read_text(encoding="utf-8"))
    timed = not content["deterministic"]
    at = max(content["warmup"] - BEFORE, SOON) if timed else 0
    turn = Turn(lock, str(job.with_name("notes.json")), at)
    from gpubound.doctor.fix import prove
    from gpubound.doctor.record.script import Steps

    with Steps(turn.stepped):
        return prove.main(arguments)


def together(prove: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call prove so that its runs start together, unless nothing is timed, so that they take no turns."""
    return prove(*arguments, **options, at_once=1 if options["dry"] else AT_ONCE)


def noted(run_once: Callable[..., Any], job: Any, side: str, folder: Path, *more: Any) -> Any:
    """Call prove.run_once, and add what it measured to RUNS."""
    measured = run_once(job, side, folder, *more)
    if not job.deterministic and not job.dry:
        notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
        seconds = time.time() - notes["first"] - notes["waited"]
        ran = {"side": side, "step_ms": measured.step_ms, "start": notes["start"], "seconds": seconds}
        with open(RUNS, "a", encoding="utf-8") as file:
            file.write(json.dumps(ran) + "\n")
    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
