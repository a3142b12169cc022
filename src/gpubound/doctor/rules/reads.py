"""Reads of the device, and explicit waits for it."""

from collections.abc import Iterator

from ...watch.events import cause_of
from ...watch.ops import DOWN, UP
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..lines import by_line, calls_at, times
from ..prices import Prices
from .saving import saves


def look(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "sync"):
        rows = [row for row in rows if row.what not in (UP, DOWN) and not saves(row)]
        if not rows:
            continue
        first = rows[0]
        count = times(evidence, rows)
        what = ", ".join(dict.fromkeys(row.what for row in rows))
        calls = calls_at(evidence, first.place)
        remedy = cause_of("sync", first.what, first.place.through).remedy
        yield Claim("sync", first.place, count, f"waits in {what}", calls, fix=remedy, waits=True)


RULE = StallRule(
    "reads",
    ("sync",),
    "item, if t, print, masks, nonzero, clipping with checks, GradScaler, synchronize",
    "0.5 % of the step, by replay",
    "a wait beside a full queue is free",
    look,
)
