"""Rules for work that need not be done, work on the wrong device, launches, slow products, and other processes."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ...formatting import readable
from ...watch.events import Place
from ...watch.ledger import LedgerRow
from ..price.prices import Measurements, Prices, line_of, named
from ..record.tape import Span
from .remedies import create_on_device
from .waits import StallCandidate, estimate, writes_checkpoint

WORTH = 0.005  # of a step: below it the doctor calls anything harmless
EVERY = 0.9  # a step: recorded steps may begin in the middle of one


def repeats(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    copies = {line_of(rows[0].place): evidence.count_per_step(rows) for rows in evidence.by_line("h2d")}
    for rows in evidence.by_line("repeat"):
        if (count := evidence.count_per_step(rows)) >= EVERY:
            place = rows[0].place
            text = f"{readable(evidence.bytes_per_step(rows))} a step are on the device already"
            count = max(count, copies.get(line_of(place), 0.0))  # the first of these copies repeats nothing
            fix = create_on_device(site) if (site := place.site or place.built) else ""
            yield StallCandidate("repeat", place, count, text, evidence.calls_at(place), fix=fix, waits=True)


def clones(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    for rows in evidence.by_line("clone"):
        if rows[0].place.via is None and (count := evidence.count_per_step(rows)) >= EVERY:
            amount = evidence.bytes_per_step(rows)
            ms = copying(evidence, prices, count, amount)
            yield estimate("clone", rows[0].place, count, f"{readable(amount)} a step", ms)


def conversions(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    """Yield conversions that change nothing. They cost the host only, so they count only if the device waits for Python."""
    waited = prices.host * prices.bar.ms("dispatch") if prices.bar else 0.0
    for rows in evidence.by_line("noop"):
        took = sum(row.ms for row in rows) / max(evidence.steps, 1)
        ms = min(took, waited)
        if (count := evidence.count_per_step(rows)) >= EVERY and (prices.share(ms) or 0.0) >= WORTH:
            text = f"{rows[0].what} {count:.3g} times a step changes nothing, and takes the host {took:.2g} ms"
            yield estimate("noop", rows[0].place, count, text, ms)


def copying(evidence: Measurements, prices: Prices, count: float, amount: float) -> float | None:
    """Estimate the cost of copies on the device: their launches, or their bytes at the rate of the tape's other copies."""
    large = (work for work in evidence.tape.work if work.kind == "d2d" and work.bytes >= 1 << 20)
    rates = [work.bytes / (work.end - work.start) for work in large]
    return max(prices.of_launches(count) or 0.0, amount / max(rates) / 1e3) if rates else None


FEW_BYTES = 32  # of an op's largest tensor: numbers, such as the parameters of a distribution; unless there are MANY
ELSEWHERE = ("torch/utils/data/", "torch/optim/")  # the loader's work is a wait for data; a step count is bookkeeping


def cpu_ops(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    lines = [rows for rows in ([r for r in some if _own(r)] for some in evidence.by_line("cpu_op")) if rows]
    if lines and idle(evidence):
        rows = max(lines, key=lambda rows: evidence.count_per_step(rows))
        count = sum(evidence.count_per_step(some) for some in lines)
        text = f"nothing ran on the device, and {count:.3g} ops a step ran on the CPU"
        yield StallCandidate(
            "cpu_op", rows[0].place, count, text, fix="move model and batches to the device: model.to(device), x.to(device)"
        )
        return
    for rows, count in computing(evidence):
        names = ", ".join(list(dict.fromkeys(row.what for row in rows))[:3])
        ms = evidence.sampled_at(rows[0].place) if evidence.samples.total else waited(evidence, prices, rows)
        yield estimate("cpu_op", rows[0].place, count, f"{count:.3g} ops a step on the CPU: {names}", ms)


def computing(evidence: Measurements) -> Iterator[tuple[list[LedgerRow], float]]:
    """Yield the ops on the CPU of each line that has some in every step, and their number a step."""
    for some in evidence.by_line("cpu_op"):
        rows = [row for row in some if _own(row)]
        count, amount = evidence.count_per_step(rows), sum(row.bytes for row in rows)
        scarce = count < MANY and 0 < amount <= FEW_BYTES * sum(row.count for row in rows)
        if count >= EVERY and not scarce:
            yield rows, count


def idle(evidence: Measurements) -> bool:
    """Return whether no work reached a device at all."""
    ran = any(row.kind in ("launch", "h2d", "d2h") for row in evidence.rows)
    return not ran and not evidence.tape.work


def _own(row: LedgerRow) -> bool:
    via = row.place.via
    return (
        row.place.site is not None and not writes_checkpoint(row) and not (via and any(name in via.file for name in ELSEWHERE))
    )


def waited(evidence: Measurements, prices: Prices, rows: list[LedgerRow]) -> float | None:
    """Return the device's idle time in ops of these names that launched nothing, divided among the lines with such ops."""
    if prices.bar is None:
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


def fallbacks(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    for rows in evidence.by_line("fallback"):
        text = f"{rows[0].what}: {rows[0].detail}" if rows[0].detail else rows[0].what
        yield StallCandidate("fallback", rows[0].place, evidence.count_per_step(rows), text)


MANY = 16  # a step: a small model's parameters; few lines run one in-place op as often for another reason
PLACED = re.compile(r"\]\s*(?:,[^=()]*)?=[^=]")
FUSED = 0.55  # of AdamW without foreach, which passes over memory 21 times, fused 7. H200: 0.47 to 0.58 of tensors of 8M to 50M
FEW = 0.9  # of the host's time in an update by parameters; H200: 0.90 to 0.96 of 64 and of 400 small tensors
ADDED = 4.0  # passes over memory for one that fills with zeros: that one, and three to add a gradient to it
NORMS = frozenset({"linalg_vector_norm", "norm"})
ZEROS = frozenset({"_foreach_zero_", "zero_", "fill_"})
FUSIBLE = ("adam", "sgd", "adagrad")


def optimizer(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    for rows in evidence.by_line("launch"):
        mine = [row for row in rows if row.place.via and row.place.via.function.startswith("_single_tensor_")]
        if (count := evidence.count_per_step(mine)) >= MANY and (via := mine[0].place.via):
            ms = fused(evidence, prices)
            fix = "" if any(name in via.function for name in FUSIBLE) else "build the optimizer with foreach=True"
            yield estimate("optimizer", mine[0].place, count, f"{count:.3g} launches a step", ms, fix)


def fused(evidence: Measurements, prices: Prices) -> float | None:
    """Estimate what a fused update would save: the greater of its passes over memory and of its launches."""
    spans = [n for n, span in enumerate(evidence.tape.spans) if span.kind == "optimizer"]
    calls = prices.inside(lambda span: span.kind == "optimizer")
    work, (host, _) = prices.without_work(calls, FUSED, spans), prices.saved(calls, spans)
    return None if work is None or host is None else max(work, FEW * host)


def zeros(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    for rows in evidence.by_line("launch"):
        mine = [r for r in rows if r.what in ZEROS and r.place.via and r.place.via.function == "zero_grad"]
        if mine:
            ms = prices.without_work(prices.inside(named(f"aten::{mine[0].what}")), ADDED)
            yield estimate("zero_grad", mine[0].place, evidence.count_per_step(mine), "zero_grad(set_to_none=False)", ms)


def loops(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    for rows in evidence.by_line("launch"):
        for row in rows:
            together = hasattr(torch, f"_foreach_{row.what}")  # x[mask] = y, say, has no such form
            inplace = row.what.endswith("_") and not row.what.startswith("_") and together
            count = evidence.count_per_step([row])
            placed = (
                row.what == "copy_" and row.place.site is not None and PLACED.search(row.place.site.code)
            )  # x[i] = y, in time
            if (inplace or row.what in NORMS) and count >= MANY and not (row.place.node or row.place.via or placed):
                fix = f"one call for all of them: torch._foreach_{'norm' if row.what in NORMS else row.what}"
                text = f"{row.what} {count:.3g} times a step"
                yield estimate("launch", row.place, count, text, prices.of_launches(count), fix)
                break


SHARE = 0.05  # of a step: what it would gain is known to a factor alone
FP32 = re.compile("sgemm|f32f32_f32f32_f32")  # TF32's names have s1688gemm or f32f32_tf32f32
TF32_GAIN = 0.85  # H200: 0.87 of 4096 x 4096 x 4096 and 0.85 of 8192; 0.59 of 1024, which is mostly launch
UNALIGNED = re.compile("(f16|h[0-9]).*align[12](?![0-9])")
ALIGNED_GAIN = 0.75  # H200, beside 4096 x 4096 x 4096: 0.81 of 4097, 0.72 of 4098, 0.73 of 4100
PAD = "pad the sizes of weights and batches to multiples of 8"
SORTS = ((FP32, TF32_GAIN, "in fp32 without tensor cores", ""), (UNALIGNED, ALIGNED_GAIN, "of unaligned sizes", PAD))
OPS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
MATH = "_scaled_dot_product_attention_math"
SOFTMAX = frozenset({"_safe_softmax"})
MATH_GAIN = 1.9  # of its forward, for both ways: 1.85 to 2.05 on an H200, 512 to 2048 tokens, heads of 64 and 128


def busiest(evidence: Measurements, wanted: Callable[[LedgerRow], object]) -> Place:
    """Return the line with most of these launches."""
    lines = [[row for row in rows if wanted(row)] for rows in evidence.by_line("launch")]
    rows = max(lines, key=evidence.count_per_step, default=[])
    return rows[0].place if rows else Place()


def _forward_of(ops: frozenset[str]) -> Callable[[LedgerRow], bool]:
    """Return a predicate for launches by these ops outside of backward."""
    return lambda row: row.what in ops and not row.place.node


def products(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    tape, own = evidence.tape, None
    if any(MATH in span.name for span in tape.spans):
        own = line_of(busiest(evidence, _forward_of(SOFTMAX)))  # attention's own line
    for names, gain, sort, fix in SORTS:
        works = [work for work in tape.work if work.kind == "kernel" and names.search(work.name)]
        numbers = {work.correlation for work in works} - {0}
        ms = prices.without_work([n for n, call in enumerate(tape.calls) if call.correlation in numbers], gain)
        place = busiest(evidence, _forward_of(OPS))
        if (prices.share(ms) or 0.0) >= SHARE and (line_of(place) is None or line_of(place) != own):
            count = len(works) / evidence.taped_steps
            spent = sum(work.end - work.start for work in works) / evidence.taped_steps / 1e3
            text = f"{count:.3g} products a step {sort} take {spent:.3g} ms"
            yield estimate("precision", place, count, text, ms, fix)


def attention(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    spans = [n for n, span in enumerate(evidence.tape.spans) if MATH in span.name]
    if count := len(spans) / evidence.taped_steps:
        ms = prices.without_work(prices.inside(lambda span: MATH in span.name), MATH_GAIN, spans)
        place = busiest(evidence, _forward_of(SOFTMAX))
        yield estimate("attention", place, count, f"{count:.3g} calls a step write all scores to memory", ms)


EXPOSED = 5.0  # per cent of a step: the last bucket of gradients is never hidden
LATE = 3.0  # times the median: one rank came late, and the others waited inside the collective


def communication(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    bar = prices.bar
    if bar is None or (share := prices.shares["shares"]["comm"]) < EXPOSED:
        return
    lasted = sorted(work.end - work.start for work in evidence.tape.work if work.kind == "comm")
    text = f"{share:.0f} % of the step is communication alone"
    if lasted[-1] > LATE * lasted[len(lasted) // 2]:
        text += f"; the longest took {lasted[-1] / lasted[len(lasted) // 2]:.0f} times the median: a rank comes late"
    ms = prices.scale * bar.ms("comm")
    yield StallCandidate("comm", Place(), len(lasted) / bar.steps, text, ms=ms, certainty="measured")


def profiler(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    if evidence.about.get("profiler"):
        yield StallCandidate(
            "profiler", evidence.named_lines.get("profiler", Place()), 1, "the script itself records a profile"
        )
