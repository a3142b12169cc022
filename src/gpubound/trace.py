"""Counters, notices and fallbacks that the library reports while it runs, and functions that are replaced in order to watch.

A counter costs one loop over an empty list until a listener is added, as a ledger does. Fallbacks are always counted, and each
is printed once: a silent slow path is the failure that this library exists to prevent.

Every message goes to the logger "gpubound": fallbacks as warnings, the rest as information. Unless logging is configured, the
library also prints them to stderr as `gpubound: message`. How long the parts of placing, of a first step and of building a
decoder take is logged at the level DEBUG, which GPUBOUND_DEBUG=1 sets.
"""

import functools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .errors import FallbackError

Listener = Callable[[str, int], None]  # (what was counted, how many)

_listeners: list[Listener] = []


def count(name: str, amount: int = 1) -> None:
    for listener in _listeners:
        listener(name, amount)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for every count inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace `owner`'s function `name` by `make(original)` inside the block."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def hooked(owner: Any, name: str, hook: Callable[..., Any]) -> AbstractContextManager[None]:
    """Call `hook(original, ...)` instead of `owner`'s function `name` inside the block."""

    def make(original: Callable) -> Callable:
        return functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs))

    return replaced(owner, name, make)


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, which a terminal would obey.

    >>> printable("runs/\x1b[2J")
    'runs/\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


logger = logging.getLogger("gpubound")
_null_handler = logging.NullHandler()  # or logging would print warnings, too
logger.addHandler(_null_handler)
if os.environ.get("GPUBOUND_DEBUG") == "1":
    logger.setLevel(logging.DEBUG)

_printed: set[str] = set()


def notice(text: str, level: int = logging.INFO, key: str | None = None) -> None:
    """Log one line, once in this process. key: what is logged once, where the text has numbers that change"""
    if (key or text) not in _printed:
        _printed.add(key or text)
        say(text, level, stacklevel=3)


def say(text: str, level: int = logging.INFO, stacklevel: int = 2) -> None:
    """Log one line, each time."""
    if prints(level):
        print(f"gpubound: {printable(text)}", file=sys.stderr, flush=True)
    logger.log(level, "%s", printable(text), stacklevel=stacklevel)


def prints(level: int = logging.INFO) -> bool:
    """Return True when the library prints messages itself: no handler or higher level is set on its logger or the root logger.

    pytest's handlers do not count: they only record.
    """
    handlers = [*logger.handlers, *(logging.root.handlers if logger.propagate else ())]
    if any(h is not _null_handler and not type(h).__module__.startswith("_pytest.") for h in handlers):
        return False
    return level >= (logger.level or logging.INFO) and level > logging.root.manager.disable and not logger.disabled


_timing = threading.local()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log the seconds of the block at the level DEBUG, after those of the blocks inside it, which are indented further.

    The device is not waited for: its time is that of the block that waits for it.
    """
    depth, begun = getattr(_timing, "depth", 0), time.perf_counter()
    _timing.depth = depth + 1
    try:
        yield
    finally:
        _timing.depth = depth
        if logger.isEnabledFor(logging.DEBUG):
            thread = threading.current_thread()
            where = "" if thread is threading.main_thread() else f" [{thread.name}]"
            say(f"{time.perf_counter() - begun:8.3f} s {'  ' * depth}{what}{where}", logging.DEBUG, stacklevel=4)


def bar(console: Any, title: str, total: float | None, *columns: Any) -> Any:
    """Return a progress bar of rich's with the figures below it: 80 columns have no room for both in one line.

    It has one task, 0; `update` takes its figures as `line`.
    """
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.text import Text

    class Two(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            yield from (Text(task.fields["line"]) for task in self.tasks)

    name = TextColumn("{task.description}", markup=False)  # [b] in a name is part of the name
    progress = Two(name, BarColumn(bar_width=24), *columns, console=console)
    progress.add_task(title, total=total, line="")
    progress.start()
    return progress


fallbacks: Counter[tuple[str, str]] = Counter()
"""(what, why) of every slow path in this process, with its count."""

_strict = 0
_lock = threading.Lock()


def fallback(what: str, why: str) -> None:
    """Record that `what` took its slow path because of `why`; under `strict()` raise instead."""
    if _strict:
        raise FallbackError(f"{what}: would fall back: {why}. Fix the cause, or leave strict mode to accept the slow path.")
    with _lock:
        fallbacks[what, why] += 1
    count("fallback")
    notice(f"fallback: {what}: {why}", logging.WARNING)


@contextmanager
def strict() -> Iterator[None]:
    """Forbid every fallback inside the block, on every thread: backward runs on threads of autograd."""
    global _strict
    with _lock:
        _strict += 1
    try:
        yield
    finally:
        with _lock:
            _strict -= 1
