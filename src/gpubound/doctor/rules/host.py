"""Work on the CPU that belongs on the device, and slow paths."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

from ...watch.rows import LedgerRow
from ..claim import Claim, StallRule, estimate
from ..evidence import Evidence
from ..lines import by_line, times
from ..prices import Prices
from ..tape import Span
from .saving import saves
from .waste import EVERY

ELSEWHERE = ("torch/utils/data/", "torch/optim/")  # the loader's work is a wait for data; a step count is bookkeeping


def look(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    lines = [rows for rows in ([r for r in some if _own(r)] for some in by_line(evidence, "cpu_op")) if rows]
    if lines and idle(evidence):
        rows = max(lines, key=lambda rows: times(evidence, rows))
        count = sum(times(evidence, some) for some in lines)
        said = f"nothing ran on the device, and {count:.3g} ops a step ran on the CPU"
        yield Claim(
            "cpu_op", rows[0].place, count, said, fix="move model and batches to the device: model.to(device), x.to(device)"
        )
        return
    for rows in lines:
        if (count := times(evidence, rows)) >= EVERY:
            names = ", ".join(list(dict.fromkeys(row.what for row in rows))[:3])
            ms = waited(evidence, prices, rows)
            yield estimate("cpu_op", rows[0].place, count, f"{count:.3g} ops a step on the CPU: {names}", ms)


def idle(evidence: Evidence) -> bool:
    """Whether no work reached a device at all."""
    ran = any(row.kind in ("launch", "h2d", "d2h") for row in evidence.rows)
    return not ran and not (evidence.tape and evidence.tape.work)


def _own(row: LedgerRow) -> bool:
    via = row.place.via
    return row.place.site is not None and not saves(row) and not (via and any(name in via.file for name in ELSEWHERE))


def waited(evidence: Evidence, prices: Prices, rows: list[LedgerRow]) -> float | None:
    """The device's idle time in ops of these names that launched nothing, shared among the lines that use such an op."""
    if prices.bar is None or evidence.tape is None:
        return None
    starts = sorted((c.thread, c.start) for c in evidence.tape.calls if c.kind in ("launch", "copy", "graph"))

    def on_cpu(name: str, span: Span) -> bool:
        after = bisect_left(starts, (span.thread, span.start))
        return span.name == name and (after == len(starts) or starts[after] >= (span.thread, span.end))

    total = 0.0
    for name in {row.what for row in rows}:
        mine = sum(row.count for row in rows if row.what == name)
        every = sum(row.count for row in evidence.rows if row.what == name and row.kind == "cpu_op")
        total += (prices.idle_in(partial(on_cpu, f"aten::{name}")) or 0.0) * mine / every
    return total


def fallbacks(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    for rows in by_line(evidence, "fallback"):
        said = f"{rows[0].what}: {rows[0].detail}" if rows[0].detail else rows[0].what
        yield Claim("fallback", rows[0].place, times(evidence, rows), said)


RULES = (
    StallRule(
        "host",
        ("cpu_op",),
        "the model or tensors of a step on the CPU",
        "every step",
        "scalars and the loader's work are left out; an op now and then is bookkeeping",
        look,
    ),
    StallRule("fallbacks", ("fallback",), "slow paths that gpubound took", "one", "each has its reason", fallbacks),
)
