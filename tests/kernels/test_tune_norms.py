"""The tuning script runs: its arguments, its sweep through OVERRIDE, its lines. What it finds, only a GPU can say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def tune(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.tune_norms", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are the interpreter's; numpy 2.5 broke triton 3.6's")
def test_a_dry_run_prints_a_line_a_case():
    done = tune("--dry", "--ops", "add_rms_norm")
    assert done.returncode == 0, done.stderr
    forward, backward = done.stdout.splitlines()
    plan = r"\d+ rows( x \d/SM)? x \d warps \d+\.\d us"
    assert re.fullmatch(
        rf"add_rms_norm forward 3x40: best {plan}, today {plan}, worst {plan}; best \d+ GB/s of x\+r\+s\+y = 0\.0 MB; 4 plans",
        forward,
    )
    assert backward.endswith("GB/s of dy+ds+s+dx = 0.0 MB; 9 plans")


def test_an_unknown_op():
    done = tune("--ops", "rms_norm,norm")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "tune_norms.py: error: --ops: got norm, wanted some of rms_norm, add_rms_norm, layer_norm"
    )
