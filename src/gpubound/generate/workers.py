"""Independent worker processes that take tasks from one queue.

concurrent.futures gives up all workers when one process ends, and waits forever for one that hangs. Here the task of a lost
worker goes to the next free one, and the others go on.
"""

import logging
import multiprocessing
import pickle
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from ..trace import logger, say

TRIES = 2  # a task that has ended this many workers is left out
EXIT_SECONDS = 5.0  # for a process to end
HEARTBEAT = 1.0  # seconds between two heartbeats of a worker, and between two checks for workers that hang


class PoolWorker:
    """A worker process, as its pool sees it."""

    def __init__(self, number: int, process: Any, pipe: Connection):
        self.number, self.process, self.pipe = number, process, pipe
        self.ready = False
        self.task: int | None = None
        self.last_message = time.monotonic()

    def assign(self, task: int) -> None:
        self.task, self.last_message = task, time.monotonic()
        with suppress(OSError):  # the process has ended, as the next wait finds, and the task is still this worker's
            self.pipe.send(task)

    def hangs(self, timeout: float) -> bool:
        return (self.task is not None or not self.ready) and time.monotonic() - self.last_message > timeout


class WorkerPool:
    """Runs `tasks` on worker processes. Iterating yields (task, result), in the order in which tasks are done.

    count    maximum number of processes
    begin    a module-level function: begin(number of the process, *args) returns run(task, heartbeat); `run` calls
             heartbeat() at times to show that it makes progress
    name     description of a task
    timeout  seconds without a heartbeat, or in `begin`, after which a worker is ended

    An error that a worker raises is raised here. A worker that ends is logged, and its task goes to another one. `left` has the
    tasks without a result.
    """

    def __init__(
        self,
        tasks: Sequence[int],
        count: int,
        begin: Callable[..., Callable[[int, Callable[[], None]], Any]],
        *args: Any,
        name: Callable[[int], str] = str,
        timeout: float = 600.0,
    ):
        self.name, self.timeout = name, timeout
        self.left: list[int] = []
        self._queue, self._losses = deque(tasks), Counter[int]()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([begin.__module__])  # imported once for all workers
        self._workers = {}
        for number in range(min(count, len(tasks))):
            pipe, child_pipe = context.Pipe()
            process = context.Process(target=_run, args=(child_pipe, number, begin, args), daemon=True)
            process.start()
            child_pipe.close()  # or the end of the process would not close the pipe
            self._workers[pipe] = PoolWorker(number, process, pipe)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        try:
            while self._workers and (self._queue or any(worker.task is not None for worker in self._workers.values())):
                for pipe in wait(list(self._workers), HEARTBEAT):
                    yield from self._receive(self._workers[pipe])  # type: ignore[index]
                for worker in [worker for worker in self._workers.values() if worker.hangs(self.timeout)]:
                    worker.process.kill()
                    self._remove(worker, f"made no progress for {self.timeout / 60:g} minutes and was ended")
        finally:
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.join(EXIT_SECONDS)
        self.left = sorted([*self.left, *self._queue])

    def _receive(self, worker: PoolWorker) -> Iterator[tuple[int, Any]]:
        task, worker.last_message = worker.task, time.monotonic()
        try:
            message = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(EXIT_SECONDS)
            code = worker.process.exitcode
            killed = code is not None and code < 0
            self._remove(worker, f"was ended by {signal.Signals(-code).name}" if killed else f"ended with code {code}")
            return
        if message is None:  # a heartbeat
            return
        result, error = message
        if error is not None:
            raise error
        worker.ready, worker.task = True, None
        self._assign()
        if task is not None:
            yield task, result

    def _remove(self, worker: PoolWorker, reason: str) -> None:
        del self._workers[worker.pipe]
        task, text = worker.task, f"replica {worker.number} {reason}"
        if task is not None:
            self._losses[task] += 1
            if self._losses[task] < TRIES:
                self._queue.appendleft(task)
                text += f" at {self.name(task)}" + (", which goes to another" if self._workers else "")
            else:
                self.left.append(task)
                text += f" at {self.name(task)}, like another before; this is left out"
        say(f"{text}. Replicas left: {len(self._workers)}.", logging.WARNING)
        self._assign()

    def _assign(self) -> None:
        for worker in self._workers.values():
            if self._queue and worker.ready and worker.task is None:
                worker.assign(self._queue.popleft())


def _run(pipe: Connection, number: int, begin: Callable[..., Callable[..., Any]], args: tuple) -> None:
    """Run tasks until the pool's process closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the pool ends its workers
    if number:
        logger.setLevel(logging.WARNING)  # the first worker logs for all, except for warnings
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            run = begin(number, *args)
        except Exception as error:
            pipe.send((None, _portable(error)))
            return
        pipe.send((None, None))
        while True:
            task = pipe.recv()
            try:
                answer: tuple[Any, Exception | None] = run(task, _heartbeat(pipe)), None
            except Exception as error:
                answer = None, _portable(error)
            pipe.send(answer)


def _heartbeat(pipe: Connection) -> Callable[[], None]:
    """Return a function that sends a heartbeat, at most once per second."""
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if (now := time.monotonic()) - last > HEARTBEAT:
            last = now
            pipe.send(None)

    return beat


def _portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a RuntimeError with its traceback."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
