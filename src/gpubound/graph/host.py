"""What a function may take from the host besides its inputs: the time, and random numbers of Python and NumPy.

A graph bakes in whatever it read there. Mostly that shows, because eager reads something else at its next call; but the time
in seconds, as an fp32 number, is the same for two minutes, and a choice among few may be the same by chance. So each eager call
of the certificate reads clocks that are decades off, and draws from other seeds.
"""

import datetime
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DECADE = 315_576_000  # seconds
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_ASIDE = frozenset(sys.stdlib_module_names - {"time", "datetime"}) | {"torch", "triton", "numpy", "_pytest", "pytest"}

SOURCES = "the time (time, datetime) or random numbers (random, numpy.random)"


@contextmanager
def varied(turn: int) -> Iterator[None]:
    """Inside, this thread's clocks are `turn` + 1 decades ahead, and the random numbers are others. All is put back.

    A constant stands between two readings as it did before, so what is only timed or logged stays right.
    """
    replacements = _replacements(DECADE * (turn + 1))
    changed = [(space, name, value) for space, name, value in _names(replacements)]
    states = _random_states()
    try:
        for space, name, value in changed:
            space[name] = replacements[id(value)]
        for _, _, seed in states:
            seed(0x5EED + turn)
        yield
    finally:
        for space, name, value in changed:
            space[name] = value
        for state, restore, _ in states:
            restore(state)


def _replacements(seconds: int) -> dict[int, Any]:
    """What stands for each clock, by the clock's id."""
    home = threading.get_ident()

    def ahead(clock: Callable[[], Any], by: int) -> Callable[[], Any]:
        return lambda: clock() + by if threading.get_ident() == home else clock()

    found: dict[int, Any] = {}
    for name in _CLOCKS:
        found[id(getattr(time, name))] = ahead(getattr(time, name), seconds)
        found[id(getattr(time, f"{name}_ns"))] = ahead(getattr(time, f"{name}_ns"), seconds * 10**9)
    found[id(datetime.datetime)] = _calendar(home, datetime.timedelta(seconds=seconds))
    return found


class _Kind(type(datetime.datetime)):  # type: ignore[misc]
    """Whatever is a datetime is one of ours too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__mro__[1])


def _calendar(home: int, by: datetime.timedelta) -> type:
    """A stand-in for datetime.datetime, whose results are plain ones."""
    real = datetime.datetime

    def ahead(now: datetime.datetime) -> datetime.datetime:
        return now + by if threading.get_ident() == home else now

    class Ahead(real, metaclass=_Kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> datetime.datetime:  # type: ignore[misc]
            return real(*args, **kwargs)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return ahead(real.now(tz))

        @classmethod
        def today(cls) -> datetime.datetime:
            return ahead(real.today())

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return ahead(real.now(datetime.UTC).replace(tzinfo=None))

    return Ahead


def _names(replacements: dict[int, Any]) -> list[tuple[dict, str, Any]]:
    """Every module's global that is one of the clocks, as (globals, name, clock). Modules that only keep time are left out."""
    spaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _ASIDE and hasattr(module, "__dict__")
    ]
    return [(space, name, value) for space in spaces for name, value in list(space.items()) if id(value) in replacements]


def _random_states() -> list[tuple[Any, Callable[[Any], None], Callable[[int], None]]]:
    """(state, how to restore it, how to seed) of each generator that a process shares."""
    states: list[tuple[Any, Callable[[Any], None], Callable[[int], None]]] = [(random.getstate(), random.setstate, random.seed)]
    shared = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if shared is not None and shared.get_state(legacy=False)["bit_generator"] == "MT19937":  # another has no seed() of its own
        states.append((shared.get_state(), shared.set_state, shared.seed))
    return states
