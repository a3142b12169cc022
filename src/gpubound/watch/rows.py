"""The rows of a ledger, what they add up to, and how they print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formatting import readable
from .source_line import Place, Site

if TYPE_CHECKING:
    from .ledger import Ledger

# Totals by name: which rows they add up, and what of each.
TOTALS: dict[str, tuple[str, str]] = {
    "syncs": ("sync", "count"),
    "h2d_copies": ("h2d", "count"),
    "h2d_bytes": ("h2d", "bytes"),
    "d2h_copies": ("d2h", "count"),
    "d2h_bytes": ("d2h", "bytes"),
    "pageable_copies": ("h2d d2h", "pageable"),
    "repeated_uploads": ("repeat", "count"),
    "dead_clones": ("clone", "count"),
    "launches": ("launch", "count"),
    "cpu_ops": ("cpu_op", "count"),
    "allocations": ("alloc", "count"),
    "frees": ("free", "count"),
    "alloc_retries": ("retry", "count"),
    "pinned_allocations": ("pin", "count"),
    "recompiles": ("compile", "count"),
    "gc_pauses": ("gc", "count"),
    "gc_ms": ("gc", "ms"),
    "fallbacks": ("fallback", "count"),
}


@dataclass
class LedgerRow:
    """All occurrences of one thing at one place. `kind` is a key of TOTALS' rows: sync, h2d, d2h, launch, ..."""

    kind: str
    what: str
    place: Place
    detail: str = ""
    count: int = 0
    bytes: int = 0
    ms: float = 0.0

    @property
    def pageable(self) -> int:
        return self.count if self.detail.startswith("pageable") else 0

    def as_dict(self) -> dict:
        place = self.place
        return {
            "kind": self.kind,
            "what": self.what,
            "detail": self.detail,
            "count": self.count,
            "bytes": self.bytes,
            "ms": round(self.ms, 3),
            "site": place.site.as_dict() if place.site else None,
            "via": place.via.in_package if place.via else "",
            "node": place.node,
            "built": place.built.as_dict() if place.built else None,
            "thread": place.thread,
        }

    def record(self) -> dict:
        """For a run's tape: what, how often, and the innermost line that is not torch's, without folders of this machine."""
        line = self.place.line or self.place.built
        known = {"kind": self.kind, "what": self.what, "detail": self.detail, "count": self.count, "bytes": self.bytes}
        known |= {"ms": round(self.ms, 3), "through": self.place.through}
        return known if line is None else known | line.portable.as_dict()

    @classmethod
    def of_record(cls, record: dict) -> LedgerRow:
        """Rebuild a row from the output of `record`."""
        known = {name: record[name] for name in ("file", "line", "function", "code") if name in record}
        place = Place(Site(**known, end=record["line"]) if known else None, through=record["through"])
        return cls(record["kind"], record["what"], place, record["detail"], record["count"], record["bytes"], record["ms"])


HEADS = ("kind", "what", "times", "amount", "where", "code")
LAUNCH_LINES = 12  # a step launches from hundreds of lines; the busiest tell the story
CODE = 72  # columns of source shown


def render(ledger: Ledger) -> str:
    steps = f"{ledger.steps} steps" if ledger.steps != 1 else "1 step"
    totals = ledger.totals
    some = [f"{name} {_total(value, ledger.steps)}" for name, value in totals.items() if value]
    lines = [f"ledger: {steps if ledger.steps else 'no steps marked'}", f"counted: {', '.join(some) or 'nothing'}"]
    if none := [name for name, value in totals.items() if not value]:
        lines.append(f"zero: {', '.join(none)}")
    if missing := [name for name in TOTALS if name not in totals]:
        lines.append(f"not counted: {', '.join(missing)}")
    launches = _by_line(row for row in ledger.rows if row.kind == "launch")
    shown = [row for row in ledger.rows if row.kind != "launch"] + launches[:LAUNCH_LINES]
    if shown:
        lines += ["", *_table(shown)]
    if len(launches) > LAUNCH_LINES:
        lines.append(f"... and {len(launches) - LAUNCH_LINES} more lines that launch")
    lines += ["", "sensors", *(f"  {sensor.name:<9}  {sensor.sees}" for sensor in ledger._running)]
    if blind := {name: what for name, what in ledger.sensors.items() if what}:
        lines += ["blind to", *(f"  {name:<9}  {what}" for name, what in blind.items())]
    if ledger.absent:
        lines += ["did not run", *(f"  {name:<9}  {why}" for name, why in ledger.absent.items())]
    return "\n".join(lines)


def offenders(ledger: Ledger, names: Iterable[str]) -> str:
    """The rows behind these totals."""
    picked = [row for row in ledger.rows if any(row.kind in TOTALS[n][0].split() and getattr(row, TOTALS[n][1]) for n in names)]
    return "\n".join(_table(picked))


def _by_line(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """One row a place, whatever was launched there."""
    by_place: dict[tuple, list[LedgerRow]] = {}
    for row in rows:
        by_place.setdefault((row.place.site or row.place.built, bool(row.place.node)), []).append(row)
    merged = []
    for (site, backward), same in by_place.items():
        names = list(dict.fromkeys(row.what for row in same))
        what = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        place = Place(None, node="nodes", built=site) if backward else Place(site)
        count = sum(row.count for row in same)
        merged.append(LedgerRow("launch", what, same[0].place if len(same) == 1 else place, count=count))
    return sorted(merged, key=lambda row: -row.count)


def _total(value: float, steps: int) -> str:
    return f"{value:g} ({value / steps:.3g} a step)" if steps > 1 else f"{value:g}"


def _table(rows: Iterable[LedgerRow]) -> list[str]:
    cells = [HEADS]
    notes: list[str] = [""]
    for row in rows:
        site = row.place.site or row.place.built
        what = f"{row.what} [{row.detail}]" if row.detail else row.what
        code = site.code if site else ""
        code = code if len(code) <= CODE else f"{code[: CODE - 4]} ..."
        cells.append((row.kind, what, str(row.count), _amount(row), str(site or "line unknown"), code))
        notes.append(_note(row.place))
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS) - 1)]
    lines = []
    for line, note in zip(cells, notes):
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[-1]]).rstrip())
        lines += [f"  {note}"] if note else []
    return lines


def _note(place: Place) -> str:
    parts = []
    if place.node and place.site is not None:
        parts.append(f"in backward of {place.node}" + (f", built at {place.built}: {place.built.code}" if place.built else ""))
    elif place.node:
        parts.append(f"in backward of {place.node}, which this line built" if place.built else f"in backward of {place.node}")
    if place.via:
        parts.append(f"via {place.via.in_package}")
    if place.thread and place.thread != "autograd":
        parts.append(f"on thread {place.thread}")
    return "; ".join(parts)


def _amount(row: LedgerRow) -> str:
    if row.kind == "gc":
        return f"{row.ms:.1f} ms"
    return readable(row.bytes) if row.bytes else ""
