"""A rule, and the candidate finding that it yields before it is priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...watch.source_line import Place
from ..price.measurements import Measurements
from ..price.prices import Prices


@dataclass(frozen=True)
class StallCandidate:
    """One thing at one place. Its price is what a step saves without `calls` and `spans`; or `ms`, where a rule knows it."""

    kind: str
    place: Place
    count: float  # a step
    evidence: str
    calls: frozenset[int] = frozenset()
    spans: frozenset[int] = frozenset()
    ms: float | None = None
    certainty: str = "counted"
    fix: str = ""  # empty: the remedy of its kind
    waits: bool = False  # it is made of waits: if none of them is located, they are among those that are not


@dataclass(frozen=True)
class StallRule:
    """`threshold` in the words of the table in docs/doctor-how.md, with `why`."""

    name: str
    kinds: tuple[str, ...]
    finds: str
    threshold: str
    why: str
    look: Callable[[Measurements, Prices], Iterable[StallCandidate]]


def estimate(kind: str, place: Place, count: float, evidence: str, ms: float | None, fix: str = "") -> StallCandidate:
    """A claim whose price is a rule's own; None: counted alone."""
    return StallCandidate(kind, place, count, evidence, ms=ms, certainty="counted" if ms is None else "estimate", fix=fix)
