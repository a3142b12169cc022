"""Figures of a run's log: the gauges, totals and warnings."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, median_low
from typing import Any, NamedTuple

from ..formatting import duration, moment, number, quantity, readable
from .chart import Axis
from .tape import RunTape

Record = dict[str, Any]
BLOCK_STEPS, BLOCK_S = 20, 20.0  # of a block of throughput: both at least, so that a short pause is no slow-down
RISE = 0.1  # of the loss, from the first to the last tenth of a run; noise is less
WORSE = 0.02  # of the held-out loss above its best; the choice of batches changes it by less than 1 %


class Gauge(NamedTuple):
    key: str
    title: str
    axis: Axis
    summed_up: str = "median"  # or "last"
    chart: str = ""  # key of the gauge whose chart it joins

    @property
    def label(self) -> str:
        """The row of a table; memory needs no aggregation in its name."""
        return self.title if self.key.startswith("memory") else f"{self.title}, {self.summed_up}"


SHARE, WHOLE_SHARE = Axis(".1%", low=0), Axis(".1%", low=0, high=1)
BYTES = Axis("si", low=0)

GAUGES = (
    Gauge("loss", "loss", Axis(".4g"), "last"),
    Gauge("held_out", "held-out loss", Axis(".4g"), "last", chart="loss"),
    Gauge("reward", "reward", Axis(".3g"), "last"),
    Gauge("eval_reward", "held-out reward", Axis(".3g"), "last", chart="reward"),
    Gauge("length", "tokens an answer", Axis(".3g", low=0), "last"),
    Gauge("entropy", "entropy of a token", Axis(".3g", low=0), "last"),
    Gauge("kl", "KL divergence from the reference", Axis(".3g", low=0), "last"),
    Gauge("gap", "log-probability, sampler against trainer", Axis(".2g", low=0)),
    Gauge("no_signal", "prompts without a signal", WHOLE_SHARE),
    Gauge("sampled_per_s", "tokens per second in sampling", Axis("si", low=0)),
    Gauge("sample_share", "time in sampling", WHOLE_SHARE),
    Gauge("reward_share", "time in rewards", WHOLE_SHARE, chart="sample_share"),
    Gauge("learn_share", "time in learning", WHOLE_SHARE, chart="sample_share"),
    Gauge("tokens_per_s", "tokens per second", Axis("si", low=0)),
    Gauge("mfu", "share of this machine's matrix rate", SHARE),
    Gauge("gpu_busy", "GPU busy", WHOLE_SHARE),
    Gauge("sm_active", "SMs at work", WHOLE_SHARE),
    Gauge("power_w", "power, W", Axis(".3g", low=0)),
    Gauge("host_lead_ms", "host lead over the GPU, ms", Axis(".3g", low=0)),
    Gauge("syncs", "host syncs per step", Axis("g", low=0)),
    Gauge("h2d_bytes", "bytes from the host per step", BYTES),
    Gauge("sums_share", "time in collectives", SHARE),
    Gauge("held_up_ms", "waiting for the slowest rank, ms", Axis(".3g", low=0)),
    Gauge("grad_norm", "gradient norm", Axis(".3g"), "last"),
    Gauge("lr", "learning rate", Axis(".2g", low=0), "last"),
    Gauge("memory_bytes", "peak memory, bytes", BYTES, "last"),
    Gauge("memory_allocated_bytes", "allocated memory, bytes", BYTES, "last", chart="memory_bytes"),
    Gauge("memory_reserved_bytes", "reserved memory, bytes", BYTES, "last", chart="memory_bytes"),
    Gauge("skipped", "skipped steps, not finite", Axis("g", low=0), "last"),
)


class Figures:
    """Figures of one run, from its log."""

    def __init__(self, tape: RunTape):
        self.about, self.records = tape.about, tape.steps()
        self.warnings = warnings(self.records)

    def points(self, key: str) -> list[tuple[int, float]]:
        return _series(self.records, key)

    def value(self, gauge: Gauge) -> float | None:
        """Return the gauge's last value or the median of the finite ones; None if it was not measured."""
        values = [value for _, value in self.points(gauge.key)]
        if not values or gauge.summed_up == "last":
            return values[-1] if values else None
        finite = [value for value in values if math.isfinite(value)]
        return median_low(finite) if finite else values[-1]

    @property
    def steps(self) -> int:
        """The number of steps taken: a record of step 0 is an evaluation before the first."""
        return sum(record["step"] > 0 for record in self.records)

    @property
    def tokens(self) -> int:
        return int(sum(count for _, count in self.points("tokens") if math.isfinite(count)))

    @property
    def seconds(self) -> float | None:
        """The training time of all starts together."""
        values = [seconds for _, seconds in self.points("elapsed_s") if math.isfinite(seconds)]
        return values[-1] if values else None

    @property
    def phases(self) -> list[tuple[int, str]]:
        """(first step, name) of each; none for a run without phases."""
        named = [(0, None), *((r["step"], r.get("phase") or "") for r in self.records)]
        begins = [(step, str(name)) for (_, before), (step, name) in pairwise(named) if name != before]
        return begins if any(name for _, name in begins) else []

    def facts(self) -> dict[str, str]:
        """Return start, command and duration."""
        starts = self.about.get("starts") or []
        rows = {"started": moment(starts[0]["date"]), "command": str(starts[-1]["command"])} if starts else {}
        if len(starts) > 1:
            rows["resumed"] = ", ".join(moment(start["date"]) for start in starts[1:])
        if self.seconds is not None:
            rows["trained for"] = duration(self.seconds)
        rows["steps"] = f"{self.steps:,}"
        rows |= {"tokens": f"{self.tokens:,}"} if self.tokens else {}
        return rows | {f"peak memory, {row['phase']}": _memory(row) for row in self.about.get("memory") or []}

    def gauges(self) -> dict[str, str]:
        values = {gauge: self.value(gauge) for gauge in GAUGES if gauge.key != "skipped"}
        rows = {gauge.label: number(value, gauge.axis.style) for gauge, value in values.items() if value is not None}
        count = sum(count for _, count in skipped(self.records))
        return rows | ({"skipped steps": f"{count:,}"} if count else {})

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers under their names in the log; values that are not finite are None."""
        starts = self.about.get("starts") or [{}]
        result = {"name": self.about.get("name"), "finished": self.about.get("finished") is True}
        result |= {"verdict": self.about.get("verdict")}
        result |= {"warnings": self.warnings, "started": starts[0].get("date"), "command": starts[-1].get("command")}
        result |= {"steps": self.steps, "tokens": self.tokens, "elapsed_s": self.seconds}
        values = {gauge.key: self.value(gauge) for gauge in GAUGES}
        result |= {key: value if math.isfinite(value) else None for key, value in values.items() if value is not None}
        return result | {"skipped": sum(count for _, count in skipped(self.records))}


def _memory(row: dict[str, Any]) -> str:
    predicted = f" (predicted {readable(row['predicted'])})" if row["predicted"] else ""
    return f"{readable(row['allocated'])} allocated, {readable(row['reserved'])} reserved{predicted}"


class SlowBlock(NamedTuple):
    """A block of steps that ran at half the speed of the fastest block before it, or slower."""

    first: int
    last: int
    tokens_per_s: float
    best: float  # tokens per second of the fastest earlier block

    def __str__(self) -> str:
        return f"tokens per second fell from {quantity(self.best)} to {quantity(self.tokens_per_s)}"


class Throughput:
    """Median tokens per second of each block of steps, fed record by record.

    A median leaves out evaluations, checkpoints and compilation in the first steps. A phase may have other data or
    another sequence length, so every phase is compared separately.
    """

    def __init__(self) -> None:
        self.slow: SlowBlock | None = None  # the newest block, if it was slow
        self.worst: SlowBlock | None = None
        self._phase: object = None
        self._best = 0.0
        self._steps: list[int] = []
        self._paces: list[float] = []
        self._seconds = 0.0

    def add(self, record: Record) -> bool:
        """Return True if this record completes a slow block that follows a fast one."""
        if record.get("phase") != self._phase:
            self._phase, self._best, self.slow = record.get("phase"), 0.0, None
            self._restart()
        pace = float(record.get("tokens_per_s") or math.nan)
        if not 0 < pace < math.inf:
            return False
        self._steps.append(record["step"])
        self._paces.append(pace)
        self._seconds += float(record.get("seconds") or record.get("tokens", pace) / pace)
        if len(self._paces) < BLOCK_STEPS or self._seconds < BLOCK_S:
            return False
        pace, before = median(self._paces), self.slow
        self.slow = SlowBlock(self._steps[0], self._steps[-1], pace, self._best) if pace <= 0.5 * self._best else None
        if self.slow and (self.worst is None or pace / self._best < self.worst.tokens_per_s / self.worst.best):
            self.worst = self.slow
        self._best = max(self._best, pace)
        self._restart()
        return before is None and self.slow is not None

    def _restart(self) -> None:
        self._steps, self._paces, self._seconds = [], [], 0.0


def warnings(records: Sequence[Record]) -> list[str]:
    """Return a sentence each for a run that diverged, slowed down, skipped steps, or trained on after its best step."""
    return [text for text in (_divergence(records), _slowdown(records), _skips(records), _overfit(records)) if text]


def _slowdown(records: Sequence[Record]) -> str | None:
    throughput = Throughput()
    for record in records:
        throughput.add(record)
    worst = throughput.worst
    return None if worst is None else f"{worst} (steps {worst.first:,} to {worst.last:,})"


def _divergence(records: Sequence[Record]) -> str | None:
    losses = _series(records, "loss")
    if losses and not math.isfinite(losses[-1][1]):
        last = next((step for step, loss in reversed(losses) if math.isfinite(loss)), None)
        return "the loss was never finite" if last is None else f"the loss was not finite after step {last:,}"
    losses = _of_last_phase(records, "loss")
    tenth = len(losses) // 10
    if tenth < 2:  # a rise of so few steps is noise
        return None
    begin, end = (median(loss for _, loss in part) for part in (losses[:tenth], losses[-tenth:]))
    return f"the loss rose from {begin:.3f} to {end:.3f}" if end > begin + RISE * abs(begin) else None


def _skips(records: Sequence[Record]) -> str | None:
    skips = skipped(records)
    if not skips:
        return None
    count = sum(count for _, count in skips)
    steps = f"step {skips[0][0]:,} was skipped" if count == 1 else f"{count:,} of {len(records):,} steps were skipped"
    since = "" if count == 1 else f", the first at step {skips[0][0]:,}"
    return f"{steps}{since}: the loss or the gradient was not finite"


def _overfit(records: Sequence[Record]) -> str | None:
    losses = _of_last_phase(records, "held_out")
    if not losses:
        return None
    (step, best), (_, last) = min(losses, key=lambda point: point[1]), losses[-1]
    if last <= best + WORSE * abs(best):
        return None
    return f"the held-out loss was lowest at step {step:,} ({best:.3f}) and {last:.3f} at the end"


def skipped(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Return (step, steps skipped since the previous record). The log counts from 0 in each phase and start."""
    counted = [(r["step"], float(r["skipped"]), r.get("phase")) for r in records if r.get("skipped") is not None]
    counts = [(0, 0, None), *((step, int(count), phase) for step, count, phase in counted if math.isfinite(count))]
    new = [(step, b - a if was == phase and b >= a else b) for (_, a, was), (step, b, phase) in pairwise(counts)]
    return [(step, count) for step, count in new if count]


def _series(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    return [(r["step"], float(r[key])) for r in records if r.get(key) is not None]


def _of_last_phase(records: Sequence[Record], key: str) -> list[tuple[int, float]]:
    last = [r for r in records if r.get("phase") == records[-1].get("phase")]
    return [(step, value) for step, value in _series(last, key) if math.isfinite(value)]
