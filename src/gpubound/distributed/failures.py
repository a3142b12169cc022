"""What becomes of a failure when the run is many processes: one of them says it, once, in one sentence.

A rank that fails leaves a note where torch's agent looks for one, in the form that torch's own `record` writes. Whoever started
the ranks reads the notes and finds the first: when one rank is gone, the others fail too, because they wait for it in vain.
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

LAUNCHER = "GPUBOUND_LAUNCHER"  # of the environment: the process id of the launcher
OURS = "gpubound-"  # how the name of a run begins that distributed/launch.py started

# What can become of a rank.
KILLED = "killed"  # by a signal
HUNG = "hung"  # the watchdog ended it
RAISED = "raised"  # an error that no command expects
REFUSED = "refused"  # an error with a sentence: the next attempt would end in it, too
UNSOUND = "unsound"  # it has done its work, and its exit code is not 0
BEREFT = "bereft"  # another rank is gone

AGAIN = (KILLED, HUNG, RAISED, BEREFT)
"""After these another attempt may succeed."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, where nothing was saved for it."""

MOMENT = timedelta(seconds=1)  # by which ranks that refuse the same input come to it one after the other

SMALLER = "take a smaller micro_batch, or recompute=blocks"

_SIGNS = re.compile(r"gloo/|\bnccl|Connection (closed|reset) by peer|process group", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """The end of a rank, or what another rank says of it."""

    rank: int
    kind: str
    said: str = ""
    code: int = 1
    trace: str = ""
    when: float = 0.0

    @property
    def sentence(self) -> str:
        """`said`, with the rank where it is not part of the sentence anyway. A refusal is the whole run's."""
        named = self.kind in (KILLED, HUNG) or re.match(rf"rank {self.rank}\b", self.said)
        plain = named or not self.said or (self.kind == REFUSED and self.rank == 0)
        return self.said if plain else f"rank {self.rank}: {self.said}"

    def note(self) -> None:
        """Leave it for the agent. Without an agent nobody reads notes."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            about: dict[str, Any] = {"timestamp": str(int(self.when)), "py_callstack": self.trace or self.said}
            about |= {"rank": self.rank, "kind": self.kind, "code": self.code, "when": self.when}
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": self.said, "extraInfo": about}}, file)


def failure_of(error: Exception, rank: int, said: str, code: int) -> Failure:
    """The failure that `error` is, whose one line and exit code are known."""
    kind = REFUSED if isinstance(error, GpuboundError | ValueError | OSError) else RAISED
    if isinstance(error, torch.OutOfMemoryError):
        kind, said = REFUSED, f"rank {rank} ran out of memory: {said.rstrip('.')}; {SMALLER}."
    elif of_another(error):
        kind, code = BEREFT, 1  # nothing is wrong with what this rank was given
        if not isinstance(error, RankError):
            said = f"rank {rank} waited for another rank that is gone: {said}"
    elif kind == REFUSED and refused_by_first(rank, said):
        rank = 0
    trace = "".join(traceback.format_exception(error))
    return Failure(rank, kind, said, code, trace, time.time())


def refused_by_first(rank: int, said: str) -> bool:
    """Whether the first rank refuses in the same words, now or in a moment: then the sentence is the run's, not this rank's."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"gpubound/refused/{attempt}/{hashlib.sha256(said.encode()).hexdigest()}"
    try:
        place = meeting_place(5 * MOMENT)
        if rank == 0:
            place.set(key, "")
        else:
            place.wait([key], MOMENT)
        return True
    except (dist.DistError, RuntimeError):  # it refuses nothing of the kind; or the place is gone
        return False


def of_another(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone. gloo's errors have no class of their own."""
    if isinstance(error, RankError) and error.__cause__ is not None:  # what `join` makes of one
        return of_another(error.__cause__)
    if isinstance(error, dist.DistError):  # NCCL's, and the store's
        return True
    return type(error) is RuntimeError and _SIGNS.search(str(error)) is not None


def failure_from(rank: int, process: Any) -> Failure:
    """The failure that torch's agent saw: its `ProcessFailure`, with the note that the rank left."""
    message, code = process.message, process.exitcode
    if isinstance(message, dict):
        about = message["extraInfo"]
        if "kind" in about:
            own = {name: about[name] for name in ("rank", "kind", "code", "when")}
            return Failure(said=message["message"], trace=about["py_callstack"], **own)
        return Failure(rank, RAISED, message["message"], code, about["py_callstack"], float(about["timestamp"]))
    if code >= 0:
        said = f"rank {rank} ended with exit code {code} and without a word"
        return Failure(rank, RAISED, said, code, when=process.timestamp)
    number = signal.Signals(-code)
    # An abort is often torch's own answer to another rank's end, and this time is cut to whole seconds.
    when = process.timestamp + (1 if number == signal.SIGABRT else 0)
    kind = BEREFT if number == signal.SIGTERM else KILLED  # the agent sends SIGTERM to those that are left
    asked = number in (signal.SIGINT, signal.SIGTERM)
    return Failure(rank, kind, _killed(rank, process.pid, number), INTERRUPTED if asked else 1, when=when)


def _killed(rank: int, pid: int, number: signal.Signals) -> str:
    why = " (the system does so, too, when the machine's memory runs out)" if number == signal.SIGKILL else ""
    return f"rank {rank} (process {pid}) was killed by {number.name}{why}"


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that the others come of."""
    return min(failures, key=lambda f: (f.kind == BEREFT, f.when, f.rank))


def speaks(timeout: timedelta = timedelta(seconds=5)) -> bool:
    """Whether this rank is the first to ask: under somebody else's torchrun it is the one that says why all of them end."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return meeting_place(timeout).add(f"gpubound/said/{attempt}", 1) == 1
    except (dist.DistError, RuntimeError):  # the place is gone with the process that kept it; better said twice than never
        return True


def meeting_place(timeout: timedelta) -> dist.TCPStore:
    """A connection of its own to the store where the ranks meet: one that another thread waits on cannot be used."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def started_by_us() -> bool:
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS)
