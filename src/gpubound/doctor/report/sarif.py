"""Findings as SARIF 2.1.0, which code hosts show beside the lines of a change.

A finding keeps its fingerprint while its line moves or is indented anew: it is made of the kind, the function and the line's
words, not of the file or the line's number.
"""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from ...version import __version__
from ...watch.site import Site
from ..finding import KINDS, Finding, Verdict
from .words import clean, summary, through

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(verdict: Verdict) -> str:
    kinds = list(dict.fromkeys(finding.kind for finding in verdict.findings))
    seen: Counter[str] = Counter()
    run = {
        "tool": {"driver": {"name": "gpubound doctor", "version": __version__, "rules": [_rule(kind) for kind in kinds]}},
        "results": [_result(finding, kinds, seen) for finding in verdict.findings],
        "properties": {"script": clean(verdict.script), "step_ms": verdict.step_ms, "ceiling_ms": verdict.ceiling_ms},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def fingerprint(finding: Finding) -> str:
    site = finding.line
    words = (finding.kind, site.function if site else "", " ".join(site.code.split()) if site else finding.node)
    return sha256("\0".join(words).encode("utf-8", "replace")).hexdigest()[:32]


def _rule(kind: str) -> dict[str, Any]:
    return {"id": kind, "shortDescription": {"text": f"{kind}: {KINDS[kind].does}"}}


def _result(finding: Finding, kinds: list[str], seen: Counter[str]) -> dict[str, Any]:
    """`seen` numbers those of one fingerprint: a function may hold the same line twice."""
    print_ = fingerprint(finding)
    seen[print_] += 1
    found: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": kinds.index(finding.kind),
        "level": "warning",
        "message": {"text": clean(summary(finding))},
        "partialFingerprints": {"gpubound/v1": f"{print_}:{seen[print_]}"},
        "properties": {"ms_per_step": finding.ms, "count": finding.count, "certainty": finding.certainty},
    }
    if site := finding.line:
        found["locations"] = [_location(site)]
    if finding.built and finding.site:
        found["relatedLocations"] = [_location(finding.built) | {"message": {"text": clean(through(finding))}}]
    return found


def _location(site: Site) -> dict[str, Any]:
    """The file from the working directory: an absolute path would name the user's home."""
    uri = quote(clean(site.portable.file))
    region = {"startLine": max(site.line, 1), "endLine": max(site.end, site.line, 1), "snippet": {"text": clean(site.code)}}
    place = {"artifactLocation": {"uri": uri, "uriBaseId": "%SRCROOT%"}, "region": region}
    return {"physicalLocation": place, "logicalLocations": [{"name": clean(site.function), "kind": "function"}]}
