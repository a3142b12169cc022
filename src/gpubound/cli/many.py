"""--gpus: the same command line as several processes of this machine, and what each of them does differently."""

import atexit
import ctypes
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..distributed.failures import Failure

PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when the one that started it has ended
PROCESSES_A_CORE = 4  # on a CPU; each takes 250 MB before it has read a model


YEAR = 525_600  # minutes; torch's own waits overflow at much longer ones


def check_timeout(minutes: float) -> None:
    if not 0 < minutes <= YEAR:
        raise ValueError(
            f"timeout: got {minutes:g} minutes, wanted more than 0 and at most {YEAR:,}, a year; 10 is the default."
        )


@dataclass(frozen=True)
class Many:
    """The options of a command that may run as many processes."""

    gpus: int | None = None
    """Run on so many GPUs of this machine, a process each. With --device cpu: so many processes on the CPU."""
    restarts: int = 0
    """With --gpus: when a process is lost, all begin again from the newest checkpoint, so many times at most."""
    timeout: float = 10.0
    """Minutes that a step may take before the run is ended, where several processes wait for each other."""

    @property
    def longest_step(self) -> timedelta:
        return timedelta(minutes=self.timeout)

    @property
    def begins_again(self) -> bool:
        """Whether this process was started in place of one that was lost: it goes on from what is saved."""
        from ..distributed.failures import started_by_us

        return started_by_us() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def starts(self, device: str) -> bool:
        """Whether this process has to start the others; ValueError where it cannot."""
        from ..device import look
        from ..distributed import launched
        from ..distributed.failures import started_by_us

        check_timeout(self.timeout)
        if self.restarts < 0:
            raise ValueError(f"restarts: got {self.restarts}, wanted 0 or more.")
        if started_by_us():
            return False
        if launched() and (self.gpus is not None or self.restarts):
            name = "restarts" if self.gpus is None else "gpus"
            theirs = "--max-restarts to torchrun, and --resume here" if self.gpus is None else "--nproc-per-node to torchrun"
            raise ValueError(f"{name}: torchrun started this process, and --{name} would start others; give {theirs}.")
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
                f"give at most so many, or --device cpu to run on the CPU."
            )
        cores = len(os.sched_getaffinity(0))
        if device == "cpu" and self.gpus > PROCESSES_A_CORE * cores:
            raise ValueError(
                f"gpus: got {self.gpus} processes for {cores} CPU cores, wanted at most {PROCESSES_A_CORE * cores}, "
                f"{PROCESSES_A_CORE} a core."
            )
        return True


def start(name: str, argv: Sequence[str], many: Many, logs: Path, go_on: Callable[[], str | None]) -> int:
    """Run `gpubound name argv` as `many.gpus` processes; the exit code is the run's. A failure is said here, once.

    go_on  gives the command that goes on with what was saved; None where nothing was.
    """
    from ..distributed.failures import AGAIN
    from ..distributed.launch import launch  # torch's agent takes half a second

    assert many.gpus is not None
    end = launch([sys.executable, "-m", "gpubound", name, *argv], many.gpus, logs, many.restarts)
    if end.failure is None and end.code:
        raise KeyboardInterrupt
    if end.failure and end.failure.said:
        more = "" if end.log is None else f" More in {end.log}."
        print(f"gpubound {name}: {end.failure.sentence.rstrip('.')}.{more}", file=sys.stderr)
        if end.failure.kind in AGAIN and (command := go_on()):
            print(f"go on with: {command}", file=sys.stderr)
    return end.code


def again(name: str, argv: Sequence[str]) -> str:
    """The command line that goes on with a run."""
    command = ["gpubound", name, *argv]
    return shlex.join(command if "--resume" in command else [*command, "--resume"])


def one_of_many(name: str, command: Callable[[], int], explained: Callable[[Exception], tuple[int, str]]) -> int:
    """The exit code of `command()` in a process that is one rank of several. `explained` gives an error's code and line."""
    from ..distributed.failures import INTERRUPTED, UNSOUND, Failure, failure_of, started_by_us

    rank, ours = int(os.environ["RANK"]), started_by_us()
    if ours:
        _end_with_launcher()
        if rank:
            os.dup2(2, 1)  # its log takes both
    try:
        code = command()
        if code:
            Failure(rank, UNSOUND, code=code).note()
        return code
    except KeyboardInterrupt:
        if rank == 0 and not ours:
            print("gpubound: interrupted", file=sys.stderr)
        return _soon(INTERRUPTED)
    except Exception as error:
        code, said = explained(error)
        failure = failure_of(error, rank, said, code)
        failure.note()
        _say(name, failure, error, ours)
        return _soon(failure.code)


def _soon(code: int) -> int:
    """`code`, and this process ends with it once its threads have written: NCCL's own end would wait for the other ranks."""
    sys.stdout.flush(), sys.stderr.flush()
    atexit.register(os._exit, code)
    return code


def _say(name: str, failure: "Failure", error: Exception, ours: bool) -> None:
    """One process speaks: the one that started the ranks, or the first rank that fails under somebody else's torchrun."""
    from ..distributed.failures import speaks

    if ours and failure.rank == 0:
        return
    if ours or os.environ.get("GPUBOUND_TRACEBACK") == "1":
        traceback.print_exception(error)
    if ours or speaks():
        print(f"gpubound {name}: {failure.sentence}", file=sys.stderr)


def _end_with_launcher() -> None:
    """Let the kernel end this rank when the process that launched it ends, and end it now if that has happened.

    A rank that waits for the others to join is inside of torch, where no Python signal handler runs, and would wait for ranks
    that nobody starts any more until the time-out. Later a run has steps to save: `save_when_launcher_ends`.
    """
    from ..distributed.failures import INTERRUPTED, LAUNCHER

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGHUP)
    if (launcher := os.environ.get(LAUNCHER)) and not _runs(int(launcher)):  # it ended before these lines
        os._exit(INTERRUPTED)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"  # Z: ended, and not reaped
    except OSError:
        return False


def save_when_launcher_ends() -> None:
    """Let a rank that trains end as by Ctrl-C, after a checkpoint, when its launcher ends.

    Linux sends the signal for each thread of the launcher that ends, and a second Ctrl-C means: at once. So only the first
    one counts.
    """
    from ..distributed.failures import started_by_us

    if not started_by_us():
        return

    def save(number: int, frame: Any) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGHUP, save)
