"""Numbers, durations and settings as a person reads them."""

from typing import Any

DEPTH = 8  # of a setting within a setting; no recipe comes near, and a crafted file must not end the page


def quantity(value: float, unit: str = "") -> str:
    """Three digits and a letter for the size.

    >>> quantity(192_400, " tok/s")
    '192k tok/s'
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def number(value: float, style: str) -> str:
    """`style` is a format such as '.3g' or '.1%', or 'si' for `quantity`."""
    return quantity(value) if style == "si" else format(value, style)


def duration(seconds: float) -> str:
    """
    >>> duration(7384)
    '2 h 3 min'
    >>> duration(83.4)
    '1 min 23 s'
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


def settings(value: Any, depth: int = 0) -> str:
    """A setting as a reader would write it.

    >>> settings([{"name": "books", "data": ["a/", "b/"], "steps": 300}])
    'books: data a/ b/, steps 300'
    """
    if depth > DEPTH:
        return "…"
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {settings(what, depth + 1)}" for key, what in value.items() if key != "name")
        return f"{value['name']}: {inner}" if "name" in value else inner
    if isinstance(value, list | tuple):
        between = "; " if any(isinstance(part, dict) for part in value) else " "
        return between.join(settings(part, depth + 1) for part in value)
    return str(value)
