"""The verdict on one screen."""

import doctest
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from gpubound.doctor.report import words
from gpubound.doctor.report.words import screen
from tests.messages import message

from .verdicts import ITEM, judged, looped

VERDICT = replace(judged(*looped()), step_ms=41.8, ceiling_ms=25.9, together_ms=15.9, unlocated=("2 of 61 calls: 0.2 ms.",))
PRICES = (6.9, 4.1, 1.7)
VERDICT = replace(VERDICT, findings=[replace(f, ms=ms) for f, ms in zip(VERDICT.findings, PRICES)])


def test_the_screen():
    shares = {"busy": 62.0, "host_late": 31.0, "device_side": 4.0, "comm": 0.0, "unlocated": 3.0}
    verdict = replace(VERDICT, bar={"shares": shares, "late": {}})
    assert screen(verdict, 110, files=["doctor.html", "doctor.json"]) == message("doctor/report_terminal:the_screen")


@pytest.mark.parametrize("width", [40, 64, 99, 100, 200])
def test_it_fits_every_width_and_drops_nothing(width):
    wide = replace(VERDICT.findings[2], fix="一次只读一个值 " * 9, evidence="", site=replace(ITEM, code="x" * 90))
    text = screen(replace(VERDICT, findings=[*VERDICT.findings[:2], wide]), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.count("x") >= 90 and text.count("一次只读一个值") + text.replace("\n", "").count("次只读") >= 9
    for word in ("train.py:61", "train.py:90", "CEILING", "6.90", "harmless"):
        assert word in text


def test_colour_is_asked_for_and_names_do_not_steer():
    assert "\x1b[" in screen(VERDICT, 100, colour=True) and "\x1b" not in screen(VERDICT, 100)
    nasty = replace(VERDICT, script="[red]\x1b[2J:smile:\ud800", unlocated=("\x1b]0;x\x07",))
    text = screen(nasty, 100)
    assert "\x1b" not in text and "[red]\\x1b[2J:smile:" in text
    text.encode()


def test_what_was_not_measured_is_not_a_number():
    bare = [replace(f, ms=None, certainty="counted") for f in VERDICT.findings]
    verdict = replace(VERDICT, step_ms=None, ceiling_ms=None, together_ms=None, bar={}, findings=bare, distortion=None)
    text = screen(verdict, 110).split("harmless")[0]
    assert "prices need a GPU" in text and not re.search(r"STEP|CEILING|\d ms", text)


def test_harmless_ones_are_counted_or_listed():
    verdict = replace(
        VERDICT, harmless=[replace(VERDICT.harmless[0], site=replace(ITEM, line=n)) for n in range(9)], findings=[]
    )
    assert "no finding" in screen(verdict) and message("doctor/report_terminal:harmless_ones_are_counte").within(
        screen(verdict)
    )
    assert screen(verdict, everything=True).count("harmless:") == 9


def test_many_findings_are_cut_to_a_screen():
    many = [replace(VERDICT.findings[0], ms=20.0 - n, site=replace(ITEM, line=100 + n)) for n in range(11)]
    text = screen(replace(VERDICT, findings=many), 110)
    assert "train.py:107" in text and "train.py:108" not in text and len(text.splitlines()) < 45
    assert message("doctor/report_terminal:many_findings_are_cut_to").within(text) and message(
        "doctor/report_terminal:many_findings_are_cut_to.2"
    ).within(text)
    assert "train.py:110" in screen(replace(VERDICT, findings=many), 110, everything=True)
    counted = [replace(finding, ms=None, certainty="counted") for finding in many]
    assert "\n3 more (--all lists them)\n" in screen(replace(VERDICT, findings=counted), 110)


def test_the_examples_of_the_words():
    found = doctest.testmod(words)
    assert found.attempted and not found.failed


def test_a_refused_replay_is_no_missing_gpu():
    bare = [replace(f, ms=None, certainty="counted") for f in VERDICT.findings]
    assert "prices need a GPU" not in screen(replace(VERDICT, findings=bare), 110)


def test_the_ceiling_names_what_it_leaves_out():
    """An fp32 product is no stall of the host: the step of the ceiling still has it."""
    precision = replace(VERDICT.findings[1], kind="precision", certainty="estimate")
    text = screen(replace(VERDICT, findings=[precision, VERDICT.findings[0]], together_ms=26.0), 200)
    (best,) = [line for line in text.splitlines() if line.startswith("CEILING")]
    assert "25.9 ms" in best and "1 precision" in best and "2 data" not in best
    (joint,) = [line for line in text.splitlines() if line.startswith("1+2 together")]
    assert "15.8 ms (2.65x)" in joint, "41.8 - 26.0 ms"
