"""Formatters of numbers, sizes, durations, values and misspelt names for every message."""

import difflib
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

PRINTABLE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""for str.translate: replacements of control characters in texts of others, which a terminal would obey"""


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
    """Parse a number of bytes such as "1.5 GB"; return None for other text.

    >>> byte_count("1.5 GB"), byte_count("2KiB"), byte_count(7), byte_count("much")
    (1500000000, 2048, 7, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _UNITS.get(match[2].lower()) if match else None
    return None if isinstance(size, bool) or match is None or unit is None else int(float(match[1]) * unit)


def quantity(value: float, unit: str = "") -> str:
    """Format a number with three digits and a letter for the magnitude.

    >>> quantity(192_400, " tok/s")
    '192k tok/s'
    """
    for magnitude, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= magnitude:
            return f"{value / magnitude:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def number(value: float, style: str) -> str:
    """Format a value in a style such as '.3g' or '.1%', or 'si' for `quantity`."""
    return quantity(value) if style == "si" else format(value, style)


def counted(count: int, noun: str) -> str:
    """Return the count and its noun.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def in_words(seconds: float) -> str:
    """Format seconds in a fitting unit.

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
    """Format an ISO date.

    >>> moment("2026-11-22T03:54:58+00:00")
    '2026-11-22 03:54:58 UTC'
    """
    return str(date).replace("T", " ", 1).replace("+00:00", " UTC")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean syncs?' when a known name is similar to `name`, else a full stop."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def hint(name: Any, known: Iterable[str], others: str) -> str:
    """Return the end of a refusal of `name`: the most similar known name, else all of them after `others`, which may also be a
    sentence that says where they are listed.

    >>> hint("stpes", ["steps", "lr"], "the keys are"), hint("x", ["steps", "lr"], "the keys are")
    ("did you mean 'steps'?", 'the keys are steps, lr.')
    >>> hint("x", ["steps", "lr"], "--help lists the keys.")
    '--help lists the keys.'
    """
    names = list(known)
    close = difflib.get_close_matches(str(name)[:40], names, n=1) or difflib.get_close_matches(
        str(name)[:40].lower(), names, n=1
    )
    if close:
        return f"did you mean {close[0]!r}?"
    return others if others.endswith(".") else f"{others} {', '.join(names) or 'none'}."


def unexpected(call: str, names: Iterable[str], known: Iterable[str]) -> TypeError:
    """Return the error of a call that was given keyword arguments of these names, which it does not take.

    >>> unexpected("f", ["stpes"], ["steps", "lr"])
    TypeError("f() got an unexpected keyword argument 'stpes'; did you mean 'steps'?")
    """
    name = min(names)
    return TypeError(f"{call}() got an unexpected keyword argument {name!r}; {hint(name, known, 'it takes')}")


def suggest_keywords(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls `call`, and whose refusal of an unknown keyword is `unexpected`. Python 3.13 adds a similar
    name to its own, and not what else there is."""

    @wraps(call)
    def suggesting(*arguments: Any, **keywords: Any) -> Any:
        try:
            return call(*arguments, **keywords)
        except TypeError:
            known = inspect.signature(call).parameters
            unknown = keywords.keys() - known.keys()
            if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                raise  # by the call's own code
        raise unexpected(name, unknown, [one for one in known if one not in ("self", "cls")])

    return suggesting


def listed(names: Any) -> list[Any]:
    """Return a list of one or several names. Another object becomes a list of one, which the caller refuses.

    >>> listed("sync"), listed(("sync", "h2d")), listed(3)
    (['sync'], ['sync', 'h2d'], [3])
    """
    return [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)


def shown(value: Any) -> str:
    """Return a value for a message, shortened: YAML's aliases can expand a short file without end."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother, brief.maxlong = 2, 80, 80, 80
    return brief.repr(value)
