"""Patches for a whole verdict: each finding gets the one that mends it, and all of them together make one repair."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from ..finding import Finding, Verdict
from .repair import Repair, Target, repair


def patched(verdict: Verdict, asked: Collection[str] = ()) -> tuple[Verdict, Repair]:
    """The verdict with a diff in each finding that a patch mends, and the repair of all its findings.

    What is harmless gets none: there is nothing to gain. `asked` names patches that change the numbers, such as tf32.
    """
    findings = [replace(finding, patch=_diff(finding, asked)) for finding in verdict.findings]
    return replace(verdict, findings=findings), repair(targets(findings), asked)


def targets(findings: Iterable[Finding]) -> list[Target]:
    """The findings that have a line."""
    return [Target(finding.kind, line.file, line.line, line.code) for finding in findings if (line := finding.line) is not None]


def _diff(finding: Finding, asked: Collection[str]) -> str:
    return repair(targets([finding]), asked).diff()
