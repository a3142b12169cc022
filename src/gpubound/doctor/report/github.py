"""Findings as annotations of GitHub's: a line of output each, shown at the line of the change. GitHub shows ten a step."""

from __future__ import annotations

from ..finding import Finding, Verdict
from .words import clean, price, summary


def annotate(verdict: Verdict) -> str:
    return "".join(f"{_annotation(finding)}\n" for finding in verdict.findings)


def _annotation(finding: Finding) -> str:
    told = {"title": f"gpubound doctor: {finding.kind}, {price(finding)}"}
    if site := finding.line:
        told = {"file": site.portable.file, "line": str(site.line), "endLine": str(max(site.end, site.line))} | told
    where = ",".join(f"{name}={_property(value)}" for name, value in told.items())
    return f"::warning {where}::{_text(summary(finding))}"


def _text(text: str) -> str:
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")
