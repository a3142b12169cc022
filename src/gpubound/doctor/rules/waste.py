"""Work that need not be done: the same bytes again, a copy of what nobody else holds."""

from collections.abc import Iterator

from ...words import readable
from ..claim import Claim, StallRule, estimate
from ..evidence import Evidence
from ..lines import by_line, calls_at, size, times
from ..prices import Prices

EVERY = 0.9  # a step: recorded steps may begin in the middle of one


def repeats(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "repeat"):
        if (count := times(evidence, rows)) >= EVERY:
            said = f"{readable(size(evidence, rows))} a step are on the device already"
            yield Claim("repeat", rows[0].place, count, said, calls_at(evidence, rows[0].place), waits=True)


def clones(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "clone"):
        if (count := times(evidence, rows)) >= EVERY:
            amount = size(evidence, rows)
            ms = copying(evidence, prices, count, amount)
            yield estimate("clone", rows[0].place, count, f"{readable(amount)} a step", ms)


def copying(evidence: Evidence, prices: Prices, count: float, amount: float) -> float | None:
    """An estimate for copies on the device: their launches, or their bytes at the rate of the tape's own copies."""
    works = evidence.tape.work if evidence.tape else ()
    rates = [work.bytes / (work.end - work.start) for work in works if work.kind == "d2d" and work.bytes >= 1 << 20]
    return max(prices.of_launches(count) or 0.0, amount / max(rates) / 1e3) if rates else None


RULES = (
    StallRule(
        "repeats",
        ("repeat",),
        "the same bytes uploaded every step",
        "every step",
        "an upload now and then may be meant",
        repeats,
    ),
    StallRule(
        "clones",
        ("clone",),
        "clones whose source nobody uses again",
        "every step",
        "one clone before the loop is free",
        clones,
    ),
)
