"""SARIF, annotations and the trace: what a program reads of a verdict, whole."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from gpubound.doctor.finding import KINDS, Finding, Verdict
from gpubound.doctor.recorded import Recorded
from gpubound.doctor.report import write_reports
from gpubound.doctor.report.github import annotate
from gpubound.doctor.report.perfetto import perfetto
from gpubound.doctor.report.sarif import fingerprint, sarif
from gpubound.doctor.tape import Call, Tape, Work
from gpubound.version import __version__
from gpubound.watch.site import Site
from tests.messages import message

from .tapes import Synthetic
from .verdicts import CLIP, ITEM, TORCH, judged, looped

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


def test_annotations_whole():
    bare = replace(FINDING, site=None, via=None, node="", built=None, ms=None, certainty="counted", evidence="a\nb::error::c")
    assert annotate(verdict_of(FINDING, bare)) == message("doctor/report_formats:annotations_whole")


def test_nothing_that_a_name_holds_steers_a_reader():
    site = Site("\x1b[2J\ud800,:.py", 1, "f\ud800", "\ud800\x1b]0;x\x07", 1)
    verdict = verdict_of(replace(FINDING, site=site, built=None, evidence="\ud800\x1b[31m"))
    for text in (sarif(verdict), annotate(verdict)):
        text.encode()
        assert "\x1b" not in text and "\\ud800" not in text
    assert annotate(verdict).count("\n") == 1


def traced(recording):
    """The events of a trace as Perfetto reads them: times in whole nanoseconds, cut off in older ones, rounded in newer."""
    events = json.loads(perfetto(recording))["traceEvents"]
    for event in events:
        for key in {"ts", "dur"} & event.keys():
            assert int(event[key] * 1000) == round(event[key] * 1000) >= 0
            event[key] = round(event[key] * 1000)
    return events


def test_a_trace_has_every_event_on_its_track_and_the_lines_as_slices():
    tape, located = looped(steps=2)
    events = traced(Recorded(tape, located))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    on = {track: [e for e in slices if names[e["pid"], e["tid"]] == track] for track in set(names.values())}
    first, _ = tape.steps[0]
    called = [(call.name, round((call.start - first) * 1e3)) for call in tape.calls]
    assert [e["name"] for e in on["steps"]] == ["step 1", "step 2"]
    assert [(e["name"], e["ts"]) for e in on["thread 1: calls"]] == called
    assert {e["name"] for e in on["thread 1: lines"]} == {f"train.py:88  {ITEM.code}", f"train.py:90  {CLIP.code}"}
    assert len(on["stream 7"]) == len(tape.work) and {e["name"] for e in on["idle"]} >= {"data", "a sync"}
    assert min(e["ts"] for e in slices) == 0 and {e["ph"] for e in events} == set("MXsf")


@st.composite
def untidy(draw):
    """A tape of any clock, in fractions of a ns, whose works of one stream touch, overlap and hold each other."""
    at = draw(st.sampled_from([0.0, -50.0, 1.7e9, 123.4567]))
    times = st.floats(0, 9).map(lambda us: round(us, 4))
    calls, work = [], []
    for n in range(1, draw(st.integers(1, 12)) + 1):
        start = at + draw(times)
        calls.append(Call("cudaLaunchKernel", "launch", 1, at, at + 1 / 3, n))
        work.append(Work(f"kernel {n}", "kernel", 0, draw(st.sampled_from([7, 20])), start, start + draw(times), n))
        at += draw(times) + 1
    return Tape(calls, work)


def of_one_stream(*times):
    calls = [Call("cudaLaunchKernel", "launch", 1, float(n - 9), n - 8.5, n) for n in range(1, len(times) + 1)]
    return Tape(calls, [Work(f"kernel {n}", "kernel", 0, 7, *when, n) for n, when in enumerate(times, 1)])


@given(untidy())
@example(of_one_stream((0.0, 3.0), (1.0, 4.0), (2.0, 4.0), (2.0, 2.5), (2.5, 6.0)))
def test_a_trace_keeps_the_rules_of_its_format(tape):
    """What Perfetto would drop without a word: slices that cross, arrows that begin or end outside a slice or in the past."""
    events = traced(Recorded(tape))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named
    assert sum(e["name"].startswith("kernel") for e in slices) == len(tape.work)
    for track in named:
        ends = []
        mine = [e for e in slices if (e["pid"], e["tid"]) == track]
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        for begin, end in ((e["ts"], e["ts"] + e["dur"]) for e in mine):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], "it begins inside another slice and ends after it"
            ends.append(end)
    arrows = {n: {e["ph"]: e for e in events if e.get("id") == n} for n in {e["id"] for e in events if e["ph"] in "sf"}}
    assert len(arrows) == len(tape.work)
    for number, ends_of in arrows.items():
        begin, end = ends_of["s"], ends_of["f"]
        assert (end["ts"], f"kernel {number}") in {(e["ts"], e["name"]) for e in slices}
        assert any(e["ts"] == begin["ts"] and e["name"] == "cudaLaunchKernel" for e in slices)


def test_a_trace_whose_idleness_cannot_be_told_says_so():
    tape = Synthetic().graph(hidden=True).launch().sync().step().tape()
    found = json.loads(perfetto(Recorded(tape)))
    assert "not told: " in found["otherData"]["idle"] and any(e["name"] == "cudaGraphLaunch" for e in found["traceEvents"])


def test_the_files_of_a_run(tmp_path):
    tape, located = looped()
    home = replace(ITEM, file="/home/somebody/deep/project/train.py")
    located = {call: replace(place, site=home) for call, place in located.items()}
    verdict = verdict_of(replace(FINDING, site=home))
    paths = write_reports(tmp_path / "new" / "out", verdict, Recorded(tape, located))
    assert [path.name for path in paths] == ["doctor.json", "doctor.html", "doctor.sarif", "doctor.trace.json"]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert Verdict.from_dict(json.loads(texts[0])) == Verdict.from_dict(verdict.as_dict())
    assert all("project/train.py" in text and "/home/" not in text and "somebody" not in text for text in texts)
    assert [path.name for path in write_reports(tmp_path, verdict)][-1] == "doctor.sarif", "without a tape there is no trace"
