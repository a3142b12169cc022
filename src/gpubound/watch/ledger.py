"""`with watch() as ledger:` counts what makes a GPU wait for its host, each with the user's source line.

A ledger locates; it does not time. Its sensors slow the host down (a dispatch mode makes an op cost about 20 µs more), so the
only duration in it is a garbage collector's pause. It prints which sensors ran and what they are blind to, and it raises for a
count that no running sensor makes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ..device import accelerator
from ..errors import BudgetError
from ..formatting import listed, nearest, readable
from . import pretend
from .events import KINDS, Origins, Place, Site, here
from .sensors import Allocator, Calls, Collector, Compiles, Dispatch, Fallbacks, GpuTrace, Kernels, Sensor, SimGpu, Triton

# Totals by name: the kinds of rows that they sum, and the field.
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
        """Return a dict for a run's log: the event, its counts, and the innermost line that is not torch's, without folders of
        this machine."""
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
LAUNCH_LINES = 12  # a step launches from hundreds of lines; the busiest are shown
CODE = 72  # columns of source shown


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
        amount = f"{row.ms:.1f} ms" if row.kind == "gc" else readable(row.bytes) if row.bytes else ""
        cells.append((row.kind, what, str(row.count), amount, str(site or "line unknown"), code))
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


# Started in this order and ended in reverse: a sensor that synchronizes when it stops (Kineto) must not be counted by others.
_STARTED = (Kernels, Allocator, Collector, Compiles, Fallbacks, Triton, Calls, SimGpu, Dispatch, GpuTrace)
SENSORS: dict[str, type[Sensor]] = {sensor.name: sensor for sensor in _STARTED}


class _Now(threading.local):
    """The state of this thread: the op that runs, and the number of Triton launches so far."""

    op = ""
    triton = 0


class Ledger:
    """Counts of what made the GPU wait for the host, with source lines. `watch` makes it; read it during the block or after."""

    def __init__(self, device: torch.device | None, gputrace: bool | None, launches: str, without: frozenset[str]):
        self.device, self.asked_gputrace, self.launches = device, gputrace, launches
        self.steps = 0
        self.origins = Origins()
        self._without = without
        self._rows: dict[tuple, LedgerRow] = {}
        self._lock = threading.RLock()  # a collection may start while a row is written, and be recorded itself
        self.now = _Now()
        self._running: list[Sensor] = []
        self.absent: dict[str, str] = {}
        """The sensors that did not run, and why."""

    def __enter__(self) -> Ledger:
        if self._running:
            raise ValueError("watch: this ledger was used already; call watch() again for a new one.")
        for sensor in (make(self) for make in SENSORS.values()):
            if why := "left out" if sensor.name in self._without else sensor.absent():
                self.absent[sensor.name] = why
            else:
                self._running.append(sensor)
        self.origins.home = threading.get_ident()
        with ExitStack() as ending:
            for sensor in self._running:
                sensor.start(ending)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._ending.close()

    def step(self) -> None:
        """Mark the end of a step. The table then shows counts per step."""
        self.steps += 1

    @property
    def rows(self) -> list[LedgerRow]:
        """All rows by kind, the most frequent first."""
        kinds = list(KINDS)
        with self._lock:
            return sorted(self._rows.values(), key=lambda row: (kinds.index(row.kind), -row.count, str(row.place.site)))

    @property
    def totals(self) -> dict[str, int | float]:
        """Sums by name. A name that no sensor could count is missing."""
        counted, rows = self.counted, self.rows
        return {
            name: round(sum(getattr(row, what) for row in rows if row.kind in kinds.split()), 3)
            for name, (kinds, what) in TOTALS.items()
            if name in counted
        }

    @property
    def counted(self) -> frozenset[str]:
        """The names of the totals that a running sensor counts."""
        return frozenset().union(*(sensor.counts for sensor in self._running))

    @property
    def sensors(self) -> dict[str, str]:
        """The sensors that ran, and what each cannot see."""
        return {sensor.name: sensor.blind for sensor in self._running}

    def assert_within(self, **limits: float) -> None:
        """Raise BudgetError with the offending lines if any total is above its limit, or could not be counted.

        >>> ledger.assert_within(syncs=0, h2d_bytes=0)  # doctest: +SKIP
        """
        check_limits("assert_within", limits)
        if not self._running and not self.absent:
            raise BudgetError("not counted: this ledger was never opened; write `with watch() as ledger:` around the steps.")
        totals = self.totals
        if unknown := [name for name in limits if name not in totals]:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.absent.items())
            raise BudgetError(
                f"not counted: {', '.join(unknown)}. A budget cannot pass on what no sensor saw. Run on a GPU or on the "
                f"pretend device (simgpu() of gpubound.watch.pretend). Sensors that did not run: {why or 'none'}."
            )
        if over := {name: limit for name, limit in limits.items() if totals[name] > limit}:
            text = ", ".join(f"{name} {totals[name]:g} (allowed {limit:g})" for name, limit in over.items())
            sums = [TOTALS[name] for name in over]
            rows = [row for row in self.rows if any(row.kind in names.split() and getattr(row, what) for names, what in sums)]
            raise BudgetError("\n".join([f"over budget: {text}.", *_table(rows)]))

    def as_dict(self) -> dict:
        """Everything as plain values, for JSON."""
        return {
            "version": 1,
            "steps": self.steps,
            "totals": self.totals,
            "per_step": {name: round(value / self.steps, 3) for name, value in self.totals.items()} if self.steps else None,
            "rows": [row.as_dict() for row in self.rows],
            "sensors": self.sensors,
            "absent": dict(self.absent),
        }

    def __str__(self) -> str:
        steps = f"{self.steps} steps" if self.steps != 1 else "1 step"
        totals = self.totals
        some = [f"{name} {_total(value, self.steps)}" for name, value in totals.items() if value]
        lines = [f"ledger: {steps if self.steps else 'no steps marked'}", f"counted: {', '.join(some) or 'nothing'}"]
        if none := [name for name, value in totals.items() if not value]:
            lines.append(f"zero: {', '.join(none)}")
        if missing := [name for name in TOTALS if name not in totals]:
            lines.append(f"not counted: {', '.join(missing)}")
        launches = _by_line(row for row in self.rows if row.kind == "launch")
        shown = [row for row in self.rows if row.kind != "launch"] + launches[:LAUNCH_LINES]
        if shown:
            lines += ["", *_table(shown)]
        if len(launches) > LAUNCH_LINES:
            lines.append(f"... and {len(launches) - LAUNCH_LINES} more lines that launch")
        lines += ["", "sensors", *(f"  {sensor.name:<9}  {sensor.sees}" for sensor in self._running)]
        if blind := {name: what for name, what in self.sensors.items() if what}:
            lines += ["blind to", *(f"  {name:<9}  {what}" for name, what in blind.items())]
        if self.absent:
            lines += ["did not run", *(f"  {name:<9}  {why}" for name, why in self.absent.items())]
        return "\n".join(lines)

    # Called by the sensors.

    @property
    def device_is_here(self) -> bool:
        """Return whether a real accelerator works here and is the requested one."""
        present, asked = accelerator(), self.device
        if present is None or present.type == pretend.NAME:
            return False
        return asked is None or (asked.type == present.type and (asked.index or 0) < torch.accelerator.device_count())

    def runs(self, name: str) -> bool:
        return name in self.sensors

    def wants(self, device: torch.device) -> bool:
        mine = self.device
        return mine is None or (mine.type == device.type and mine.index in (None, device.index))

    def wants_type(self, device_type: str) -> bool:
        return self.device is None or self.device.type == device_type

    def record(
        self, kind: str, what: str, count: int = 1, bytes: int = 0, ms: float = 0, detail: str = "", place: Place | None = None
    ) -> None:
        """Add to the row of this event at this place: the caller's, unless another is passed (`Place()` if it is not known)."""
        place = place or here(self.origins)
        with self._lock:
            row = self._rows.setdefault((kind, what, detail, place), LedgerRow(kind, what, place, detail))
            row.count += count
            row.bytes += bytes
            row.ms += ms


def check_limits(who: str, limits: dict[str, float]) -> None:
    if not limits:
        raise ValueError(f"{who}: got no limits, wanted at least one of {', '.join(TOTALS)}.")
    for name, limit in limits.items():
        if name not in TOTALS:
            raise ValueError(f"{who}: got {name!r}, wanted one of {', '.join(TOTALS)}{nearest(name, TOTALS)}")
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
            raise ValueError(f"{who}: {name}: got {limit!r}, wanted a number from 0 up; it is the most that may be counted.")


def watch(
    *,
    device: str | torch.device | None = None,
    gputrace: bool | None = None,
    launches: str = "ops",
    without: Iterable[str] = (),
) -> Ledger:
    """Count what makes the GPU wait for the host: `with watch() as ledger:`, then `print(ledger)`.

    device    count only what concerns this device ("cuda", "cuda:1", "simgpu"). None: every device but the CPU.
    gputrace  True: torch itself reports each sync on CUDA, in every thread, so that none is missed.
              None: only while another ledger does so. False: never.
    launches  "ops": count each dispatched device op and each Triton launch, with their lines.
              "kernels": count the driver's launch calls, through Kineto, without lines.
    without   names of sensors to leave out.
    """
    left_out = listed(without)
    for name in (name for name in left_out if name not in list(SENSORS)):
        raise ValueError(f"watch: without: got {name!r}, wanted sensors among {', '.join(SENSORS)}{nearest(name, SENSORS)}")
    if launches not in ("ops", "kernels"):
        raise ValueError(f"watch: launches: got {launches!r}, wanted 'ops' or 'kernels'.")
    if gputrace not in (True, False, None):
        raise ValueError(f"watch: gputrace: got {gputrace!r}, wanted True, False or None.")
    return Ledger(_device(device), gputrace, launches, frozenset(left_out))


def _device(spec: str | torch.device | None) -> torch.device | None:
    if spec is None:
        return None
    if str(spec).partition(":")[0] == pretend.NAME and not pretend.ready():
        raise ValueError(
            f"watch: device: got {str(spec)!r}, which is not made yet; call simgpu() of gpubound.watch.pretend first."
        )
    try:
        device = torch.device(spec)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"watch: device: got {spec!r}, wanted an accelerator such as 'cuda' or 'simgpu'.") from error
    if device.type in ("cpu", "meta"):
        raise ValueError(f"watch: device: got {str(spec)!r}, wanted an accelerator: the host cannot stall itself.")
    return device
