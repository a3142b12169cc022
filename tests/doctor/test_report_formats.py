"""SARIF, annotations and the trace: what a program reads of a verdict, whole."""

import json
import re
from dataclasses import replace

import pytest

from gpubound.doctor.finding import KINDS, Finding, Verdict
from gpubound.doctor.report import write_reports
from gpubound.doctor.report.files import fingerprint, sarif
from gpubound.version import __version__
from gpubound.watch.events import Site

from .verdicts import ITEM, TORCH, judged, looped, measured

SITE = Site("jobs/a b.py", 7, "step", "x =  loss.item()", 8)
FINDING = Finding("sync", SITE, TORCH, "MulBackward0", ITEM, 2.0, 6.9, "replayed", "100 % idle", "keep it: there, on the GPU")


def verdict_of(*findings):
    return replace(judged(*looped()), script="train.py", step_ms=41.8, ceiling_ms=25.9, findings=findings)


def test_sarif_whole():
    counted = replace(FINDING, site=None, via=None, node="", built=None, ms=None, certainty="counted", evidence="")
    said = "sync, 2 a step, 6.90 ms a step (replayed), via utils/clip_grad.py:41 clip_grad_norm_; "
    said += "in backward of MulBackward0, built at train.py:88: 100 % idle. Instead: keep it: there, on the GPU"

    def location(uri, first, last, code):
        region = {"startLine": first, "endLine": last, "snippet": {"text": code}}
        place = {"artifactLocation": {"uri": uri, "uriBaseId": "%SRCROOT%"}, "region": region}
        return {"physicalLocation": place, "logicalLocations": [{"name": "step", "kind": "function"}]}

    built = location("train.py", 88, 88, ITEM.code)
    built["message"] = {"text": "via utils/clip_grad.py:41 clip_grad_norm_; in backward of MulBackward0, built at train.py:88"}
    kept = ("ruleId", "ruleIndex", "level")
    said_of_rule = {"text": "A line of the step waits for the device."}
    help_ = {"text": f"Instead: {KINDS['sync'].remedy}."}
    found = json.loads(sarif(verdict_of(FINDING, counted)))
    first, second = found["runs"][0].pop("results")
    assert found == {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {"name": "gpubound doctor", "version": __version__, "rules": [
                {"id": "sync", "shortDescription": said_of_rule, "fullDescription": said_of_rule, "help": help_},
            ]}},
            "properties": {"script": "train.py", "step_ms": 41.8, "ceiling_ms": 25.9},
        }],
    }  # fmt: skip
    assert first == {
        **dict(zip(kept, ("sync", 0, "warning"))),
        "message": {"text": said},
        "partialFingerprints": {"gpubound/v1": f"{fingerprint(FINDING)}:1"},
        "properties": {"ms_per_step": 6.9, "count": 2.0, "certainty": "replayed"},
        "locations": [location("jobs/a%20b.py", 7, 8, "x =  loss.item()")],
        "relatedLocations": [built],
    }
    assert second["message"] == {"text": "sync, 2 a step. Instead: keep it: there, on the GPU"}
    start = {"artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"}, "region": {"startLine": 1}}
    assert second["locations"] == [{"physicalLocation": start}]


# What SARIF 2.1.0 has of an object, the first of them (before the dot) required. It allows no other properties.
LOG = {"": "version runs . $schema", "runs": "tool . results properties", "tool": "driver ."}
LOG |= {"driver": "name . version rules", "rules": "id shortDescription fullDescription help ."}  # GitHub wants all four
LOG |= dict.fromkeys(("shortDescription", "fullDescription", "help", "message", "snippet"), "text .")
LOG |= {"results": "message ruleId locations . ruleIndex level partialFingerprints properties relatedLocations"}
LOG |= dict.fromkeys(("locations", "relatedLocations"), "physicalLocation . logicalLocations message")
LOG |= {"physicalLocation": "artifactLocation region .", "artifactLocation": "uri . uriBaseId"}
LOG |= {"region": "startLine . endLine snippet", "logicalLocations": "name . kind"}
FREE = ("properties", "partialFingerprints")


def held_to_schema(name, value):
    """Every object of these has what it must, and nothing else."""
    if isinstance(value, list):
        for each in value:
            held_to_schema(name, each)
    elif isinstance(value, dict) and name not in FREE:
        required, _, optional = LOG[name].partition(".")
        assert set(required.split()) <= set(value) <= {*required.split(), *optional.split()}, name
        for key, inner in value.items():
            held_to_schema(key, inner)


def test_sarif_is_as_the_schema_has_it_whatever_was_found():
    """Microsoft's validator and the schema itself were run over these by hand (LOG.md); here are the rules that concern us."""
    nowhere = replace(FINDING, site=None, via=None, node="", built=None, ms=None, certainty="counted", evidence="")
    strange = replace(FINDING, site=replace(SITE, file="<stdin> ü%:\ud800", line=0, end=-3, code="", function=""))
    of_ranks = replace(verdict_of(FINDING), ranks=[{"rank": 0, "step_ms": 1.0}, {"rank": 1, "step_ms": 2.0}])
    dry = replace(verdict_of(nowhere), step_ms=None, ceiling_ms=None, bar={})
    every = verdict_of(*(replace(FINDING, kind=kind) for kind in KINDS))
    for verdict in (verdict_of(), verdict_of(FINDING, strange, nowhere), of_ranks, dry, every):
        log = json.loads(sarif(verdict), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        held_to_schema("", log)
        (run,) = log["runs"]
        rules, results = run["tool"]["driver"]["rules"], run["results"]
        assert len(results) == len(verdict.findings) and len({rule["id"] for rule in rules}) == len(rules)
        assert all(rule["help"]["text"] and rule["fullDescription"]["text"] for rule in rules)
        for result in results:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"] and result["message"]["text"]
            for location in result["locations"]:
                place = location["physicalLocation"]
                assert 1 <= place["region"]["startLine"] <= place["region"].get("endLine", 1)
                assert re.fullmatch(r"(?:[\w.~/-]|%[0-9A-F]{2})+", place["artifactLocation"]["uri"], re.ASCII)


def test_what_has_no_line_stands_at_the_script_where_another_finding_names_its_folder():
    verdict = replace(verdict_of(FINDING, replace(FINDING, kind="comm", site=None, built=None)), script="a b.py")
    uris = [
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for result in json.loads(sarif(verdict))["runs"][0]["results"]
    ]
    assert uris == ["jobs/a%20b.py", "jobs/a%20b.py"]


def test_a_fingerprint_follows_the_line_and_no_other():
    moved = replace(FINDING, site=replace(SITE, file="other.py", line=99, end=99, code="x = loss.item()"), ms=1.0, count=5.0)
    assert fingerprint(moved) == fingerprint(FINDING)
    others = (
        replace(FINDING, kind="d2h"),
        *(replace(FINDING, site=replace(SITE, **{name: "y"})) for name in ("function", "code")),
    )
    assert len({fingerprint(finding) for finding in (FINDING, *others)}) == 4
    results = json.loads(sarif(verdict_of(FINDING, moved)))["runs"][0]["results"]
    ends = [result["partialFingerprints"]["gpubound/v1"][-2:] for result in results]
    assert ends == [":1", ":2"], "the same line twice in a function is two findings"


def test_nothing_that_a_name_holds_steers_a_reader():
    site = Site("\x1b[2J\ud800,:.py", 1, "f\ud800", "\ud800\x1b]0;x\x07", 1)
    verdict = verdict_of(replace(FINDING, site=site, built=None, evidence="\ud800\x1b[31m"))
    sarif(verdict).encode()
    assert "\x1b" not in sarif(verdict) and "\\ud800" not in sarif(verdict)


def test_the_files_of_a_run(tmp_path):
    tape, located = looped()
    home = replace(ITEM, file="/home/somebody/deep/project/train.py")
    located = {call: replace(place, site=home) for call, place in located.items()}
    verdict = verdict_of(replace(FINDING, site=home))
    paths = write_reports(tmp_path / "new" / "out", verdict, measured(tape, located))
    assert [path.name for path in paths] == ["doctor.json", "doctor.html", "doctor.sarif"]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert Verdict.from_dict(json.loads(texts[0])) == Verdict.from_dict(verdict.as_dict())
    assert all("project/train.py" in text and "/home/" not in text and "somebody" not in text for text in texts)
