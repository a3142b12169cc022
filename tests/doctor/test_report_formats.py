"""SARIF, annotations and the trace: what a program reads of a verdict, whole."""

import json
from dataclasses import replace
from itertools import pairwise

from gpubound.doctor.finding import Finding, Verdict
from gpubound.doctor.recorded import Recorded
from gpubound.doctor.report import write_reports
from gpubound.doctor.report.github import annotate
from gpubound.doctor.report.perfetto import perfetto
from gpubound.doctor.report.sarif import fingerprint, sarif
from gpubound.version import __version__
from gpubound.watch.site import Site

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
    found = json.loads(sarif(verdict_of(FINDING, counted)))
    first, second = found["runs"][0].pop("results")
    assert found == {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {"name": "gpubound doctor", "version": __version__, "rules": [
                {"id": "sync", "shortDescription": {"text": "sync: waits for the device"}},
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
    assert second["message"] == {"text": "sync, 2 a step. Instead: keep it: there, on the GPU"} and "locations" not in second


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
    assert annotate(verdict_of(FINDING, bare)) == (
        "::warning file=jobs/a b.py,line=7,endLine=8,title=gpubound doctor%3A sync%2C 6.90 ms::sync, 2 a step, 6.90 ms a step "
        "(replayed), via utils/clip_grad.py:41 clip_grad_norm_; in backward of MulBackward0, built at train.py:88: 100 %25 idle"
        ". Instead: keep it: there, on the GPU\n"
        "::warning title=gpubound doctor%3A sync%2C not priced::sync, 2 a step: a%0Ab::error::c. "
        "Instead: keep it: there, on the GPU\n"
    )


def test_nothing_that_a_name_holds_steers_a_reader():
    site = Site("\x1b[2J\ud800,:.py", 1, "f\ud800", "\ud800\x1b]0;x\x07", 1)
    verdict = verdict_of(replace(FINDING, site=site, built=None, evidence="\ud800\x1b[31m"))
    for text in (sarif(verdict), annotate(verdict)):
        text.encode()
        assert "\x1b" not in text and "\\ud800" not in text
    assert annotate(verdict).count("\n") == 1


def test_a_trace_has_every_event_on_its_track_and_the_lines_as_slices():
    tape, located = looped(steps=2)
    events = json.loads(perfetto(Recorded(tape, located)))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    on = {track: [e for e in slices if names[e["pid"], e["tid"]] == track] for track in set(names.values())}
    assert [e["name"] for e in on["steps"]] == ["step 1", "step 2"]
    assert [(e["name"], e["ts"]) for e in on["thread 1: calls"]] == [(c.name, round(c.start, 3)) for c in tape.calls]
    assert {e["name"] for e in on["thread 1: lines"]} == {f"train.py:88  {ITEM.code}", f"train.py:90  {CLIP.code}"}
    assert len(on["stream 7"]) == len(tape.work) and {e["name"] for e in on["idle"]} >= {"data", "a sync"}
    begins, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert len(begins) == len(ends) == len({w.correlation for w in tape.work})
    for track in on.values():  # Perfetto drops a slice that begins in another one and ends after it
        inner = sorted((e["ts"], e["ts"] + e["dur"]) for e in track)
        assert all(b >= a_end - 2e-3 or b_end <= a_end + 2e-3 for (_, a_end), (b, b_end) in pairwise(inner))


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
