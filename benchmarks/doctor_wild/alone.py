"""Measurements for which this machine does nothing else from their script's first step on.

    python -m benchmarks.doctor_wild.alone LOCK NOTES doctor | fix | run  [arguments]

Steps bound by the host differed by 20 to 75 % from run to run while another process started, on other cores as well (H200). So
a process starts, reads its tape and reports in one room, in which several may be, and is measured in it alone. At the gate one
that has to be measured goes before those that have to start. NOTES receives when the first step was, and how long the process
waited from then on.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GATE, ROOM = 0, 1  # bytes of the lock's file


class Turn:
    """The machine, shared with other processes until the first step, and alone from then on until `measured`.

    The kernel gives the locks back when the process ends. They are its own: a forked worker of a loader does not keep them.
    """

    def __init__(self, lock: str, notes: str):
        self.notes = Path(notes)
        self.file = os.open(lock, os.O_RDWR | os.O_CREAT)
        self.first = self.waited = 0.0
        self._share()

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
        self.notes.write_text(json.dumps({"first": self.first, "waited": self.waited}), encoding="utf-8")

    def stepped(self) -> None:
        if not self.first:
            self.first = time.time()
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
    turn = Turn(lock, notes)
    from gpubound import cli  # torch takes seconds, while no other is measured
    from gpubound.doctor.fix import prove
    from gpubound.doctor.record.located import LocatedPhase
    from gpubound.doctor.record.script import Steps
    from gpubound.trace import replaced

    if name == "fix":  # its runs take turns, not this process
        turn.leave()
        prove.RUN = ("benchmarks.doctor_wild.alone", lock, notes, "run")
        return cli.main(["fix", *arguments])
    if name == "run" and json.loads(Path(arguments[0]).read_text(encoding="utf-8"))["deterministic"]:
        return prove.main(arguments)  # it is not timed

    def locating(begin: Callable[..., None]) -> Callable[..., None]:
        """Replace LocatedPhase.begin: its steps give lines, and no times."""

        def begun(phase: Any) -> None:
            turn.measured()
            begin(phase)

        return begun

    with Steps(turn.stepped), replaced(LocatedPhase, "begin", locating):
        return prove.main(arguments) if name == "run" else cli.main([name, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
