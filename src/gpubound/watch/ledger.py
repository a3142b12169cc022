"""`with watch() as ledger:` counts what makes a GPU wait for its host, each with the user's source line.

A ledger locates; it does not time. Its sensors slow the host down (a dispatch mode makes an op cost about 20 µs more), so
no duration in it would be worth printing, except a garbage collector's pause. It prints which sensors ran and what they are
blind to, and it refuses to vouch for a count that no sensor could make.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ..device import accelerator
from ..errors import BudgetError
from ..formatting import listed, nearest
from . import pretend
from .events import KINDS
from .op_mode import Calls, Dispatch, SimGpu
from .rows import TOTALS, LedgerRow, offenders, render
from .sensors import Allocator, Collector, Compiles, Fallbacks, GpuTrace, Kernels, Sensor, Triton
from .source_line import Origins, Place, here

# Started in this order and ended in reverse: what synchronizes when it stops (Kineto) must not be heard by what counts syncs.
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
            raise BudgetError(f"over budget: {text}.\n{offenders(self, over)}")

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
        return render(self)

    # What the sensors call.

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
        """Add to the row of this thing at this place: the caller's, unless another is given (`Place()` where it is lost)."""
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
