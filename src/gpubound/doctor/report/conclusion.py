"""The verdict in a sentence or two, which every report begins with."""

from __future__ import annotations

from ..finding import GPU_TIME, KINDS, Finding, Verdict
from ..rules.diagnose import HARMLESS
from .words import kind_of, milliseconds, rounded, shares, unnamed

# Why a line costs time, where it is not "it", followed by the words of KINDS.
REASONS = {
    "data": "the loader cannot keep up",
    "sync": "the host waits there for the GPU",
    "h2d": "the host waits there for a copy to the GPU",
    "d2h": "the host waits there for a read from the GPU",
    "launch": "it launches one kernel for each of many tensors",
    "launch_bound": "the host launches work more slowly than the GPU does it",
}
EVIDENT = frozenset({"precision", "cpu_op"})  # their evidence has the reason
OUTCOMES = {"launch_bound": "Captured in a CUDA graph", "precision": "With the fix"}


def conclusion(verdict: Verdict) -> str:
    """Return the largest loss, its cause, and the step without it; or how many findings there are without prices."""
    first = verdict.findings[0] if verdict.findings else None
    dearest = (first.ms or 0.0) if first else 0.0
    if (left := unnamed(verdict)) is not None and left > dearest:
        return _unnamed(verdict, left)
    if first is None:
        return _nothing(verdict)
    return _priced(first, first.ms, verdict.step_ms) if first.ms and verdict.step_ms else _counted(first, verdict)


def _priced(finding: Finding, ms: float, step_ms: float) -> str:
    share, work = _percent(ms / step_ms), ", as work of the GPU" if finding.kind in GPU_TIME else ""
    if subject := _subject(finding):
        cost = f"{subject} costs {share} of a step{work}: {_reason(finding)}."
    else:
        cost = f"{share} of a step goes to {kind_of(finding)}, on no single line{work}: {_reason(finding)}."
    left, step = milliseconds(max(step_ms - ms, 0.0)), milliseconds(step_ms)
    return f"{cost} {OUTCOMES.get(finding.kind, 'Without it')} a step takes about {left} instead of {step.removesuffix(' ms')}."


def _counted(finding: Finding, verdict: Verdict) -> str:
    subject = _subject(finding) or f"{kind_of(finding).capitalize()}, on no single line"
    count = "" if finding.kind in EVIDENT else f", {finding.count:.3g} {'time' if finding.count == 1 else 'times'} a step"
    others = len(verdict.findings) - 1
    more = f" {others} more {'finding follows' if others == 1 else 'findings follow'}." if others else ""
    return f"{subject}{count}: {_reason(finding)}.{more} {'They are' if others else 'It is'} counted, not priced."


def _unnamed(verdict: Verdict, left: float) -> str:
    assert verdict.step_ms is not None
    part = rounded(shares(verdict))["host_late"]
    which = (
        "no finding names its cause" if not verdict.findings else f"no finding names the cause of {milliseconds(left)} of it"
    )
    late = milliseconds(verdict.step_ms * shares(verdict)["host_late"] / 100)
    return f"The GPU waits for the host in {part:.0f} % of a step ({late}), and {which}."


def _nothing(verdict: Verdict) -> str:
    parts = rounded(shares(verdict))
    if verdict.ceiling_ms is not None and "busy" in parts:
        return f"No stall costs {HARMLESS:.1%} of a step or more; the GPU is busy in {parts['busy']:.0f} % of it."
    if verdict.counts:
        return "No finding in the steps that were watched."
    return "No finding; see below for what was not measured." if verdict.absent else "No finding."


def _subject(finding: Finding) -> str:
    """Return the line in words; empty for a finding without one."""
    site = finding.line
    if finding.kind == "launch_bound":  # the whole loop, not its line
        loop = f" in lines {site.line} to {site.end} of {site.at.rpartition(':')[0]}" if site and site.end > site.line else ""
        return f"Launching{loop}"
    return f"Line {site.line} of {site.at.rpartition(':')[0]}" if site else ""


def _reason(finding: Finding) -> str:
    if finding.kind in EVIDENT and finding.evidence:
        return finding.evidence
    return REASONS.get(finding.kind) or f"it {KINDS[finding.kind].does}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %"
