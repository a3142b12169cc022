"""Measurements for which this machine does nothing else.

    python -m benchmarks.doctor_wild.alone LOCK FOLDER NUMBER doctor | steps | fix | run | plain  [arguments]

Steps bound by the host differed by 20 to 75 % from run to run while another process started, on other cores as well (H200). So
processes start and warm up together, then each is measured alone, in the order of their numbers, and then all report. FOLDER
receives what a process leaves: in notes.json when its first step was, the seconds that it took to it and waited since. `steps`
is the doctor, which is alone in the steps of its STEP and not while it samples and records.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

QUEUE, ROOM, TURN, ORDER = 0, 1, 2, 3  # bytes of the lock's file; from ORDER on one for each number
LAST = 1000  # number of the lock's file, above those of the driver's
SOON = 5  # the step after which a process is alone: the first ones choose algorithms
BEFORE = 20  # steps before the timed ones of a proof's run, in which a loader's queue may empty again
SETTLED_S = 0.2  # before a process is measured, whether the last one has ended or goes on later: all begin alike
MORE = 1.25  # steps of a plain run, of those until the doctor has timed its last
UNKNOWN = 200  # steps of a plain run if no doctor was before it
AT_ONCE = 16  # runs of a proof
RUNS = "runs.jsonl"


class Turn:
    """The machine, shared with other processes until step `at`, and alone from then on until `measured`, or to the end.

    A process waits until that of the number before has been measured, if it has started, and one that starts waits until
    nobody is measured or waits for it: otherwise each start would hold up what is measured next.

    The kernel gives the locks back when the process ends. They are its own: a forked worker of a loader does not keep them. But
    it gives them back before the driver takes down the context, which holds up the next process's first half second. So the
    lock's file has the number of the process that is measured, and the next one waits until it has ended, if it did not leave.
    """

    def __init__(self, lock: str, folder: str, number: int, at: int = SOON):
        self.folder, self.number, self.at = Path(folder).resolve(), number, at
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = fcntl.fcntl(file := os.open(lock, os.O_RDWR | os.O_CREAT), fcntl.F_DUPFD, LAST)
        os.close(file)  # before it is locked
        self.began, self.steps = time.time(), 0
        self.first = self.start = self.waited = 0.0
        self.measuring = False
        self._wait(self._share)
        self._lock(fcntl.LOCK_EX, ORDER + number)

    def _lock(self, how: int, part: int) -> None:
        fcntl.lockf(self.file, how, 1, part)

    def _share(self) -> None:
        self._lock(fcntl.LOCK_EX, QUEUE)
        self._lock(fcntl.LOCK_SH, ROOM)
        self._lock(fcntl.LOCK_UN, QUEUE)

    def _alone(self) -> None:
        self._lock(fcntl.LOCK_SH, QUEUE)
        self._lock(fcntl.LOCK_SH, ORDER + self.number - 1)
        self._lock(fcntl.LOCK_UN, ORDER + self.number - 1)
        self._lock(fcntl.LOCK_EX, TURN)
        self._lock(fcntl.LOCK_EX, ROOM)
        if last := os.pread(self.file, 20, 0):
            while not has_ended(int(last)):
                time.sleep(0.01)
            os.ftruncate(self.file, 0)
        time.sleep(SETTLED_S)
        os.pwrite(self.file, str(os.getpid()).encode(), 0)
        self.measuring = True

    def _wait(self, lock: Callable[[], None]) -> None:
        began = time.time()
        lock()
        self.waited += time.time() - began
        self.note()

    def note(self, **more: float) -> None:
        content = {"first": self.first, "start": self.start, "waited": self.waited, **more}
        self.write("notes.json", content)

    def write(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content), encoding="utf-8")

    def stepped(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first = time.time()
            self.start, self.waited = self.first - self.began - self.waited, 0.0
        if self.steps == self.at:
            self._lock(fcntl.LOCK_UN, ROOM)
            self._wait(self._alone)

    def leave(self) -> None:
        if self.measuring:
            os.ftruncate(self.file, 0)
        self.measuring = False
        for part in (ROOM, TURN, ORDER + self.number, QUEUE):
            self._lock(fcntl.LOCK_UN, part)

    def measured(self) -> None:
        self.leave()
        self._wait(self._share)


def has_ended(process: int) -> bool:
    """Return whether all threads of a process have ended, and so its files are closed."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(os.listdir(f"/proc/{process}/task")) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def main(argv: list[str]) -> int:
    lock, folder, number, name, *arguments = argv
    if name == "run":
        return run(lock, Path(arguments[0]))
    turn = Turn(lock, folder, int(number))
    if name == "plain":
        return plain(turn, *arguments)
    from gpubound import cli  # torch takes seconds, while no other is measured
    from gpubound.cli import doctor_actions
    from gpubound.doctor.fix import prove
    from gpubound.doctor.record.located import LocatedPhase, SampledPhase
    from gpubound.doctor.record.phases import Phases, TimedPhase
    from gpubound.trace import hooked

    if name == "fix":  # its runs take turns, not this process
        turn.leave()
        prove.RUN = ("benchmarks.doctor_wild.alone", lock, "", "", "run")
        numbers = itertools.count(int(number) + 1)
        with (
            hooked(prove, "run_once", lambda run_once, *job: noted(next(numbers), run_once, *job)),
            hooked(doctor_actions, "prove", together),
        ):
            return cli.main(["fix", *arguments])

    def ended(original: Callable[..., None], phases: Phases) -> None:
        turn.stepped()
        original(phases)

    def sampling(begin: Callable[..., None], phase: Any) -> None:
        turn.write("timed.json", turn.steps)
        if name == "steps":
            turn.measured()
        begin(phase)

    def timed(end: Callable[[Any], None], phase: Any) -> None:
        """Call TimedPhase.end, and write what its steps took, by their numbers."""
        end(phase)
        first = turn.steps - len(phase.step_ms) + 1
        windows.append({"phase": phase.name, "first": first, "ms": list(phase.step_ms)})
        turn.write("windows.json", windows)

    windows: list[dict[str, Any]] = []

    def locating(begin: Callable[..., None], phase: Any) -> None:
        """Call LocatedPhase.begin: its steps give lines, and no times."""
        if name == "doctor":
            turn.measured()
        begin(phase)

    with (
        hooked(Phases, "ended", ended),
        hooked(TimedPhase, "end", timed),
        hooked(SampledPhase, "begin", sampling),
        hooked(LocatedPhase, "begin", locating),
    ):
        code = cli.main(["doctor", "--out", str(turn.folder), *arguments])
    turn.note(ended=time.time())
    if code < 2:
        with open(turn.folder / "patches.json", "w", encoding="utf-8") as file, redirect_stdout(file):
            cli.main(["fix", str(turn.folder / "doctor.json"), "--json"])
    return code


def plain(turn: Turn, before: str, script: str, *arguments: str) -> int:
    """Run a script as python does, with nothing of this library, and write the milliseconds between the ends of its steps.

    `before` is the folder of a doctor's run that was measured before: as many steps are made.
    """
    timed = Path(before, "timed.json").resolve()
    import runpy

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    leave, leaders, ends = os._exit, [], []  # type: ignore[var-annotated]
    wanted = UNKNOWN

    def stepped(optimizer: Any, *_: Any) -> None:
        nonlocal wanted
        leaders.append(optimizer) if not leaders else None
        if optimizer is not leaders[0]:  # a second one, as in a GAN
            return
        turn.stepped()
        if turn.steps == turn.at and timed.exists():
            wanted = int(MORE * json.loads(timed.read_text(encoding="utf-8")))
        ends.append(torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else time.perf_counter())
        if isinstance(ends[-1], torch.cuda.Event):
            ends[-1].record()
        if turn.steps >= wanted:
            write()
            for worker in multiprocessing.active_children():
                worker.kill()
                worker.join()
            leave(0)

    def write() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            turn.write("steps.json", [a.elapsed_time(b) for a, b in itertools.pairwise(ends)])
        else:
            turn.write("steps.json", [1e3 * (b - a) for a, b in itertools.pairwise(ends)])

    register_optimizer_step_post_hook(stepped)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    write()
    return 0


def run(lock: str, job: Path) -> int:
    """Make one run of a proof, which is alone in its timed steps."""
    content = json.loads(job.read_text(encoding="utf-8"))
    timed = not content["deterministic"]
    at = max(content["warmup"] - BEFORE, SOON) if timed else 0
    turn = Turn(lock, str(job.parent), int((job.parent / "number").read_text(encoding="utf-8")), at)
    from gpubound.doctor.fix import prove
    from gpubound.trace import hooked

    def stepped(original: Callable[..., None], recorder: prove.Recorder) -> None:
        turn.stepped()
        original(recorder)

    with hooked(prove.Recorder, "stepped", stepped):
        return prove.main([str(job)])


def together(prove: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call prove so that its runs start together, unless nothing is timed, so that they take no turns."""
    return prove(*arguments, **options, at_once=1 if options["dry"] else AT_ONCE)


def noted(number: int, run_once: Callable[..., Any], job: Any, side: str, folder: Path, *more: Any) -> Any:
    """Call prove.run_once for the run of this number, and add what it measured to RUNS."""
    (folder / "number").write_text(str(number), encoding="utf-8")
    measured = run_once(job, side, folder, *more)
    if not job.deterministic and not job.dry:
        with open(RUNS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"side": side, "step_ms": measured.step_ms}) + "\n")
    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
