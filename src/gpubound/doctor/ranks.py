"""Merge of the verdicts of a script's ranks: each rank measures itself, the first one reports.

Ranks that train together have steps of one length: a quick rank waits in communication. So the price of a finding is that of
the rank that pays most, and a rank is late if its step without communication is longer than the others'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ..distributed.rendezvous import gather_texts, rank_and_world
from .finding import KINDS, Finding, Verdict
from .report.words import milliseconds

LATE = 0.05  # of a step: the work of ranks differs by less from step to step
SILENT = "it has told nothing; look into its log"
SHARES = ("busy", "host_late", "comm")
ERROR = "error"


def merge_ranks(verdict: Verdict) -> Verdict:
    """Return this rank's verdict; on the first of several ranks the merged one."""
    _, world = rank_and_world()
    reports = {rank: json.loads(text) for rank, text in gather_texts(json.dumps(verdict.as_dict())).items()}
    if world == 1 or not reports:
        return verdict
    failed = {rank: SILENT for rank in range(world) if rank not in reports}
    failed |= {rank: about[ERROR] for rank, about in reports.items() if ERROR in about}
    others = {rank: Verdict.from_dict(about) for rank, about in reports.items() if rank and rank not in failed}
    return merged({0: verdict} | others, failed)


def send_error(error: Exception) -> None:
    """Send the first rank the reason why this rank has no verdict."""
    if rank_and_world()[0]:
        gather_texts(json.dumps({ERROR: str(error)}))


def merged(verdicts: Mapping[int, Verdict], failed: Mapping[int, str]) -> Verdict:
    """Merge `verdicts`, which have that of rank 0. `failed` maps ranks without a verdict to the reason."""
    first = verdicts[0]
    by_line: dict[Any, dict[int, Finding]] = {}
    for rank, verdict in verdicts.items():
        for finding in verdict.findings:
            by_line.setdefault(_key(finding), {})[rank] = finding
    findings = [_merged_finding(by_rank, len(verdicts) + len(failed)) for by_rank in by_line.values()] + _late(verdicts)
    findings.sort(key=lambda finding: (finding.ms is None, -(finding.ms or 0.0), -finding.count))
    times: dict[str, Any] = {}
    for name in ("step_ms", "ceiling_ms", "device_ms", "together_ms"):
        values = (getattr(verdict, name) for verdict in verdicts.values())
        times[name] = max((value for value in values if value is not None), default=None)
    return replace(
        first,
        findings=findings,
        harmless=[finding for finding in first.harmless if _key(finding) not in by_line],
        **times,
        counts={name: max(v.counts[name] for v in verdicts.values() if name in v.counts) for name in first.counts},
        absent=first.absent | {f"rank {rank}": why for rank, why in sorted(failed.items())},
        ranks=[_about(rank, verdict) for rank, verdict in sorted(verdicts.items())],
    )


def _key(finding: Finding) -> tuple[str, str, int]:
    line = finding.line
    return (finding.kind, line.portable.file, line.line) if line else (finding.kind, "", 0)


def _merged_finding(by_rank: Mapping[int, Finding], world: int) -> Finding:
    """Return the finding of the rank that pays most, with the range of all ranks' prices."""
    costliest = max(by_rank.values(), key=lambda finding: (finding.ms or 0.0, finding.count))
    prices = sorted(finding.ms for finding in by_rank.values() if finding.ms is not None)
    counts = sorted(finding.count for finding in by_rank.values())
    text = f"{counts[0]:.3g} to {counts[-1]:.3g} a step"
    if prices:
        text = f"{milliseconds(prices[0])} to {milliseconds(prices[-1])}"
    where = f"on {len(by_rank)} of {world} ranks" if len(by_rank) > 1 else f"on rank {next(iter(by_rank))} of {world} alone"
    return replace(costliest, evidence=f"{costliest.evidence}; {where}" + (f", {text}" if len(by_rank) > 1 else ""))


def _about(rank: int, verdict: Verdict) -> dict[str, Any]:
    shares = verdict.bar.get("shares", {})
    return {"rank": rank, "step_ms": verdict.step_ms} | {name: shares[name] for name in SHARES if name in shares}


def _late(verdicts: Mapping[int, Verdict]) -> list[Finding]:
    """Return a finding for the rank that the others wait for, if there is one."""
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
