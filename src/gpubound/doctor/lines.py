"""The evidence by lines of the user's source: rules speak of lines, a ledger's rows are finer."""

from __future__ import annotations

from ..watch.rows import LedgerRow
from ..watch.site import Place
from .evidence import Evidence

Line = tuple[str, int]  # a file and a line of it


def line_of(place: Place) -> Line | None:
    """The user's line; in backward, where there may be none, the line that built the node."""
    site = place.site or place.built
    return (site.file, site.line) if site else None


def by_line(evidence: Evidence, *kinds: str) -> list[list[LedgerRow]]:
    """The rows of these kinds, those of one line together, the most frequent first."""
    found: dict[Line | None, list[LedgerRow]] = {}
    for row in sorted(evidence.rows, key=lambda row: -row.count):
        if row.kind in kinds:
            found.setdefault(line_of(row.place), []).append(row)
    return list(found.values())


def times(evidence: Evidence, rows: list[LedgerRow]) -> float:
    """How often a step."""
    return sum(row.count for row in rows) / max(evidence.steps, 1)


def size(evidence: Evidence, rows: list[LedgerRow]) -> float:
    """Bytes a step."""
    return sum(row.bytes for row in rows) / max(evidence.steps, 1)


def calls_at(evidence: Evidence, place: Place) -> frozenset[int]:
    """The calls of the tape that this line made, as far as they are located."""
    line = line_of(place)
    return frozenset(n for n, there in evidence.located.items() if line is not None and line_of(there) == line)


def taped(evidence: Evidence) -> int:
    """How many steps the tape has."""
    return max(len(evidence.tape.steps), 1) if evidence.tape else 1
