"""What an audit found: for each part ready, or the lines that stop it; as a table, and as plain values."""

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from ...device import label
from ...graph.operations import Hazard
from ...watch.site import Site

SHOWN = ("syncs", "h2d_copies", "d2h_copies", "allocations", "launches")  # of the ledger's totals, in the first lines
LESS = "Nothing was captured: there is no GPU here, so waits inside kernels and libraries stay unseen."


@dataclass(frozen=True)
class Obstacle:
    """One reason why no graph can hold a part, with what to write instead, and its line where that is known."""

    says: str
    line: Site | None = None

    @classmethod
    def of(cls, hazard: Hazard) -> "Obstacle":
        return cls(str(hazard), hazard.place.line)

    @property
    def key(self) -> str:
        """The same for the same reason in another layer, whose names and numbers differ. A file's line number counts."""
        if " of the replay is off by " in self.says:  # a part's difference is its holder's too, which may guess another cause
            return "replay"
        after = self.says.partition(": ")[2] or self.says
        return re.sub(r"(?<!\.py:)\b\d+", "*", self.says if self.line is not None else after)

    def as_dict(self) -> dict[str, Any]:
        return {"says": self.says, "line": self.line.as_dict() if self.line is not None else None}


@dataclass(frozen=True)
class PartReadiness:
    """One row: a part, and whether a graph can hold it."""

    name: str
    obstacles: list[Obstacle] = field(default_factory=list)
    inside: int = 0  # reasons that its parts have told
    within: str = ""  # the ready part whose graph holds this one
    holds: int = 0  # how many parts the graph of a ready one holds
    certificate: str = ""
    calls: int = 1  # of which the first was tried
    shared: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return not self.obstacles and not self.inside

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ready": self.ready,
            "obstacles": [obstacle.as_dict() for obstacle in self.obstacles],
            "stopped_inside": self.inside,
            "within": self.within,
            "certificate": self.certificate,
            "calls": self.calls,
            "not_copied": list(self.shared),
        }


@dataclass(frozen=True)
class Readiness:
    """What `gpubound.doctor.ready.ready` returns: `ready`, `captured`, the rows, and the ledger of one call."""

    name: str
    device: torch.device
    parts: list[PartReadiness]
    ledger: dict[str, Any] | None = None

    @property
    def ready(self) -> bool:
        """Nothing was found that stops a graph. Without `captured`, that is only what a CPU can tell."""
        return all(part.ready for part in self.parts)

    @property
    def captured(self) -> bool:
        """Whether there was a device on which graphs are captured."""
        return self.device.type == "cuda"

    @property
    def exit_code(self) -> int:
        return 1 if not self.ready else 0 if self.captured else 3

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "name": self.name,
            "device": str(self.device),
            "ready": self.ready,
            "captured": self.captured,
            "parts": [part.as_dict() for part in self.parts],
            "ledger": self.ledger,
        }

    def __str__(self) -> str:
        lines = [f"graph readiness of {self.name} on {label(self.device)}", *self._counted(), ""]
        stopped = [part for part in self.parts if part.obstacles]
        for names, part in _alike(stopped):
            lines.append(f"NOT READY  {names}")
            lines += [f"    {obstacle.says}." for obstacle in part.obstacles]
        waiting = [part for part in self.parts if part.inside and not part.obstacles]
        lines += [f"stopped by its parts  {names}" for names, _ in _alike(waiting)]
        lines += [f"ready      {names}{_remark(part)}" for names, part in _alike(self._outermost())]
        return "\n".join([*lines, "", self._verdict()])

    def _counted(self) -> list[str]:
        if self.ledger is None:
            return ["its call ended with an error; nothing inside was tried"]
        totals = self.ledger["totals"]
        if not self.captured:
            return ["one call: waits, copies and launches were not counted, for there is no device to watch"]
        return ["one call: " + ", ".join(f"{name} {totals[name]:g}" for name in SHOWN if name in totals)]

    def _outermost(self) -> list[PartReadiness]:
        """The ready parts, without those that a ready one outside of them holds."""
        return [part for part in self.parts if part.ready and not part.within]

    def _verdict(self) -> str:
        count, of = sum(part.ready for part in self.parts), len(self.parts)
        parts = "1 part" if of == 1 else f"{of} parts"
        if not self.ready:
            found = len({obstacle.key for part in self.parts for obstacle in part.obstacles})
            reasons = "1 reason" if found == 1 else f"{found} reasons"
            said = f"NOT READY: {reasons}; {count} of {parts} ready. What lies behind a reason is seen once it is mended."
        elif self.captured:
            said = f"READY: one graph holds all of it ({parts}), and replays on other inputs agree with eager calls."
        else:
            said = f"Nothing was found that stops a graph, in {parts}."
        return said if self.captured else f"{said} {LESS}"


def _remark(part: PartReadiness) -> str:
    times = f"  (called {part.calls} times; the first was tried)" if part.calls > 1 else ""
    holds = f"  with {part.holds} inside" if part.holds else ""
    shared = f"  (could not copy {', '.join(part.shared)}: calls changed the caller's own)" if part.shared else ""
    return f"{holds}{times}{shared}"


def _alike(parts: list[PartReadiness]) -> list[tuple[str, PartReadiness]]:
    """(names, the first) of rows that differ in a layer's number alone."""
    groups: dict[tuple, list[PartReadiness]] = {}
    for part in parts:
        key = (re.sub(r"\b\d+\b", "*", part.name), tuple(obstacle.key for obstacle in part.obstacles), _remark(part))
        groups.setdefault(key, []).append(part)
    return [(_names([part.name for part in same]), same[0]) for same in groups.values()]


def _names(names: list[str]) -> str:
    """One text for names that differ in numbers: model.layers.0-31.mlp."""
    pieces = [re.split(r"\b(\d+)\b", name) for name in names]
    columns = [list(dict.fromkeys(column)) for column in zip(*pieces)]
    return "".join(column[0] if len(column) == 1 else _ranges(sorted(map(int, column))) for column in columns)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as 0-2,5."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)
