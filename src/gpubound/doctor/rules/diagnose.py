"""From measurements to a verdict: the candidates of every rule are priced and ranked; those without a cost are harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

from ...watch.ledger import TOTALS
from ..finding import GPU_TIME, KINDS, Finding, Verdict
from ..price.prices import Line, Measurements, Prices, line_of
from . import compute, waits
from .remedies import ACTED, RARE
from .waits import MEMORY_KINDS, StallCandidate

Rule = Callable[[Measurements, Prices], Iterable[StallCandidate]]

# Each rule, and the kinds of its findings. A call belongs to the first rule that claims it, so the more specific ones come
# first. docs/doctor-how.md has a table of the rules with their thresholds.
RULES: dict[Rule, tuple[str, ...]] = {
    waits.checkpoints: ("checkpoint",),
    waits.data: ("data",),
    waits.collections: ("gc",),
    waits.compilations: ("compile",),
    waits.driver_calls: ("alloc", "free", "pin", "retry"),
    compute.repeats: ("repeat",),
    compute.clones: ("clone",),
    compute.conversions: ("noop",),
    waits.copies: ("h2d", "d2h", "pageable"),
    waits.reads: ("sync",),
    compute.cpu_ops: ("cpu_op",),
    compute.fallbacks: ("fallback",),
    compute.optimizer: ("optimizer",),
    compute.zeros: ("zero_grad",),
    compute.loops: ("launch",),
    compute.work: ("host_work",),
    compute.launch_bound: ("launch_bound",),
    compute.products: ("precision",),
    compute.attention: ("attention",),
    compute.communication: ("comm",),
    compute.profiler: ("profiler",),
}

UNSEEN = "a loop beside that of the steps, which no measured step ran: its time is in no number"
HARMLESS = 0.005  # of a step: two timings of the same step differ by as much


def diagnose(evidence: Measurements, rules: Iterable[Rule] = tuple(RULES)) -> Verdict:
    prices = Prices(evidence)
    claims = _distinct(claim for rule in rules for claim in rule(evidence, prices))
    priced = _adding_up([(claim, _priced(claim, evidence, prices)) for claim in claims], prices)
    harmless = [pair for pair in priced if _is_small(pair[1], prices)]
    costly = [pair for pair in priced if pair not in harmless]
    costly.sort(
        key=lambda pair: (pair[1].ms is None, -(pair[1].ms or 0.0), line_of(pair[0].place) in evidence.once, -pair[1].count)
    )
    absent = ({"prices": prices.refused} if prices.refused else {}) | dict(evidence.absent)  # a dry run knows better why
    absent |= {f"{loop.at}, {loop.code}": UNSEEN for loop in compute.unseen_loops(evidence)}
    return Verdict(
        script=evidence.script,
        machine={"device": evidence.device} | {name: fact for name, fact in evidence.about.items() if isinstance(fact, str)},
        step_ms=prices.step_ms,
        bar=prices.shares,
        ceiling_ms=prices.ceiling,
        device_ms=prices.launch_free,
        findings=[finding for _, finding in costly],
        together_ms=_together(costly, prices),
        harmless=[finding for _, finding in harmless],
        unlocated=_unlocated(evidence, prices),
        phases=dict(evidence.phases),
        absent=absent,
        distortion=prices.distortion,
        counts=_counts(evidence),
        step=evidence.step,
        period=evidence.period,
        plain_ms=evidence.plain_ms,
        timed_ms=evidence.timed_ms or (median(evidence.step_ms) if evidence.step_ms else None),
        spread=evidence.spread,
        rare=dict(evidence.rare),
        loader=_loader(evidence, [finding for _, finding in costly]),
    )


def _distinct(claims: Iterable[StallCandidate]) -> list[StallCandidate]:
    """Assign each call and span to its first claim. CPU work on the line of a copy is part of it.

    A wait whose line has a claim already is a duplicate; a read on the line of a copy is added to it, because the tape has the
    line of a call, not the expression.
    """
    calls: set[int] = set()
    spans: set[int] = set()
    lines = dict[Line, int]()  # of waits: which of the kept ones has it
    distinct = list[StallCandidate]()
    for claim in claims:
        mine = replace(claim, calls=claim.calls - calls, spans=claim.spans - spans)
        line = line_of(claim.place)
        first = lines.get(line) if claim.waits and line is not None else None
        if claim.kind in ("cpu_op", "host_work") and line in lines and distinct[lines[line]].fix != ACTED:
            continue  # the host prepares what this line copies; what an environment does with an action is other work
        if first is not None and claim.kind == "sync":
            distinct[first] = replace(distinct[first], evidence=f"{distinct[first].evidence}; the line also {claim.evidence}")
        if first is not None or (claim.waits and claim.calls and not mine.calls):
            continue
        calls |= mine.calls
        spans |= mine.spans
        if claim.waits and line is not None:
            lines[line] = len(distinct)
        distinct.append(mine)
    return distinct


def _priced(claim: StallCandidate, evidence: Measurements, prices: Prices) -> Finding:
    ms, certainty = claim.ms, claim.certainty
    if ms is None:
        ms, certainty = prices.saved(claim.calls, claim.spans)
    if ms is None and claim.waits and prices.replay is not None:  # its waits are among those without a line
        most, certainty = prices.saved(_without_line(evidence))
        small = most is None or (prices.share(most) or 0.0) < HARMLESS
        ms, certainty = ((most or 0.0), "replayed") if small else (None, "counted")
    place, fix = claim.place, claim.fix or KINDS[claim.kind].remedy
    return Finding(claim.kind, place.site, place.via, place.node, place.built, claim.count, ms, certainty, claim.evidence, fix)


def _loader(evidence: Measurements, findings: Iterable[Finding]) -> dict[str, float]:
    """Return what a DataLoader needs for a step, if steps wait for it: then its workers do nothing else."""
    if evidence.ms is None or evidence.loading_ms is None or all(finding.kind != "data" for finding in findings):
        return {}
    making = evidence.workers * max(evidence.ms - evidence.starting_ms, 0.0)
    starting = {"starting": evidence.starting_ms} if evidence.starting_ms else {}
    return {"workers": evidence.workers, "ms": making or evidence.loading_ms} | starting


HOST_TIME = frozenset({"cpu_op", "host_work", "launch_bound"})  # kinds that are the host's own time, not a wait


def _adding_up(pairs: list[tuple[StallCandidate, Finding]], prices: Prices) -> list[tuple[StallCandidate, Finding]]:
    """Let the host's work and its launching share what a step without stalls takes more than the device alone: they are sampled
    and replayed, and would not add up to the step otherwise."""
    if prices.launch_free is None or prices.step_ms is None:
        return pairs
    stalls = [pair for pair in pairs if pair[1].kind not in GPU_TIME | HOST_TIME and not _is_small(pair[1], prices)]
    left = max(prices.step_ms - prices.launch_free - (_together(stalls, prices) or 0.0), 0.0)
    works = sum(finding.ms or 0.0 for _, finding in pairs if finding.kind in HOST_TIME - {"launch_bound"})
    share = min(left / works, 1.0) if works else 1.0
    launching = sum(finding.ms or 0.0 for _, finding in pairs if finding.kind == "launch_bound")
    rest = min((left - share * works) / launching, 1.0) if launching else 1.0
    result = []
    for claim, finding in pairs:
        if finding.kind in HOST_TIME and finding.ms is not None:
            ms = (rest if finding.kind == "launch_bound" else share) * finding.ms
            claim, finding = replace(claim, ms=ms), replace(finding, ms=ms)
        result.append((claim, finding))
    return result


def _is_small(finding: Finding, prices: Prices) -> bool:
    """Return whether a finding costs nothing that matters: by its price, or without prices because it is shown rarely."""
    share = prices.share(finding.ms)
    return finding.fix == RARE if share is None else share < HARMLESS


def _together(pairs: list[tuple[StallCandidate, Finding]], prices: Prices) -> float | None:
    """Compute what a step would save without all of them: stalls by one replay, plus the estimates of the rest."""
    priced = [(claim, finding) for claim, finding in pairs if finding.ms is not None]
    if not priced or prices.step_ms is None:
        return None
    calls = [n for claim, _ in priced if claim.ms is None for n in claim.calls]
    spans = [n for claim, _ in priced if claim.ms is None for n in claim.spans]
    joint, _ = prices.saved(calls, spans)
    rest = sum(finding.ms or 0.0 for claim, finding in priced if claim.ms is not None)
    return min((joint or 0.0) + rest, prices.step_ms)


def _without_line(evidence: Measurements) -> frozenset[int]:
    """Waits inside steps without a known line; calls for memory are reported by their kind. After the last step the recorder
    itself waits."""
    if not evidence.tape.steps:
        return frozenset()
    (begin, _), (_, end) = evidence.tape.steps[0], evidence.tape.steps[-1]
    known = {n for n, place in evidence.located.items() if line_of(place)}
    waits = [n for n, call in enumerate(evidence.tape.calls) if call.waits and call.kind not in MEMORY_KINDS]
    return frozenset(n for n in waits if n not in known and begin <= evidence.tape.calls[n].start < end)


def _unlocated(evidence: Measurements, prices: Prices) -> list[str]:
    lost = _without_line(evidence)
    if not lost:
        return []
    calls = evidence.tape.calls
    names = ", ".join(sorted({calls[n].name for n in lost}))
    waits = sum(call.waits for call in calls)
    ms, _ = prices.saved(lost)
    cost = "" if ms is None else f": {ms:.2g} ms a step"
    return [f"{len(lost)} of {waits} waits have no line ({names}){cost}"]


def _counts(evidence: Measurements) -> dict[str, float]:
    """Return a step's totals, of the events that the ledger could count."""
    counts = {}
    if "syncs" in evidence.counted:
        kind, _ = TOTALS["syncs"]
        counts["syncs"] = evidence.count_per_step([row for row in evidence.rows if row.kind == kind])
    if "pageable_copies" in evidence.counted:
        counts["pageable_bytes"] = evidence.bytes_per_step([row for row in evidence.rows if row.pageable])
    return counts
