"""Reads of the device, and explicit waits for it."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from ...watch.events import MASKING, cause_of
from ...watch.ops import DOWN, UP
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..lines import by_line, calls_at, line_of, times
from ..prices import Prices
from ..tape import Span
from .saving import saves

MASKED = 0.9  # of what indexing by a mask takes, with its backward, which sorts and scatters; torch.where has passes, too


def look(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    masks = list({line_of(row.place) for row in evidence.rows if row.what == MASKING} - {None})
    for rows in by_line(evidence, "sync"):
        rows = [row for row in rows if row.what not in (UP, DOWN) and not saves(row)]
        if not rows:
            continue
        first = rows[0]
        count = times(evidence, rows)
        what = ", ".join(dict.fromkeys(row.what for row in rows))
        calls = calls_at(evidence, first.place)
        remedy = cause_of("sync", first.what, first.place.through).remedy
        claim = Claim("sync", first.place, count, f"waits in {what}", calls, fix=remedy, waits=True)
        if masks == [line_of(first.place)] and (ms := masking(evidence, prices)) is not None:
            claim = replace(claim, ms=ms, certainty="estimate")
        yield claim


def masking(evidence: Evidence, prices: Prices) -> float | None:
    """What a step would save without indexing by masks: its waits, and the kernels that gather and scatter what is chosen."""
    spans = evidence.tape.spans if evidence.tape else ()
    chosen = sorted((s.thread, s.start) for s in spans if s.name == "aten::nonzero")

    def masked(span: Span) -> bool:
        at = bisect_left(chosen, (span.thread, span.start))
        return at < len(chosen) and chosen[at] < (span.thread, span.end)

    every = [span for span in spans if span.name == "aten::index"]
    alone = bool(every) and all(masked(span) for span in every)  # or it is not known which backward is a mask's
    calls = prices.inside(lambda s: (s.name == "aten::index" and masked(s)) or (alone and s.name == "IndexBackward0"))
    return prices.without_work(calls, MASKED) if calls and prices.replay is not None else None


RULE = StallRule(
    "reads",
    ("sync",),
    "item, if t, print, masks, nonzero, clipping with checks, GradScaler, synchronize",
    "0.5 % of the step, by replay",
    "a wait beside a full queue is free",
    look,
)
