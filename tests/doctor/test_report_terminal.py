"""The verdict on one screen."""

import doctest
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from gpubound.doctor.report import words
from gpubound.doctor.report.terminal import screen

from .verdicts import ITEM, judged, looped

VERDICT = replace(judged(*looped()), step_ms=41.8, ceiling_ms=25.9, together_ms=15.9, unlocated=("2 of 61 calls: 0.2 ms.",))
PRICES = (6.9, 4.1, 1.7)
VERDICT = replace(VERDICT, findings=[replace(f, ms=ms) for f, ms in zip(VERDICT.findings, PRICES)])


def test_the_screen():
    shares = {"busy": 62.0, "host_late": 31.0, "device_side": 4.0, "comm": 0.0, "unlocated": 3.0}
    verdict = replace(VERDICT, bar={"shares": shares, "late": {}})
    assert (
        screen(verdict, 110, files=["doctor.html", "doctor.json"])
        == """\
doctor  train.py --cfg small
NVIDIA H200 · torch 2.11
A recorded step took 1.4 times as long as a timed step; prices are for timed steps.
STEP 41.8 ms   GPU busy 62%   host late 31%   device-side 4%   comm alone 0%   unlocated 3%
CEILING 25.9 ms (1.61x) if the host never stalled

#  ms/step  kind      where                                            fix
1     6.90  data      train.py:61                                      DataLoader(num_workers=4,
            1 a step  for batch in loader:                             pin_memory=True)
            replayed
2     4.10  sync      train.py:90                                      pass error_if_nonfinite=False
            1 a step  clip_grad_norm_(parameters, 1.0)
            replayed  via utils/clip_grad.py:41 clip_grad_norm_
3     1.70  sync      train.py:88                                      keep best on the device  [patch]
            1 a step  if loss.item() > best:
            replayed
1+2+3 together: 15.9 ms a step (alone they add up to 12.7 ms)
harmless: train.py:102  print(loss.item()), 0.25 a step, 0.0 ms
2 of 61 calls: 0.2 ms.
without gputrace: not on this build
written: doctor.html, doctor.json
"""
    )


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
    assert "no finding" in screen(verdict) and "harmless: 6 more (--all lists them)" in screen(verdict)
    assert screen(verdict, everything=True).count("harmless:") == 9


def test_many_findings_are_cut_to_a_screen():
    many = [replace(VERDICT.findings[0], ms=20.0 - n, site=replace(ITEM, line=100 + n)) for n in range(11)]
    text = screen(replace(VERDICT, findings=many), 110)
    assert "train.py:107" in text and "train.py:108" not in text and len(text.splitlines()) < 45
    assert "3 more, the dearest of them 12.0 ms (--all lists them)" in text and "11 priced ones together: 15.9 ms" in text
    assert "train.py:110" in screen(replace(VERDICT, findings=many), 110, everything=True)
    counted = [replace(finding, ms=None, certainty="counted") for finding in many]
    assert "\n3 more (--all lists them)\n" in screen(replace(VERDICT, findings=counted), 110)


def test_the_examples_of_the_words():
    found = doctest.testmod(words)
    assert found.attempted and not found.failed


def test_a_refused_replay_is_no_missing_gpu():
    bare = [replace(f, ms=None, certainty="counted") for f in VERDICT.findings]
    assert "prices need a GPU" not in screen(replace(VERDICT, findings=bare), 110)
