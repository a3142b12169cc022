"""Rules for the host's own time: work on a line while the GPU is idle, and the loop that launches too slowly for the GPU.

Both come from the sampled stacks. What a line takes beyond its launches is work of the host that can be done elsewhere or
earlier. The rest belongs to the loop as a whole: no single line of it is at fault, and a CUDA graph launches all of it at once.
"""

from __future__ import annotations

import ast
import linecache
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ...watch.events import LIBRARY, MASKING, Place, Site, owner
from ...watch.ledger import LedgerRow
from ..price.prices import Line, Measurements, Prices, line_of
from ..record.located import SWITCH_S
from .compute import EVERY, busiest, computing
from .remedies import acts, parsed
from .waits import StallCandidate, estimate, spans_of, writes_checkpoint

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
    that is made every hundreds of steps, or of an evaluation."""
    if (loop := loop_of(evidence)) is None:
        return []
    inner, (loops, functions) = loop.site, _blocks(loop.site.file)
    first, last = max(((a, b) for a, b in functions if a <= inner.line <= b), default=(0, inner.line + 10**6))
    around = [(a, b) for a, b in loops if first <= a < inner.line and inner.end <= b <= last]
    beside = [(a, b) for a, b in loops if (b < inner.line or a > inner.end) and any(c < a and b <= d for c, d in around)]
    outer = [(a, b) for a, b in beside if not any(c < a and b <= d for c, d in beside)]
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
            fix=ELSEWHERE,
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
ELSEWHERE = "do more in each pass of this loop (a larger batch, more environments), or capture what it launches (gb.capture)"
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
