"""The sentence that a report begins with, and numbers that add up to the step."""

import os
from dataclasses import replace

import pytest

from gpubound.cli.doctor import command_line
from gpubound.doctor.finding import KINDS, Finding, Verdict
from gpubound.doctor.price.idle import idle_times
from gpubound.doctor.price.prices import Measurements, Prices
from gpubound.doctor.report.files import page, sarif
from gpubound.doctor.report.words import adds_up, conclusion, late_for, parts, rounded, screen, unnamed
from gpubound.watch.events import Site

from .verdicts import looped

SITE = Site("train.py", 38, "<module>", "for batch in loader:", 38)
SHARES = {"busy": 60.4, "host_late": 33.4, "device_side": 6.2, "comm": 0.0, "unlocated": 0.0}
LATE = {"data": 30.0, "dispatch": 3.4}


def found(kind: str, ms: float | None = 23.0, site: Site | None = SITE, evidence: str = "") -> Finding:
    certainty = "counted" if ms is None else "replayed"
    return Finding(kind, site, None, "", None, 2.0, ms, certainty, evidence, KINDS[kind].remedy)


def verdict(*findings: Finding, **more) -> Verdict:
    plain = Verdict(
        script="train.py", machine={"device": "a GPU"}, step_ms=67.7, bar={"shares": SHARES, "late": LATE}, ceiling_ms=44.7,
        findings=findings, together_ms=sum(finding.ms or 0.0 for finding in findings), harmless=[], unlocated=[], phases={},
        absent={}, distortion=None,
    )  # fmt: skip
    return replace(plain, **more)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("data", ("Line 38 of train.py costs 34 % of a step", "loader", "44.7 ms instead of 67.7.")),
        ("sync", ("Line 38 of train.py", "34 %", "waits", "44.7 ms")),
        ("h2d", ("Line 38 of train.py", "copy to the GPU", "44.7 ms")),
        ("d2h", ("Line 38 of train.py", "read from the GPU", "44.7 ms")),
        ("launch_bound", ("34 %", "CUDA graph", "44.7 ms")),
        ("precision", ("Line 38 of train.py", "work of the GPU", "12 products in fp32", "44.7 ms")),
    ],
)
def test_the_costliest_finding_with_the_step_without_it(kind, words):
    text = conclusion(verdict(found(kind, evidence="12 products in fp32" if kind == "precision" else "")))
    assert all(word in text for word in words) and "h2d" not in text and "d2h" not in text
    if kind == "launch_bound":
        assert "Line 38" not in text, "a step ends there, which is not the cause"


@pytest.mark.parametrize(("ms", "wanted"), [(60.0, "44.7 ms"), (150.0, "56.8 ms"), (170.0, "64.4 ms")])
def test_a_loader_s_workers_are_a_limit_of_the_step_with_more_of_them(ms, wanted):
    """The step without waits is 44.7 ms; one worker needs `ms` for a step, and four of them more than a quarter."""
    text = conclusion(verdict(found("data"), loader={"workers": 1, "ms": ms}))
    assert f"num_workers=4 a step takes about {wanted}" in text
    assert "num_workers" not in conclusion(verdict(found("data"), loader={"workers": 4, "ms": ms}))
    assert "num_workers" not in conclusion(verdict(found("sync"), loader={"workers": 1, "ms": ms}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("site", [SITE, None])
@pytest.mark.parametrize("ms", [23.0, None])
def test_every_kind_has_a_sentence(kind, site, ms):
    text = conclusion(verdict(found(kind, ms, site)))
    assert text.endswith(".") and not text[0].islower() and ("%" in text) == (ms is not None), text
    assert ("Line 38" in text) == (site is not None and kind != "launch_bound")


def test_counts_without_prices_and_nothing_found():
    dry = {"step_ms": None, "bar": {}, "ceiling_ms": None, "absent": {"prices": "a dry run"}}
    one, two = (conclusion(verdict(*[found("sync", None)] * number, **dry)) for number in (1, 2))
    assert "Line 38 of train.py" in one and "2 times a step" in one and " ms" not in one + two and "1 more finding" in two
    assert "GPU is busy in 98 %" in conclusion(verdict(bar={"shares": {"busy": 98.0, "host_late": 2.0}}))
    nothing = conclusion(verdict(**dry, counts={"syncs": 0.0}))
    unseen = conclusion(verdict(**dry))
    assert nothing != unseen and "watched" in nothing and "not measured" in unseen


def test_a_wait_for_the_host_that_no_finding_has_is_named_first():
    lost = verdict(found("sync", 2.0))
    text = conclusion(lost)
    assert unnamed(lost) == pytest.approx(67.7 * 0.334 - 2.0) and "33 % of a step (22.6 ms)" in text and "20.6 ms" in text
    assert (
        unnamed(verdict(found("data"))) is None
        and unnamed(verdict(found("sync", None))) is None
        and unnamed(verdict(found("precision"))) is not None
    )
    (line,) = late_for(lost)
    assert all(word in line for word in ("22.6 ms", "data 20.3 ms", "dispatch 2.30 ms")), "the parts add up"


def test_the_step_is_the_sum_of_the_gpu_s_time_the_findings_and_a_rest():
    lost = verdict(found("sync", 3.0), found("launch_bound", 8.0))
    (line,) = adds_up(lost)
    assert "findings 11.0" in line and "finding 11.6" in line and line in screen(lost, 110), "22.6 ms that the host is late"
    assert not adds_up(verdict(step_ms=None)) and not adds_up(verdict(bar={"shares": {"busy": 98.0}}))
    assert "separately" not in screen(lost, 110) and "separately 11.0 ms" in screen(replace(lost, together_ms=12.0), 110)


def test_streams_that_overlap_without_a_late_host_are_less_busy_time():
    """The host is late for 22.6 ms, and the findings save 30: in a graph two streams run at once."""
    both = verdict(found("sync", 3.0), found("launch_bound", 27.0))
    (line,) = adds_up(both)
    assert "findings 30.0" in line and "without them 33.5" in line and sum(parts(both).values()) == pytest.approx(67.7)


def test_percentages_on_the_screen_add_up():
    thirds = dict.fromkeys(("busy", "host_late", "device_side"), 100 / 3)
    assert sorted(rounded(thirds).values()) == [33, 33, 34] and sum(rounded(thirds, 1).values()) == pytest.approx(100)
    assert rounded({"busy": 97.6}) == {"busy": 98.0} and rounded({}) == {}
    assert "GPU busy 61%   host late 33%   between queued kernels 6%" in screen(verdict(found("data")), 110)


def test_shares_are_those_of_the_timed_step():
    """A recorder slows the host alone: what the device does is as long in a step that is not recorded."""
    tape, _ = looped()
    bar = idle_times(tape)
    fast = 0.9 * bar.step_ms
    shares = Prices(Measurements("train.py", "a GPU", tape=tape, step_ms=[fast])).shares
    assert sum(shares["shares"].values()) == pytest.approx(100)
    assert sum(shares["late"].values()) == pytest.approx(shares["shares"]["host_late"])
    for share in ("busy", "device_side"):
        assert shares["shares"][share] * fast == pytest.approx(bar.shares[share] * bar.step_ms)
    assert shares["shares"]["host_late"] < bar.shares["host_late"]
    for ms in ([], [2 * bar.step_ms]):  # not timed, or a host that was ahead of its recorder
        assert Prices(Measurements("train.py", "a GPU", tape=tape, step_ms=ms)).shares["shares"] == bar.shares
    least = Prices(Measurements("train.py", "a GPU", tape=tape, step_ms=[1e-3])).shares["shares"]
    assert least["host_late"] == 0 and sum(least.values()) == pytest.approx(100)


def test_the_page_has_the_sentence_the_date_and_the_command(tmp_path):
    data = str(tmp_path / "secret" / "books.bin")
    inside = os.path.join(os.getcwd(), "out")
    command = command_line(["train.py", "--data", data, f"--out={inside}", "--name", "a b"])
    assert command == "gpubound doctor train.py --data books.bin --out=out --name 'a b'"
    hidden = command_line(["train.py", "--hf_token", "abc", "--api-key=abc", "--tokens", "5"])
    assert "abc" not in hidden and "--tokens 5" in hidden
    dated = replace(verdict(found("h2d")), command=command, date="2026-11-28 21:50 UTC")
    written = page(dated)
    for text in (conclusion(dated), "--data books.bin", dated.date, "a GPU", "copy to the GPU"):
        assert text in written
    assert "· h2d" not in written and '"id": "h2d"' in sarif(dated), "programs read the kinds as they were"
    assert Verdict.from_dict(dated.as_dict()).as_dict() == dated.as_dict()
    old = dated.as_dict()
    del old["command"], old["date"]
    assert Verdict.from_dict(old).command == "", "a file of an older doctor is read"
