"""`with no_stall():` raises at the line where the host would wait for the device.

    with no_stall(allow=("d2h",)):
        step(batch)

Three kinds: "sync" (a value or a size is read back: .item(), a boolean mask, synchronize(), print), "h2d" and "d2h" (a copy
that is blocking or goes through pageable memory). A line that must wait has a comment with the reason, and is counted in
`guard.allowed`:

    if loss > limit:  # gpubound: allow(sync) stop a diverged run before it spoils the checkpoint

The guard belongs to the thread that entered it, and to the backward passes that this thread starts: it is a dispatch mode.
Other threads are not affected. The innermost guard decides. It is for tests and for finding the line: an op costs about 10 µs
more inside.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import threading
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..errors import StallError
from ..formatting import listed, nearest
from . import ops
from .events import Cause, Origins, Place, Site, cause_of, here

STALLS = ("sync", "h2d", "d2h")

_COMMENT = re.compile(r"#\s*gpubound:\s*allow\(([^)]*)\)[ \t]*(.*)")


class _Thread(threading.local):
    decided = False  # inside an op that a guard has passed


_thread = _Thread()


class NoStall(ContextDecorator):
    """Guard returned by `no_stall`. `allowed` counts, by line, the stalls that a comment permitted."""

    def __init__(self, allow: frozenset[str], message: str | None):
        self.allow, self.message = allow, message
        self.allowed: Counter[str] = Counter()

    def __call__(self, func):
        if inspect.isclass(func):
            raise ValueError(
                f"no_stall: got the class {func.__name__}, of which only the making would be guarded; decorate its methods."
            )
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise ValueError(
                f"no_stall: got {_name(func)}, a coroutine or generator, whose body runs after the decorator has ended; "
                "write `with no_stall():` inside it."
            )
        return super().__call__(func)

    def __enter__(self) -> NoStall:
        ops.listen(_called)
        _Forbidding(self).__enter__()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if not (entered := _entered()):
            raise RuntimeError("no_stall: this thread has entered no guard; leave it on the thread that it guards.")
        entered[-1].__exit__(kind, error, traceback)
        ops.leave(_called)

    def meet(self, origins: Origins, kind: str, what: str, device: str, cause: Cause) -> None:
        """Raise if the stall that the thread is about to make is not allowed here."""
        if kind in self.allow:
            return
        place = here(origins)
        site = place.site or place.built
        permitted, refused = comment(site, kind) if site is not None else (False, "")
        if permitted:
            self.allowed[str(site)] += 1
            return
        raise StallError(self._sentence(kind, what, device, place, cause, refused))

    def _sentence(self, kind: str, what: str, device: str, place: Place, cause: Cause, refused: str) -> str:
        site = place.site or place.built
        where = f"{site}: `{site.code}`" if site is not None else "a line that is not on this thread's stack"
        if place.node:
            built = f", built at {place.built}" if place.built is not None and place.site is not None else ""
            where += f" (in backward of {place.node}{built})"
        via = f", via {place.via.in_package}" if place.via else ""
        if kind == "sync" and place.through:
            cause = cause_of(kind, what, place.through)
        note = f" {refused}" if refused else ""
        own = f"{self.message}: " if self.message else ""
        return (
            f"{own}{where} makes the host wait for {device} ({kind}: {what}{via}). What to do: {cause.remedy}; "
            f"or say on that line `# gpubound: allow({kind}) <why>`.{note}"
        )


class _Forbidding(ops.OpMode):
    def __init__(self, guard: NoStall):
        self.guard, self.origins = guard, Origins()
        super().__init__(self._run)

    def _run(self, func, args, kwargs):
        self.origins.note(func._opname)
        if _thread.decided:  # an inner guard has decided about this op
            return func(*args, **kwargs)
        for move in ops.moves(func, args, kwargs):
            if move.stalls:
                what = f"{move.what}, {move.manner}" if move.bytes else move.what
                self.guard.meet(self.origins, move.kind, what, str(move.device), move.cause)
        _thread.decided = True
        try:
            return func(*args, **kwargs)
        finally:
            _thread.decided = False


def _entered() -> list[_Forbidding]:
    """Return the guards that this thread has entered, the innermost last."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Forbidding)]


def _called(what: str, device_type: str) -> None:
    """Handle a call that waits without an op. Several guards may listen; the calling thread's innermost one decides, once."""
    if (modes := _entered()) and not _thread.decided:
        modes[-1].guard.meet(modes[-1].origins, "sync", what, device_type, cause_of("sync", what))


def allow_comments(site: Site) -> Iterator[tuple[int, list[str], str]]:
    """Yield (line, kinds, reason) of each `# gpubound: allow(kinds) reason` in the statement."""
    lines = linecache.getlines(site.file)
    candidates = [line for line in range(site.line, site.end + 1) if _COMMENT.search("".join(lines[line - 1 : line]))]
    comments = _comments(tuple(lines)) if candidates else {}
    for line in candidates:
        if (match := _COMMENT.search(comments.get(line, ""))) is not None:  # None: it is in a string
            yield line, [name.strip() for name in match[1].split(",")], match[2].strip()


def comment(site: Site, kind: str) -> tuple[bool, str]:
    """Return whether a comment in this statement permits `kind`, and the mistake in one that does not."""
    for _, kinds, reason in allow_comments(site):
        for name in kinds:
            if name not in STALLS:
                return False, f"The comment there allows {name!r}, which is none of {', '.join(STALLS)}{nearest(name, STALLS)}"
        if kind in kinds:
            return bool(reason), "" if reason else "The comment there gives no reason."
        return False, f"The comment there allows {', '.join(kinds)} only."
    return False, ""


@functools.lru_cache(maxsize=64)
def _comments(lines: tuple[str, ...]) -> dict[int, str]:
    """Return the comment of each line that has one."""
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def no_stall(allow: Iterable[str] = (), message: str | None = None) -> NoStall:
    """Forbid stalls, as `with no_stall():` or `@no_stall()`: StallError at the line where this thread would wait for a device.

    allow    kinds of stall that are allowed: "sync", "h2d", "d2h".
    message  the text with which the error begins.
    """
    if callable(allow):
        raise ValueError(f"no_stall: allow: got {_name(allow)}; as a decorator it has parentheses: @no_stall().")
    kinds = listed(allow)
    for name in (kind for kind in kinds if kind not in STALLS):
        raise ValueError(f"no_stall: allow: got {name!r}, wanted kinds among {', '.join(STALLS)}{nearest(name, STALLS)}")
    return NoStall(frozenset(kinds), message)


def _name(function: Any) -> str:
    return getattr(function, "__name__", repr(function))
