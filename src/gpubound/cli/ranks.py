"""--gpus: run the same command line as several processes of this machine, and how each of them differs from a single one."""

import atexit
import ctypes
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeviceError

PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends
PROCESSES_PER_CORE = 4  # on a CPU; each takes 250 MB before it has read a model
YEAR = 525_600  # minutes; torch's own waits overflow at much longer ones


@dataclass(frozen=True)
class RankOptions:
    """Options of a command that may run as several processes."""

    gpus: int | None = None
    """Run on this many GPUs of this machine, a process each. With --device cpu: this many processes on the CPU."""
    restarts: int = 0
    """With --gpus: when a process is lost, restart all from the newest checkpoint, at most this often."""
    timeout: float = 10.0
    """Minutes that a step may take before the run is ended, where several processes wait for each other."""

    @property
    def is_restart(self) -> bool:
        """Return whether this process replaces a lost one: it resumes from the newest checkpoint."""
        from ..distributed.failures import started_by_us
        from ..distributed.rendezvous import attempt

        return started_by_us() and attempt() > 0

    def starts_ranks(self, device: str) -> bool:
        """Return whether this process has to start the others; raise ValueError if it cannot."""
        from ..device import look
        from ..distributed import launched
        from ..distributed.failures import started_by_us

        if not 0 < self.timeout <= YEAR:
            raise ValueError(
                f"timeout: got {self.timeout:g} minutes, wanted more than 0 and at most {YEAR:,}, a year; 10 is the default."
            )
        if self.restarts < 0:
            raise ValueError(f"restarts: got {self.restarts}, wanted 0 or more.")
        if started_by_us():
            return False
        if launched() and (self.gpus is not None or self.restarts):
            name = "restarts" if self.gpus is None else "gpus"
            advice = "--max-restarts to torchrun, and --resume here" if self.gpus is None else "--nproc-per-node to torchrun"
            raise ValueError(f"{name}: torchrun started this process, and --{name} would start others; give {advice}.")
        if self.gpus is None:
            if self.restarts:
                raise ValueError("restarts: they are for a run on several GPUs; give --gpus, too.")
            return False
        if self.gpus < 1:
            raise ValueError(f"gpus: got {self.gpus}, wanted 1 or more.")
        if device.startswith("cuda:"):
            raise ValueError(f"gpus: got device {device!r}, too, which is one GPU; leave --device out.")
        if device != "cpu" and self.gpus > (sight := look()).count:
            raise DeviceError(
                f"gpus: got {self.gpus}, and this machine has {sight.count} ({sight.why}); "
                f"give at most this number, or --device cpu to run on the CPU."
            )
        cores = len(os.sched_getaffinity(0))
        if device == "cpu" and self.gpus > PROCESSES_PER_CORE * cores:
            raise ValueError(
                f"gpus: got {self.gpus} processes for {cores} CPU cores, wanted at most {PROCESSES_PER_CORE * cores}, "
                f"{PROCESSES_PER_CORE} a core."
            )
        return True


def start_ranks(name: str, argv: Sequence[str], options: RankOptions, logs: Path, resume: Callable[[], str | None]) -> int:
    """Run `gpubound name argv` as `options.gpus` processes; return the exit code. A failure is reported here, once.

    resume  returns the command that resumes the run; None if it has saved nothing
    """
    from ..distributed.failures import AGAIN
    from ..distributed.launch import launch  # torch's agent takes half a second

    assert options.gpus is not None
    end = launch([sys.executable, "-m", "gpubound", name, *argv], options.gpus, logs, options.restarts)
    if end.failure is None and end.code:
        raise KeyboardInterrupt
    if end.failure and end.failure.text:
        more = "" if end.log is None else f" More in {end.log}."
        print(f"gpubound {name}: {end.failure.sentence.rstrip('.')}.{more}", file=sys.stderr)
        if end.failure.kind in AGAIN and (command := resume()):
            print(f"go on with: {command}", file=sys.stderr)
    return end.code


def resume_command(name: str, argv: Sequence[str]) -> str:
    """Return the command line that resumes a run."""
    command = ["gpubound", name, *argv]
    return shlex.join(command if "--resume" in command else [*command, "--resume"])


def run_as_rank(name: str, command: Callable[[], int], explain: Callable[[Exception], tuple[int, str]]) -> int:
    """Return the exit code of `command()` in a process that is one of several ranks. `explain` gives an error's code and line.

    A failure is printed by one process: the one that started the ranks, or the first rank that fails under a torchrun.
    """
    from ..distributed.failures import INTERRUPTED, UNSOUND, Failure, failure_of, reports, started_by_us

    rank, ours = int(os.environ["RANK"]), started_by_us()
    if ours:
        _end_with_launcher()
        if rank:
            os.dup2(2, 1)  # its log takes both
    try:
        code = command()
        if code:
            Failure(rank, UNSOUND, code=code).write()
        return code
    except KeyboardInterrupt:
        if rank == 0 and not ours:
            print("gpubound: interrupted", file=sys.stderr)
        return _exit_soon(INTERRUPTED)
    except Exception as error:
        code, text = explain(error)
        failure = failure_of(error, rank, text, code)
        failure.write()
        if not (ours and failure.rank == 0):
            if ours or os.environ.get("GPUBOUND_TRACEBACK") == "1":
                traceback.print_exception(error)
            if ours or reports():
                print(f"gpubound {name}: {failure.sentence}", file=sys.stderr)
        return _exit_soon(failure.code)


def _exit_soon(code: int) -> int:
    """Return `code`, and exit with it once the process's threads have ended: NCCL's own exit would wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    atexit.register(os._exit, code)
    return code


def _end_with_launcher() -> None:
    """Let the kernel end this rank when the process that launched it ends, and end it now if that has happened.

    A rank that waits for the others to join is inside of torch, where no Python signal handler runs, and would wait until the
    time-out for ranks that are not started any more. Later a run has steps to save: `save_when_launcher_ends`.
    """
    from ..distributed.failures import INTERRUPTED, LAUNCHER

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGHUP)
    if (launcher := os.environ.get(LAUNCHER)) and not _is_running(int(launcher)):  # it ended before these lines
        os._exit(INTERRUPTED)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"  # Z: ended, and not reaped
    except OSError:
        return False


def save_when_launcher_ends() -> None:
    """Let a rank that trains end as by Ctrl-C, after a checkpoint, when its launcher ends.

    Linux sends the signal for each thread of the launcher that ends, and a second Ctrl-C ends the rank at once. So only the
    first signal counts.
    """
    from ..distributed.failures import started_by_us

    if not started_by_us():
        return

    def save(number: int, frame: Any) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGHUP, save)
