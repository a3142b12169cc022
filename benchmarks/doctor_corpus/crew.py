"""Calls in a few processes that stay, and take turns at what only one may do at a time.

A process that has a GPU, a profiler and torch at hand begins a script at once; a new one needs seconds for that. What is done
in a turn has the GPU to itself; what comes before and after it, such as the reading of a tape, runs beside the others' turns.
"""

import fcntl
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter
from typing import Any

from gpubound.errors import MeasureError

PRELOAD = ["torch", "benchmarks.doctor_corpus.eyes"]  # the server has never touched a GPU
MOST = 40  # tasks of one process, where nothing else is asked: whatever scripts leave behind in it goes with it


@contextmanager
def turn(file: Path) -> Iterator[None]:
    """One process at a time is inside. The lock is the kernel's, which takes it from a process that dies."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass
class _Member:
    process: BaseProcess
    pipe: Connection
    task: str | None = None
    began: float = 0.0
    done: int = 0


def calls(
    function: Callable[..., Any],
    tasks: Mapping[str, tuple],
    *,
    processes: int,
    most: int = MOST,
    timeout_s: float = 120.0,
    until: float = inf,
) -> Iterator[tuple[str, Any]]:
    """(name, function(*arguments)) of each task as it is done, or (name, MeasureError) of one that fails.

    A process that dies, or takes longer than `timeout_s`, is replaced, and costs its own task alone; one that has done `most`
    of them is replaced, too. None begins after `until`, a time of perf_counter.
    """
    waiting, crew = deque(tasks), [_hired(function) for _ in range(min(processes, len(tasks)))]
    try:
        while crew:
            for member in [member for member in crew if member.task is None]:
                if waiting and perf_counter() < until:
                    member.task, member.began = waiting.popleft(), perf_counter()
                    member.pipe.send(tasks[member.task])
                else:
                    crew.remove(member)
                    _dismissed(member)
            heard = wait([member.pipe for member in crew], timeout=1.0 if crew else 0.0)
            for member in list(crew):
                late = perf_counter() - member.began > timeout_s
                if member.pipe not in heard and not late:
                    continue
                name, result = member.task or "", _result(member, timeout_s if member.pipe not in heard else None)
                member.task, member.done = None, member.done + 1
                if member.done >= most or not member.process.is_alive():
                    _dismissed(member)
                    crew[crew.index(member)] = _hired(function)
                yield name, result
    finally:
        for member in crew:
            _dismissed(member)


def _hired(function: Callable[..., Any]) -> _Member:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function), daemon=False)
    process.start()
    theirs.close()
    return _Member(process, ours)


def _dismissed(member: _Member) -> None:
    member.process.kill()
    member.process.join()
    member.pipe.close()


def _result(member: _Member, late_s: float | None) -> Any:
    if late_s is not None:
        _dismissed(member)
        return MeasureError(f"no result after {late_s:g} s")
    try:
        done, result = member.pipe.recv()
    except EOFError:
        member.process.join()
        return MeasureError(f"its process ended with code {member.process.exitcode}")
    return result if done else MeasureError(result)


def _serve(pipe: Connection, function: Callable[..., Any]) -> None:
    set_start_method("fork", force=True)  # as a script's own loader has it; a fork server's child has the server's
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:  # dismissed
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:  # whatever a script does, SystemExit too, is the caller's to report
            where = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send((False, f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"))
