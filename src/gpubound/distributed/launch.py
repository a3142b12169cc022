"""Start a command as several processes on this machine with torch's elastic agent, and report why they ended.

The agent starts and numbers the processes, notices when one ends, ends the others, and restarts them if allowed. This module
adds: Ctrl-C reaches every rank as it would a single process, ranks other than the first log to files, and a failure is one
sentence in place of the agent's report.
"""

import logging
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from ..device import share_of_cores
from ..files import make_folder
from ..trace import say
from .failures import AGAIN, INTERRUPTED, LAUNCHER, OURS, Failure, failure_from, first_of

INTERVAL = 0.1  # seconds between two checks of the processes
KILL_AFTER = 5.0  # seconds from a second Ctrl-C to SIGKILL: a rank inside a collective handles no signal


class _Agent(LocalElasticAgent):
    """torch's agent, extended to forward Ctrl-C and to find the first failure."""

    timer: threading.Timer | None = None
    stops = 0  # number of stop signals received
    attempt = 0
    pids: dict[int, int] = {}  # noqa: RUF012 - replaced at each start

    def _start_workers(self, worker_group: Any) -> Any:
        self._handle_signals()
        self.pids = super()._start_workers(worker_group)
        self._handle_signals()  # for torch versions without the variable that keeps the agent from handling these signals
        if self.stops:  # a signal arrived during the start
            self._send(signal.SIGINT)
        return self.pids

    def _handle_signals(self) -> None:
        """Replace torch's handler, which kills processes that have not ended within 30 s: a checkpoint may take longer."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: Any) -> None:
        self.stops += 1
        self._send(number)
        if self.stops == 2:
            self.timer = threading.Timer(KILL_AFTER, self._send, [signal.SIGKILL])
            self.timer.start()

    def _send(self, number: int) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):  # the process has ended
                os.kill(pid, number)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            failure = first_of(failure_from(rank, process) for rank, process in result.failures.items())
            allowed = worker_group.spec.max_restarts
            if self.stops or failure.kind not in AGAIN or self.attempt == allowed:
                raise _Failed(failure)
            self.attempt += 1
            say(f"{failure.sentence}; restart {self.attempt} of {allowed}, from the newest checkpoint.", logging.WARNING)
        return result


class _Failed(Exception):
    """Raised when the processes have failed and no restart follows."""

    def __init__(self, failure: Failure):
        self.failure = failure


class _Logs(DefaultLogsSpecs):
    """Log destinations: rank 0 has the terminal. stderr of the others goes to files; the other ranks redirect stdout
    themselves."""

    def __init__(self, notes: str, folder: Path):
        super().__init__(log_dir=notes)
        self.folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        destinations = super().reify(envs)
        for rank in envs:
            if rank > 0:
                destinations.stdouts[rank] = os.devnull
                destinations.stderrs[rank] = str(self.folder / _log_name(rank, int(envs[rank]["TORCHELASTIC_RESTART_COUNT"])))
        return destinations


def _log_name(rank: int, attempt: int) -> str:
    return f"rank-{rank}.restart-{attempt}.log" if attempt else f"rank-{rank}.log"


@dataclass(frozen=True)
class End:
    """Result of the processes: exit code 0, Ctrl-C, or the failure that ended them."""

    code: int
    failure: Failure | None = None
    log: Path | None = None
    """Log file of the failed rank, if it has one."""


def launch(command: Sequence[str], processes: int, logs: Path, restarts: int = 0) -> End:
    """Run `command` as `processes` ranks. Rank 0 uses this terminal; the others write to `logs`/rank-1.log and so on.

    restarts  maximum number of restarts of all ranks after one is lost. The command must resume from its checkpoint by itself.
    """
    with tempfile.TemporaryDirectory(prefix="gpubound-") as notes, _log_folder(logs), _environment(processes):
        name = f"{OURS}{uuid.uuid4().hex[:12]}"
        rendezvous = RendezvousParameters(
            backend="c10d", endpoint="localhost:0", run_id=name, min_nodes=1, max_nodes=1, local_addr="localhost"
        )
        spec = WorkerSpec(
            role="rank",
            local_world_size=processes,
            rdzv_handler=registry.get_rendezvous_handler(rendezvous),
            entrypoint=command[0],
            args=tuple(word.replace("$", "$$") for word in command[1:]),  # the agent expands ${local_rank} and the like
            max_restarts=restarts,
            monitor_interval=INTERVAL,
            local_addr="localhost",
        )
        agent = _Agent(spec, _Logs(notes, logs))
        try:
            agent.run()
            return End(0)
        except _Failed as failed:
            failure = failed.failure
            if agent.stops > 1 or (agent.stops and failure.code == INTERRUPTED):
                return End(INTERRUPTED)
            log = logs / _log_name(failure.rank, agent.attempt)
            if failure.rank == 0 and failure.trace:
                with suppress(OSError):  # a full disk, perhaps the failure itself; the failure is reported anyway
                    log.write_text(failure.trace, encoding="utf-8")
            return End(failure.code, failure, log if log.exists() and log.stat().st_size else None)
        except SignalException as stopped:
            return End(128 + stopped.sigval)
        finally:
            if agent.timer:
                agent.timer.cancel()
            spec.rdzv_handler.shutdown()


@contextmanager
def _environment(processes: int) -> Iterator[None]:
    """Set the environment variables that each rank inherits; variables set by the user keep their values.

    The agent's log, whose content is in the failure's sentence, is suppressed unless LOGLEVEL is set. Afterwards the signal
    handlers are restored: the agent replaces four.
    """
    variables = {
        "OMP_NUM_THREADS": share_of_cores(processes),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's default, the agent's is 1: end at once, for an abort waits for peers
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT",
    }
    unset = variables.keys() - os.environ.keys()
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.update({name: variables[name] for name in unset})
    logger, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagated = logger.propagate
    logger.propagate = propagated and "LOGLEVEL" in os.environ
    logger.addHandler(silent)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logger.removeHandler(silent)
        logger.propagate = propagated
        for name in (*unset, LAUNCHER):
            del os.environ[name]


@contextmanager
def _log_folder(folder: Path) -> Iterator[None]:
    """Create `folder` without the logs of an earlier run; at exit remove empty logs, and the folders that are empty then."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    for path in folder.glob("rank-*.log"):
        path.unlink(missing_ok=True)
    try:
        yield
    finally:
        for path in folder.glob("rank-*.log"):
            if path.stat().st_size == 0:
                path.unlink(missing_ok=True)
        for path in created or [folder]:
            with suppress(OSError):  # the folder is not empty
                path.rmdir()
