"""Findings as SARIF 2.1.0, which code hosts show beside the lines of a change.

A finding keeps its fingerprint while its line moves or is indented anew: it is made of the kind, the function and the line's
words, not of the file or the line's number.
"""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ...version import __version__
from ...watch.site import Site
from ..finding import KINDS, Finding, Verdict
from .words import clean, summary, through

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(verdict: Verdict) -> str:
    kinds = list(dict.fromkeys(finding.kind for finding in verdict.findings))
    files = [finding.line.portable.file for finding in verdict.findings if finding.line]
    script = next((file for file in files if PurePath(file).name == verdict.script), verdict.script)  # with its folder
    seen: Counter[str] = Counter()
    run = {
        "tool": {"driver": {"name": "gpubound doctor", "version": __version__, "rules": [_rule(kind) for kind in kinds]}},
        "results": [_result(finding, kinds, seen, script) for finding in verdict.findings],
        "properties": {"script": clean(verdict.script), "step_ms": verdict.step_ms, "ceiling_ms": verdict.ceiling_ms},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def fingerprint(finding: Finding) -> str:
    site = finding.line
    words = (finding.kind, site.function if site else "", " ".join(site.code.split()) if site else finding.node)
    return sha256("\0".join(words).encode("utf-8", "replace")).hexdigest()[:32]


def _rule(kind: str) -> dict[str, Any]:
    """With what GitHub's code scanning asks of a rule."""
    cause = KINDS[kind]
    said = {"text": f"A line of the step {cause.does}."}
    return {"id": kind, "shortDescription": said, "fullDescription": said, "help": {"text": f"Instead: {cause.remedy}."}}


def _result(finding: Finding, kinds: list[str], seen: Counter[str], script: str) -> dict[str, Any]:
    """GitHub takes no result that stands nowhere: what has no line stands at the start of `script`. `seen` numbers those of one
    fingerprint: a function may hold the same line twice."""
    print_ = fingerprint(finding)
    seen[print_] += 1
    found: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": kinds.index(finding.kind),
        "level": "warning",
        "message": {"text": clean(summary(finding))},
        "partialFingerprints": {"gpubound/v1": f"{print_}:{seen[print_]}"},
        "properties": {"ms_per_step": finding.ms, "count": finding.count, "certainty": finding.certainty},
        "locations": [_location(finding.line) if finding.line else {"physicalLocation": _physical(script, {"startLine": 1})}],
    }
    if finding.built and finding.site:
        found["relatedLocations"] = [_location(finding.built) | {"message": {"text": clean(through(finding))}}]
    return found


def _location(site: Site) -> dict[str, Any]:
    """The file from the working directory: an absolute path would name the user's home."""
    region = {"startLine": max(site.line, 1), "endLine": max(site.end, site.line, 1), "snippet": {"text": clean(site.code)}}
    place = _physical(site.portable.file, region)
    return {"physicalLocation": place, "logicalLocations": [{"name": clean(site.function), "kind": "function"}]}


def _physical(file: str, region: dict[str, Any]) -> dict[str, Any]:
    return {"artifactLocation": {"uri": quote(clean(file)), "uriBaseId": "%SRCROOT%"}, "region": region}
