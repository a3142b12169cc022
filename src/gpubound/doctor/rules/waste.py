"""Work that need not be done: the same bytes again, a copy of what nobody else holds."""

from collections.abc import Iterator

from ...words import readable
from ..claim import Claim, StallRule, estimate
from ..evidence import Evidence
from ..lines import by_line, calls_at, size, times
from ..prices import Prices

WORTH = 0.005  # of a step: below it the doctor calls anything harmless
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


def conversions(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    """They cost the host alone. So they are named only where the device waits for Python, and where they are worth it."""
    waited = prices.host * prices.bar.ms("dispatch") if prices.bar else 0.0
    for rows in by_line(evidence, "noop"):
        took = sum(row.ms for row in rows) / max(evidence.steps, 1)
        ms = min(took, waited)
        if (count := times(evidence, rows)) >= EVERY and (prices.share(ms) or 0.0) >= WORTH:
            said = f"{rows[0].what} {count:.3g} times a step changes nothing, and takes the host {took:.2g} ms"
            yield estimate("noop", rows[0].place, count, said, ms)


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
    StallRule(
        "conversions",
        ("noop",),
        ".to() and its kin that change nothing, where the device waits for Python",
        "every step, and 0.5 % of it",
        "one takes the host a µs, a whole model's some ms; the device does nothing for it",
        conversions,
    ),
)
