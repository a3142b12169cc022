"""The tuning script runs: its arguments, its candidates, its contests, its lines. What it finds, only a GPU can say."""

import json
import re
import sys

import pytest
import torch

from benchmarks import tune_norms
from gpubound import measure
from tests.messages import message


@pytest.fixture
def tune(monkeypatch, capsys):
    """tune(*arguments) -> what it prints. The rate it compares with is not measured: tests/measure is about that."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(measure, "ceilings", lambda *_, **__: type("Known", (), {"copy_bytes_per_s": 1e12}))

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tune_norms.py", *arguments])
        tune_norms.main()
        return capsys.readouterr().out

    return call


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are the interpreter's; numpy 2.5 broke triton 3.6's")
def test_a_dry_run_prints_a_line_a_case(tune, tmp_path):
    said = tune("--dry", "--only", "group_norm,rope", "--ways", "backward", "--out", f"{tmp_path}/found.json")
    head, *lines = said.splitlines()
    assert re.fullmatch(r"2 cases, 4 plans; compiled in \d+ s, 0 did not", head)
    wanted = (
        r'group_norm .*\("group_norm", "backward", \(\), 0\): \(\d+, \d, "\w*"\),',
        r'rope .*\("rope", "", \(8,\), 0\): \(\d+, \d, \d\),',
    )
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line) and re.search(r" us +0\.0 % of copy  today x\d\.\d+  \d of \d plans ", line), line
    found = json.loads((tmp_path / "found.json").read_text())
    assert [case["wrong"] for case in found] == [[]] * 2  # each finalist agreed with torch's own


def test_an_unknown_op(tune, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        tune("--only", "rms_norm,norm")
    assert capsys.readouterr().err.splitlines()[-1] == message("kernels/tune_norms:an_unknown_op")
