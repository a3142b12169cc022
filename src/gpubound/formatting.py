"""Formatters of numbers, sizes, durations, values and misspelt names for every message."""

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any


def readable(count: float) -> str:
    """Format a number of bytes.

    >>> readable(1_500_000)
    '1.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def byte_count(size: int | str) -> int | None:
    """A number of bytes as people write it; None for what is none.

    >>> byte_count("1.5 GB"), byte_count("2KiB"), byte_count(7), byte_count("much")
    (1500000000, 2048, 7, None)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _UNITS.get(found[2].lower()) if found else None
    return None if isinstance(size, bool) or found is None or unit is None else int(float(found[1]) * unit)


def quantity(value: float, unit: str = "") -> str:
    """Three digits and a letter for the magnitude.

    >>> quantity(192_400, " tok/s")
    '192k tok/s'
    """
    for magnitude, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= magnitude:
            return f"{value / magnitude:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def number(value: float, style: str) -> str:
    """`style` is a format such as '.3g' or '.1%', or 'si' for `quantity`."""
    return quantity(value) if style == "si" else format(value, style)


def in_words(seconds: float) -> str:
    """Seconds in the unit that reads best.

    >>> in_words(0.00123)
    '1.23 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def duration(seconds: float) -> str:
    """Format the duration of a run.

    >>> duration(7384), duration(83.4)
    ('2 h 3 min', '1 min 23 s')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(date: Any) -> str:
    """
    >>> moment("2026-11-22T03:54:58+00:00")
    '2026-11-22 03:54:58 UTC'
    """
    return str(date).replace("T", " ", 1).replace("+00:00", " UTC")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean syncs?' when a known name is similar to `name`, else a full stop."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def hint(name: Any, known: Iterable[str], others: str) -> str:
    """Return the end of a refusal of `name`: the most similar known name, else all of them after `others`.

    >>> hint("stpes", ["steps", "lr"], "the keys are"), hint("x", ["steps", "lr"], "the keys are")
    ("did you mean 'steps'?", 'the keys are steps, lr.')
    """
    names = list(known)
    close = difflib.get_close_matches(str(name)[:40], names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{others} {', '.join(names) or 'none'}."


def listed(given: Any) -> list[Any]:
    """Return a list of one name or of several. Anything else becomes a list of one, to be refused by its caller.

    >>> listed("sync"), listed(("sync", "h2d")), listed(3)
    (['sync'], ['sync', 'h2d'], [3])
    """
    return [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)


def shown(value: Any) -> str:
    """A value in a message, cut where it is long or deep: YAML's aliases can make a short file into an endless value."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother, brief.maxlong = 2, 80, 80, 80
    return brief.repr(value)
