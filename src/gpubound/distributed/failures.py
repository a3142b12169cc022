"""Report the failure of a run of many processes once, in one sentence.

A rank that fails writes an error file where torch's agent expects one, in the format of torch's `record`. The launcher reads
the files and finds the first failure: when one rank is gone, the others fail too, because they wait for it.
"""

import hashlib
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import GpuboundError, RankError
from .rendezvous import attempt, connect

LAUNCHER = "GPUBOUND_LAUNCHER"  # environment variable with the process id of the launcher
OURS = "gpubound-"  # prefix of the run ids of distributed/launch.py

# Kinds of failure.
KILLED = "killed"  # by a signal
HUNG = "hung"  # the watchdog ended it
RAISED = "raised"  # an unexpected error
REFUSED = "refused"  # an expected error, which the next attempt would raise, too
UNSOUND = "unsound"  # the work is done, but the exit code is not 0
BEREFT = "bereft"  # another rank is gone

AGAIN = (KILLED, HUNG, RAISED, BEREFT)
"""Kinds of failure after which another attempt may succeed."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, if no checkpoint was saved for it."""

MOMENT = timedelta(seconds=1)  # maximum delay between ranks that refuse the same input

SMALLER = "take a smaller micro_batch, or recompute=blocks"

_SIGNS = re.compile(r"gloo/|\bnccl|Connection (closed|reset) by peer|process group", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, or another rank's report of it."""

    rank: int
    kind: str
    text: str = ""
    code: int = 1
    trace: str = ""
    when: float = 0.0

    @property
    def sentence(self) -> str:
        """Return `text`, prefixed with the rank unless `text` names it. A refusal on rank 0 is reported for the whole run."""
        named = self.kind in (KILLED, HUNG) or re.match(rf"rank {self.rank}\b", self.text)
        plain = named or not self.text or (self.kind == REFUSED and self.rank == 0)
        return self.text if plain else f"rank {self.rank}: {self.text}"

    def write(self) -> None:
        """Write the error file for the agent. Without an agent no file is written."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            about: dict[str, Any] = {"timestamp": str(int(self.when)), "py_callstack": self.trace or self.text}
            about |= {"rank": self.rank, "kind": self.kind, "code": self.code, "when": self.when}
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": self.text, "extraInfo": about}}, file)


def failure_of(error: Exception, rank: int, text: str, code: int) -> Failure:
    """Return the failure for `error`, with its one-line message and its exit code."""
    kind = REFUSED if isinstance(error, GpuboundError | ValueError | OSError) else RAISED
    if isinstance(error, torch.OutOfMemoryError):
        kind, text = REFUSED, f"rank {rank} ran out of memory: {text.rstrip('.')}; {SMALLER}."
    elif of_another(error):
        kind, code = BEREFT, 1  # this rank's input is valid
        if not isinstance(error, RankError):
            text = f"rank {rank} waited for another rank that is gone: {text}"
    elif kind == REFUSED and refused_by_first(rank, text):
        rank = 0
    trace = "".join(traceback.format_exception(error))
    return Failure(rank, kind, text, code, trace, time.time())


def refused_by_first(rank: int, text: str) -> bool:
    """Return whether rank 0 raises the same error, now or within a moment: the error is then the run's, not this rank's."""
    key = f"gpubound/refused/{attempt()}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = connect(5 * MOMENT)
        if rank == 0:
            store.set(key, "")
        else:
            store.wait([key], MOMENT)
        return True
    except (dist.DistError, RuntimeError):  # rank 0 raises no such error, or the store's process has exited
        return False


def of_another(error: BaseException) -> bool:
    """Return whether `error` only reports that another rank is gone. gloo raises plain RuntimeError, matched by its text."""
    if isinstance(error, RankError) and error.__cause__ is not None:  # raised by `join` from such an error
        return of_another(error.__cause__)
    if isinstance(error, dist.DistError):  # raised by NCCL and by the store
        return True
    return type(error) is RuntimeError and _SIGNS.search(str(error)) is not None


def failure_from(rank: int, process: Any) -> Failure:
    """Return the failure for a `ProcessFailure` of torch's agent, with the rank's error file."""
    message, code = process.message, process.exitcode
    if isinstance(message, dict):
        about = message["extraInfo"]
        if "kind" in about:
            own = {name: about[name] for name in ("rank", "kind", "code", "when")}
            return Failure(text=message["message"], trace=about["py_callstack"], **own)
        return Failure(rank, RAISED, message["message"], code, about["py_callstack"], float(about["timestamp"]))
    if code >= 0:
        text = f"rank {rank} ended with exit code {code} and without a message"
        return Failure(rank, RAISED, text, code, when=process.timestamp)
    number = signal.Signals(-code)
    # An abort is often torch's reaction to another rank's end, and this time is truncated to whole seconds.
    when = process.timestamp + (1 if number == signal.SIGABRT else 0)
    kind = BEREFT if number == signal.SIGTERM else KILLED  # the agent sends SIGTERM to the remaining ranks
    why = " (the system does so, too, when the machine's memory runs out)" if number == signal.SIGKILL else ""
    text = f"rank {rank} (process {process.pid}) was killed by {number.name}{why}"
    return Failure(rank, kind, text, INTERRUPTED if number in (signal.SIGINT, signal.SIGTERM) else 1, when=when)


def first_of(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others."""
    return min(failures, key=lambda f: (f.kind == BEREFT, f.when, f.rank))


def reports() -> bool:
    """Return whether this rank is the first to call: under an external torchrun that rank reports why all ranks end."""
    try:
        return connect(timedelta(seconds=5)).add(f"gpubound/said/{attempt()}", 1) == 1
    except (dist.DistError, RuntimeError):  # the store's process has exited; a second report is better than none
        return True


def started_by_us() -> bool:
    """Return whether distributed/launch.py started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS)
