"""Copies of one worker, a process each, that are dealt pieces of work one by one and say nothing to each other.

Not for torchrun's agent: when one of its processes ends it ends them all, because they wait for each other. Copies do not.
What one had in hand when it ended goes to the next that is free, and the others work on meanwhile.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ..trace import logger, say

TRIES = 2  # a piece that has ended so many copies is the likely cause of it, and gets no further one
LEAVE = 5.0  # seconds that a process has to end
BEAT = 1.0  # seconds between two signs of life, and between two looks at who gives none


@dataclass(eq=False)
class PoolWorker:
    """One of the processes, seen from the one that deals."""

    number: int
    process: Any
    pipe: Connection
    ready: bool = False
    piece: int | None = None  # in hand
    heard: float = field(default_factory=lambda: time.monotonic())  # of it, or given to it

    def give(self, piece: int) -> None:
        self.piece, self.heard = piece, time.monotonic()
        with suppress(OSError):  # it has ended: the next wait says so, and this piece is found in its hand
            self.pipe.send(piece)

    def hangs(self, patience: float) -> bool:
        return (self.piece is not None or not self.ready) and time.monotonic() - self.heard > patience

    def ending(self) -> str:
        """Return a text that describes how the process ended."""
        self.process.join(LEAVE)
        code = self.process.exitcode
        return f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"


class WorkerPool:
    """Deals `pieces`; iterating gives (piece, what came of it), in the order in which they are done.

    count     processes at most
    begin     a function of a module: begin(number of the process, *args) gives what does one piece, called with the piece and
              with what it calls now and then as a sign of life
    name      a piece in words
    patience  seconds without a sign of life, or in `begin`, behind which a copy is taken to hang, and ended

    An error that a copy raises is raised here, and ends all. A copy that dies is told, and its piece goes to another.
    `left` has the pieces that nobody did in the end.
    """

    def __init__(
        self,
        pieces: Sequence[int],
        count: int,
        begin: Callable[..., Callable[[int, Callable[[], None]], Any]],
        *args: Any,
        name: Callable[[int], str] = str,
        patience: float = 600.0,
    ):
        self.name, self.patience = name, patience
        self.left: list[int] = []
        self._todo, self._ended = deque(pieces), Counter[int]()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([begin.__module__])  # imports once, for all of them
        self._copies = {}
        for number in range(min(count, len(pieces))):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(there, number, begin, args), daemon=True)
            process.start()
            there.close()  # or its end would not be seen
            self._copies[here] = PoolWorker(number, process, here)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        try:
            while self._copies and (self._todo or any(one.piece is not None for one in self._copies.values())):
                for pipe in wait(list(self._copies), BEAT):
                    yield from self._hear(self._copies[pipe])  # type: ignore[index]
                for one in [one for one in self._copies.values() if one.hangs(self.patience)]:
                    one.process.kill()
                    self._lose(one, f"gave no sign of life for {self.patience / 60:g} minutes and was ended")
        finally:
            for one in self._copies.values():
                one.process.kill()
                one.process.join(LEAVE)
        self.left = sorted([*self.left, *self._todo])

    def _hear(self, one: PoolWorker) -> Iterator[tuple[int, Any]]:
        piece, one.heard = one.piece, time.monotonic()
        try:
            said = one.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._lose(one, one.ending())
            return
        if said is None:  # it lives
            return
        result, error = said
        if error is not None:
            raise error
        one.ready, one.piece = True, None
        self._deal()
        if piece is not None:
            yield piece, result

    def _lose(self, one: PoolWorker, how: str) -> None:
        del self._copies[one.pipe]
        piece, told = one.piece, f"copy {one.number} {how}"
        if piece is not None:
            self._ended[piece] += 1
            if self._ended[piece] < TRIES:
                self._todo.appendleft(piece)
                told += f" over {self.name(piece)}" + (", which goes to another" if self._copies else "")
            else:
                self.left.append(piece)
                told += f" over {self.name(piece)}, as one before it; that is left out"
        say(f"{told}. Copies left: {len(self._copies)}.", logging.WARNING)
        self._deal()

    def _deal(self) -> None:
        for one in self._copies.values():
            if self._todo and one.ready and one.piece is None:
                one.give(self._todo.popleft())


def _run(pipe: Connection, number: int, begin: Callable[..., Callable[..., Any]], args: tuple) -> None:
    """The life of a copy. It ends with the process that deals, whose end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the one that deals ends the others
    if number:
        logger.setLevel(logging.WARNING)  # the first speaks for all, but for what went wrong
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            work = begin(number, *args)
        except Exception as error:
            pipe.send((None, _portable(error)))
            return
        pipe.send((None, None))
        while True:
            piece = pipe.recv()
            try:
                answer: tuple[Any, Exception | None] = work(piece, _beating(pipe)), None
            except Exception as error:
                answer = None, _portable(error)
            pipe.send(answer)


def _beating(pipe: Connection) -> Callable[[], None]:
    """A sign of life, however often it is called once a second."""
    last = time.monotonic()

    def alive() -> None:
        nonlocal last
        if (now := time.monotonic()) - last > BEAT:
            last = now
            pipe.send(None)

    return alive


def _portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a RuntimeError with its traceback."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
