"""Rules for work: what need not be done, the wrong device, launches, slow products, other processes, and the host's own time.

The host's own time is work on a line while the GPU is idle, and the loop that launches too slowly for the GPU. Both come from
the sampled stacks. What a line takes beyond its launches is work of the host that can be done elsewhere or earlier. The rest
belongs to the loop as a whole: no single line of it is at fault, and a CUDA graph launches all of it at once.
"""

from __future__ import annotations

import ast
import linecache
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from ...formatting import readable
from ...watch.events import LIBRARY, MASKING, Place, Site, owner
from ...watch.ledger import LedgerRow
from ..price.prices import Line, Measurements, Prices, line_of, named
from ..record.located import SWITCH_S
from ..record.tape import Span
from .remedies import acts, create_on_device, index_of, parsed
from .waits import StallCandidate, estimate, spans_of, writes_checkpoint

WORTH = 0.005  # of a step: below it the doctor calls anything harmless
EVERY = 0.9  # a step: recorded steps may begin in the middle of one


def repeats(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    copies = {line_of(rows[0].place): evidence.count_per_step(rows) for rows in evidence.by_line("h2d")}
    for rows in evidence.by_line("repeat"):
        if not index_of(rows[0]) and (count := evidence.count_per_step(rows)) >= EVERY:
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
# The loader's work is a wait for data, also where a script pads its batches itself; a step count is bookkeeping.
ELSEWHERE = ("torch/utils/data/", "torch/nn/utils/rnn.py", "torch/optim/")


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
            averaged = together and row.what in AVERAGING and row.place.site is not None and _over_parameters(row.place.site)
            several = inplace or averaged or row.what in NORMS
            if several and count >= MANY and not (row.place.node or row.place.via or placed):
                fix = f"one call for all of them: torch._foreach_{'norm' if row.what in NORMS else row.what}"
                text = f"{row.what} {count:.3g} times a step"
                yield estimate("launch", row.place, count, text, prices.of_launches(count), fix)
                break


AVERAGING = frozenset({"mul", "add", "lerp"})


def _over_parameters(site: Site) -> bool:
    """Return whether the innermost loop around a line goes over parameters."""
    loops = [n for n in ast.walk(parsed(site.file)) if isinstance(n, ast.For) and n.lineno < site.line <= (n.end_lineno or 0)]
    return bool(loops) and "parameters()" in ast.unparse(loops[-1].iter)


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


BOUND = 0.10  # of a step: below it a graph gains less than its fixed shapes cost in work
WORK = 0.02  # of a step: sampled times of lines differ by about as much from run to run
LAG = 1e3 * SWITCH_S  # ms; a sample is taken so late, so a line that lets go of the lock seems to take what ran before it
PER_LAUNCH = 4.0  # times the mean of the step: a line that takes less for each of its launches does little but launch
SHOWN = 4  # lines of a loop, or reasons, that are listed
OPTIMIZERS, ENGINE = "torch/optim/", "_engine_run_backward"


@dataclass(frozen=True)
class Loop:
    """A loop, and milliseconds a step in which the GPU is idle at each statement in it, without waits for a loader."""

    site: Site
    late: dict[Site, float]

    @property
    def ms(self) -> float:
        return sum(self.late.values())

    def holds(self, site: Site) -> bool:
        return site.file == self.site.file and self.site.line <= site.line <= self.site.end


@lru_cache(maxsize=256)
def _blocks(file: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the first and last lines of a file's loops, and of its functions; nothing for a file that cannot be parsed."""
    nodes = list(ast.walk(parsed(file)))
    loops = [(n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, (ast.For, ast.While, ast.AsyncFor))]
    functions = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    return loops, [(n.lineno, n.end_lineno or n.lineno) for n in functions]


def loop_around(site: Site) -> Site | None:
    """Return the innermost loop around a statement in the same function."""
    loops, functions = _blocks(site.file)
    function = max(((a, b) for a, b in functions if a <= site.line <= b), default=(0, 0))
    around = [(a, b) for a, b in loops if a <= site.line <= b and a >= function[0]]
    if not around:
        return None
    first, last = max(around)
    return Site(site.file, first, site.function, linecache.getline(site.file, first).strip(), last)


def loop_of(evidence: Measurements) -> Loop | None:
    """Return the innermost loop around the end of the sampled steps, from the stacks of the optimizer, or else of backward."""
    for is_end in (lambda site: OPTIMIZERS in site.file.replace("\\", "/"), lambda site: site.function == ENGINE):
        ends: Counter[Site] = Counter()
        for stack, count in evidence.samples.stacks.items():
            innermost = (around for site in stack.sites if (around := loop_around(site)))
            if stack.torch is not None and is_end(stack.torch) and (site := next(innermost, None)):
                ends[site] += count
        if ends:
            break
    else:
        return None
    loop = Loop(ends.most_common(1)[0][0], {})
    late: Counter[Site] = Counter()
    for stack, count in evidence.samples.late.items():
        inside = [each for each in stack.sites if loop.holds(each)]
        if inside and inside[-1].function == loop.site.function and not stack.loading:
            late[inside[-1]] += count
    return replace(loop, late={each: evidence.sampled_ms(count) for each, count in late.most_common()})


def other_loops(evidence: Measurements, loop: Loop) -> list[Loop]:
    """Return the loops that the function of the steps' loop has besides, such as one that makes a rollout, and in which the GPU
    is idle for BOUND of a step or more."""
    late: dict[Site, Counter[Site]] = defaultdict(Counter)
    for stack, count in evidence.samples.late.items():
        here = [site for site in stack.sites if site.file == loop.site.file and site.function == loop.site.function]
        site = loop_around(here[-1]) if here and not stack.loading and not loop.holds(here[-1]) else None
        if site is not None and not site.line <= loop.site.line <= site.end:
            late[site][here[-1]] += count
    loops = [Loop(site, {line: evidence.sampled_ms(n) for line, n in counts.most_common()}) for site, counts in late.items()]
    return sorted((each for each in loops if each.ms >= BOUND * (evidence.ms or 0.0)), key=lambda each: -each.ms)


def unseen_loops(evidence: Measurements) -> list[Site]:
    """Return the loops that run again and again next to the steps' loop, and in which no sample was taken: those of a rollout
    that is made every hundreds of steps, or of an evaluation. One that calls nothing is over before a sample is taken."""
    if (loop := loop_of(evidence)) is None:
        return []
    inner, (loops, functions) = loop.site, _blocks(loop.site.file)
    first, last = max(((a, b) for a, b in functions if a <= inner.line <= b), default=(0, inner.line + 10**6))
    around = [(a, b) for a, b in loops if first <= a < inner.line and inner.end <= b <= last]
    others = [(a, b) for a, b in loops if (b < inner.line or a > inner.end) and any(c < a and b <= d for c, d in around)]
    nodes = (n for n in ast.walk(parsed(inner.file)) if isinstance(n, (ast.For, ast.While, ast.AsyncFor)))
    calling = {n.lineno for n in nodes if any(isinstance(part, ast.Call) for each in n.body for part in ast.walk(each))}
    others = [(a, b) for a, b in others if a in calling]
    outer = [(a, b) for a, b in others if not any(c < a and b <= d for c, d in others)]
    seen = [site.line for stack in evidence.samples.stacks for site in stack.sites if site.file == inner.file]
    return [
        Site(inner.file, a, inner.function, linecache.getline(inner.file, a).strip(), b)
        for a, b in sorted(outer)
        if not any(a <= line <= b for line in seen)
    ]


def late_lines(evidence: Measurements, loop: Loop | None) -> list[tuple[Place, float]]:
    """Return lines with the milliseconds a step in which the GPU is idle while the host works there, the longest first.

    Torch's own code is left out: modules, autograd and optimizers launch, and the loader has a separate finding. A line is
    the user's, unless the loop is a library's.
    """
    library = loop is not None and owner(loop.site.file) is LIBRARY
    late: Counter[Place] = Counter()
    for stack, count in evidence.samples.late.items():
        if stack.sites and stack.torch is None and not stack.loading:
            site = stack.sites[0] if library else stack.user or stack.sites[0]
            late[Place(site)] += count
    return [(place, evidence.sampled_ms(count)) for place, count in late.most_common()]


def work(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    """Yield lines whose work keeps the GPU waiting, such as the making of a batch from an array."""
    loop = loop_of(evidence)
    library = loop is not None and owner(loop.site.file) is LIBRARY
    launches: dict[Line | None, float] = defaultdict(float)  # a step, by line, as in late_lines
    for row in evidence.rows:
        if row.kind == "launch":
            launches[line_of(Place(row.place.line if library else row.place.site))] += row.count / max(evidence.steps, 1)
    every = evidence.sampled_ms(sum(evidence.samples.late.values())) / max(sum(launches.values()), 1)
    named = {line_of(place) for place, _ in spans_of(evidence, "data").values()}
    named |= {line_of(rows[0].place) for rows, _ in computing(evidence)}
    works: dict[Place, float] = {}
    for place, late in late_lines(evidence, loop):
        launching = launches[line_of(place)] * max(prices.pace or 0.0, every)
        if line_of(place) in named or late < PER_LAUNCH * launching:
            continue
        if (prices.share(late - launching - LAG) or 0.0) >= WORK:
            works[place] = late - launching
    parts: dict[Place, list[Place]] = defaultdict(list)  # of a line: those that it calls, one cause with it
    for place in works:
        parts[_outermost(evidence, place, works)].append(place)
    for place, inner in parts.items():
        ms = sum(works[each] for each in inner)
        within = ", ".join(f"{works[each]:.3g} ms in {each.site.at}" for each in inner if each != place and each.site)
        text = f"the GPU is idle for {ms:.3g} ms a step while the host is in this line" + (f" ({within})" if within else "")
        fix = ENVIRONMENTS if place.site is not None and acts(place.site) else ""
        yield estimate("host_work", place, 1, text, ms, fix)


def _outermost(evidence: Measurements, place: Place, works: Collection[Place]) -> Place:
    """Return the outermost of these lines that is on all stacks of a line in which the GPU is idle: a caller, or itself."""
    stacks = [stack.sites for stack in evidence.samples.late if place.site in stack.sites]
    common = [site for site in stacks[0] if all(site in stack for stack in stacks)] if stacks else []
    callers = common[common.index(place.site) :] if place.site in common else []
    return next((each for site in reversed(callers) for each in works if each.site == site), place)


def launch_bound(evidence: Measurements, prices: Prices) -> Iterator[StallCandidate]:
    """Yield the host's time that is left when it never stalls. A graph costs one launch."""
    ceiling, alone = prices.ceiling, prices.launch_free
    if ceiling is None or alone is None or prices.step_ms is None:
        return
    if ceiling - alone < BOUND * prices.step_ms:
        return
    launches = sum(call.kind == "launch" for call in evidence.tape.calls) / evidence.taped_steps
    loop, place = loop_of(evidence), busiest(evidence, lambda row: row.place.via and OPTIMIZERS in row.place.via.file)
    site = loop.site if loop is not None else loop_around(place.site) if place.site is not None else None
    others = other_loops(evidence, loop) if loop is not None else []
    every = evidence.sampled_ms(sum(count for stack, count in evidence.samples.late.items() if not stack.loading))
    left = 1.0
    for other in others:
        share = other.ms / every
        left -= share
        text = f"some {share * launches:.0f} of {launches:.0f} launches a step, by samples{_idle_at(other)}"
        yield StallCandidate(
            "launch_bound", Place(other.site), share * launches, text, ms=share * (ceiling - alone), certainty="estimate",
            fix=HOST_ELSEWHERE,
        )  # fmt: skip
    text = f"{left * launches:.0f} launches a step; as a graph it would take the device's {alone:.3g} ms"
    reasons = in_the_way(evidence, site) if site is not None else []
    yield StallCandidate(
        "launch_bound",
        Place(site) if site is not None else place,
        left * launches,
        text + (_idle_at(loop) if loop is not None else ""),
        ms=left * (ceiling - alone),
        certainty="estimate" if others else "replayed",
        fix=CAPTURE + (f"; first change {', '.join(reasons)}" if reasons else ""),
    )


def _idle_at(loop: Loop) -> str:
    parts = [f"line {site.line} {ms:.3g} ms ({site.code})" for site, ms in list(loop.late.items())[:SHOWN]]
    return f". The GPU is idle while the host is in {', '.join(parts)}" if parts else ""


ENVIRONMENTS = "step environments in other processes (gymnasium.vector.AsyncVectorEnv), or take ones that run on the device"
HOST_ELSEWHERE = (
    "do more in each pass of this loop (a larger batch, more environments), or capture what it launches (gb.capture)"
)
CAPTURE = "let gb.TrainStep make the step, as one CUDA graph (gpubound fix writes it for a plain loop)"


def in_the_way(evidence: Measurements, loop: Site) -> list[str]:
    """Return what a captured step could not hold: reads in every step, shapes from values, and work of the CPU."""
    reasons: dict[int, str] = {}
    for row in evidence.rows:
        site = row.place.site
        often = row.count >= EVERY * evidence.steps  # what is printed rarely stands outside of the captured step
        if (
            site is None
            or site.file != loop.file
            or not loop.line <= site.line <= loop.end
            or not often
            or writes_checkpoint(row)
        ):
            continue
        if reason := _reason(row):
            reasons.setdefault(site.line, f"line {site.line}, which {reason}")
    return [reasons[line] for line in sorted(reasons)][:SHOWN]


def _reason(row: LedgerRow) -> str:
    if row.what == MASKING:
        return "selects by a mask, so that sizes depend on values"
    if row.kind in ("sync", "d2h"):
        return "reads the GPU"
    return "computes on the CPU" if row.kind == "cpu_op" else ""
