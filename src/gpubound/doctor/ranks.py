"""The verdicts of a script's ranks made one: each rank looks at itself, the first one reports.

Ranks that train together have the same step: who is quick waits in communication. So a finding costs what it costs the rank
that pays most, and a rank is late whose step without communication is longer than the others'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ..distributed.store_messages import gather_texts, numbers
from .finding import KINDS, Finding, Verdict
from .report.text import milliseconds

LATE = 0.05  # of a step: by less the work of ranks differs from step to step
SILENT = "it has told nothing; look into its log"
SHARES = ("busy", "host_late", "comm")
ERROR = "error"


def merge_ranks(verdict: Verdict) -> Verdict:
    """This rank's verdict; on the first of several that of all of them."""
    _, world = numbers()
    reports = {rank: json.loads(text) for rank, text in gather_texts(json.dumps(verdict.as_dict())).items()}
    if world == 1 or not reports:
        return verdict
    failed = {rank: SILENT for rank in range(world) if rank not in reports}
    failed |= {rank: about[ERROR] for rank, about in reports.items() if ERROR in about}
    others = {rank: Verdict.from_dict(about) for rank, about in reports.items() if rank and rank not in failed}
    return merged({0: verdict} | others, failed)


def send_error(error: Exception) -> None:
    """The first rank hears why this one has no verdict."""
    if numbers()[0]:
        gather_texts(json.dumps({ERROR: str(error)}))


def merged(verdicts: Mapping[int, Verdict], failed: Mapping[int, str]) -> Verdict:
    """`verdicts` by rank, the first one's among them; `failed` are ranks without one, and why."""
    first = verdicts[0]
    by_line: dict[Any, dict[int, Finding]] = {}
    for rank, verdict in verdicts.items():
        for finding in verdict.findings:
            by_line.setdefault(_key(finding), {})[rank] = finding
    findings = [_spread(by_rank, len(verdicts) + len(failed)) for by_rank in by_line.values()] + _late(verdicts)
    findings.sort(key=lambda finding: (finding.ms is None, -(finding.ms or 0.0), -finding.count))
    return replace(
        first,
        findings=findings,
        harmless=[finding for finding in first.harmless if _key(finding) not in by_line],
        step_ms=_most(verdict.step_ms for verdict in verdicts.values()),
        ceiling_ms=_most(verdict.ceiling_ms for verdict in verdicts.values()),
        together_ms=_most(verdict.together_ms for verdict in verdicts.values()),
        counts={name: max(v.counts[name] for v in verdicts.values() if name in v.counts) for name in first.counts},
        absent=first.absent | {f"rank {rank}": why for rank, why in sorted(failed.items())},
        ranks=[_about(rank, verdict) for rank, verdict in sorted(verdicts.items())],
    )


def _key(finding: Finding) -> tuple[str, str, int]:
    line = finding.line
    return (finding.kind, line.portable.file, line.line) if line else (finding.kind, "", 0)


def _most(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _spread(by_rank: Mapping[int, Finding], world: int) -> Finding:
    """The finding of the rank that pays most, and what the others pay."""
    dearest = max(by_rank.values(), key=lambda finding: (finding.ms or 0.0, finding.count))
    prices = sorted(finding.ms for finding in by_rank.values() if finding.ms is not None)
    counts = sorted(finding.count for finding in by_rank.values())
    text = f"{counts[0]:.3g} to {counts[-1]:.3g} a step"
    if prices:
        text = f"{milliseconds(prices[0])} to {milliseconds(prices[-1])}"
    where = f"on {len(by_rank)} of {world} ranks" if len(by_rank) > 1 else f"on rank {next(iter(by_rank))} of {world} alone"
    return replace(dearest, evidence=f"{dearest.evidence}; {where}" + (f", {text}" if len(by_rank) > 1 else ""))


def _about(rank: int, verdict: Verdict) -> dict[str, Any]:
    shares = verdict.bar.get("shares", {})
    return {"rank": rank, "step_ms": verdict.step_ms} | {name: shares[name] for name in SHARES if name in shares}


def _late(verdicts: Mapping[int, Verdict]) -> list[Finding]:
    """The rank for which the others wait."""
    own = {
        rank: verdict.step_ms * (1 - verdict.bar["shares"]["comm"] / 100)
        for rank, verdict in verdicts.items()
        if verdict.step_ms is not None and "comm" in verdict.bar.get("shares", {})
    }
    if len(own) < 2:
        return []
    last = max(own, key=lambda rank: own[rank])
    usual = median(ms for rank, ms in own.items() if rank != last)
    if own[last] - usual < LATE * max(verdicts[rank].step_ms or 0.0 for rank in own):
        return []
    apart = f"its step takes {milliseconds(own[last])}, another's {milliseconds(usual)}"
    evidence = f"rank {last} comes late: without communication {apart}"
    return [Finding("comm", None, None, "", None, 1, own[last] - usual, "estimate", evidence, KINDS["comm"].remedy)]
