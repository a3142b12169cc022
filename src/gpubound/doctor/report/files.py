"""The reports of a run in a folder, among them SARIF 2.1.0 for code hosts."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from ...files import make_folder, read_json, write_whole
from ...pages import check_page, write_page
from ...version import __version__
from ...watch.source_line import Site
from ..finding import KINDS, Finding, Verdict
from ..fix.prove import Proof
from ..price.measurements import Profile
from .page import page
from .words import clean, summary, through

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(verdict: Verdict) -> str:
    kinds = list(dict.fromkeys(finding.kind for finding in verdict.findings))
    files = [finding.line.portable.file for finding in verdict.findings if finding.line]
    script = next((file for file in files if PurePath(file).name == verdict.script), verdict.script)  # with its folder
    occurrences: Counter[str] = Counter()
    run = {
        "tool": {"driver": {"name": "gpubound doctor", "version": __version__, "rules": [_rule(kind) for kind in kinds]}},
        "results": [_result(finding, kinds, occurrences, script) for finding in verdict.findings],
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
    text = {"text": f"A line of the step {cause.does}."}
    return {"id": kind, "shortDescription": text, "fullDescription": text, "help": {"text": f"Instead: {cause.remedy}."}}


def _result(finding: Finding, kinds: list[str], occurrences: Counter[str], script: str) -> dict[str, Any]:
    """GitHub needs a place for each result: one without a line is put at the start of `script`. `seen` numbers those of one
    fingerprint: a function may hold the same line twice."""
    print_ = fingerprint(finding)
    occurrences[print_] += 1
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": kinds.index(finding.kind),
        "level": "warning",
        "message": {"text": clean(summary(finding))},
        "partialFingerprints": {"gpubound/v1": f"{print_}:{occurrences[print_]}"},
        "properties": {"ms_per_step": finding.ms, "count": finding.count, "certainty": finding.certainty},
        "locations": [_location(finding.line) if finding.line else {"physicalLocation": _physical(script, {"startLine": 1})}],
    }
    if finding.built and finding.site:
        result["relatedLocations"] = [_location(finding.built) | {"message": {"text": clean(through(finding))}}]
    return result


def _location(site: Site) -> dict[str, Any]:
    """The file from the working directory: an absolute path would name the user's home."""
    region = {"startLine": max(site.line, 1), "endLine": max(site.end, site.line, 1), "snippet": {"text": clean(site.code)}}
    place = _physical(site.portable.file, region)
    return {"physicalLocation": place, "logicalLocations": [{"name": clean(site.function), "kind": "function"}]}


def _physical(file: str, region: dict[str, Any]) -> dict[str, Any]:
    return {"artifactLocation": {"uri": quote(clean(file)), "uriBaseId": "%SRCROOT%"}, "region": region}


JSON, PAGE, SARIF = "doctor.json", "doctor.html", "doctor.sarif"


def check_reports(folder: Path) -> None:
    """Raise ValueError if a report would replace a file in `folder` that the doctor did not write."""
    if (folder / PAGE).is_file():
        check_page(folder / PAGE)
    for name, key in ((JSON, "findings"), (SARIF, "runs")):
        if (folder / name).is_file() and key not in read_json(folder / name, "give another folder with --out"):
            raise ValueError(f"out: {folder / name} was not written by the doctor; give another folder.")


def write_reports(
    folder: Path, verdict: Verdict, recording: Profile | None = None, proof: Proof | None = None, patch: str = ""
) -> list[Path]:
    """Write doctor.json, doctor.html and doctor.sarif; return their paths. `recording`, `proof` and `patch` go to the page."""
    check_reports(folder)
    make_folder(folder)
    write_whole(folder / JSON, json.dumps(verdict.as_dict(), indent=1) + "\n")
    write_page(folder / PAGE, page(verdict, recording, proof, patch))
    write_whole(folder / SARIF, sarif(verdict) + "\n")
    return [folder / name for name in (JSON, PAGE, SARIF)]
