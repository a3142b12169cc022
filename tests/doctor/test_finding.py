"""Findings and verdicts: what doctor.json holds, and what comes back from it."""

import json
import os
from dataclasses import replace

import pytest
import torch

from gpubound.doctor.finding import Finding, Verdict
from gpubound.errors import DataError
from gpubound.watch.events import Site
from tests.messages import message

LINE = Site(os.path.abspath("train.py"), 88, "step", "if loss.item() > best:", 89)
CLIP = Site(os.path.join(os.path.dirname(torch.__file__), "nn/utils/clip_grad.py"), 41, "clip_grad_norm_", "return norm", 41)
FOUND = Finding("sync", LINE, CLIP, "MulBackward0", None, 1.0, 2.5, "replayed", "item", "keep it on the device")
VERDICT = Verdict(
    "train.py", {"device": "H200"}, 41.8, {"shares": {"busy": 62.0}, "late": {}}, 25.9, [FOUND], 15.9,
    [replace(FOUND, kind="data", site=None, via=None, ms=None, certainty="counted")], ["2 of 61"], {"timed": 20},
    {"gputrace": "no CUDA GPU"}, 1.4, {"syncs": 3.0},
)  # fmt: skip


def test_a_verdict_comes_back_from_its_json_without_this_machines_folders():
    text = json.dumps(VERDICT.as_dict())
    assert os.getcwd() not in text and os.path.dirname(torch.__file__) not in text
    row = json.loads(text)["findings"][0]
    assert (row["file"], row["line"], row["count"], row["ms"], row["certainty"]) == ("train.py", 88, 1.0, 2.5, "replayed")
    assert row["via"]["file"] == "torch/nn/utils/clip_grad.py"
    back = Verdict.from_dict(json.loads(text))
    assert back.as_dict() == VERDICT.as_dict()
    assert back.findings[0].via.in_package == CLIP.in_package
    assert back.harmless[0].ms is None and back.harmless[0].line is None
    assert (back.step_ms, back.counts, back.unlocated) == (41.8, {"syncs": 3.0}, ["2 of 61"])


def test_a_line_of_backward_is_the_one_that_built_the_node():
    assert replace(FOUND, site=None, built=LINE).as_dict()["line"] == 88


def test_what_is_no_verdict_is_refused():
    with pytest.raises(DataError, check=message("doctor/finding:what_is_no_verdict_is_re")):
        Verdict.from_dict(VERDICT.as_dict() | {"version": 9})
    with pytest.raises(DataError, match="got None"):
        Verdict.from_dict([])
    broken = VERDICT.as_dict()
    del broken["findings"][0]["kind"]
    with pytest.raises(DataError, match=r"damaged \(KeyError: 'kind'\)"):
        Verdict.from_dict(broken)
    for name, value, said in [
        ("counts", [1], r"TypeError: counts is \[1\]"),
        ("counts", {"syncs": None}, "ValueError: syncs is None"),
        ("machine", None, "TypeError: machine is None"),
        ("step_ms", "fast", "ValueError: step_ms is 'fast'"),
        ("step_ms", float("nan"), "ValueError: step_ms is nan"),
        ("step_ms", 0, "ValueError: step_ms is 0"),
    ]:
        with pytest.raises(DataError, check=message("doctor/finding:what_is_no_verdict_is_re.2", said)):
            Verdict.from_dict(VERDICT.as_dict() | {name: value})
    with pytest.raises(ValueError, check=message("doctor/finding:what_is_no_verdict_is_re.3")):
        replace(FOUND, kind="snyc")
