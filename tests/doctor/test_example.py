"""examples/slow_loop.py: the doctor finds each of its lines without a GPU, too, and nothing else."""

import json
from pathlib import Path

import pytest

from gpubound.cli import main
from gpubound.watch.pretend import simgpu
from tests.messages import message

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_loop.py"


@pytest.mark.slow
def test_slow_loop(capsys, monkeypatch):
    simgpu()
    monkeypatch.chdir(EXAMPLE.parents[1])
    assert main(["doctor", "--dry-run", "--fix", "--json", "examples/slow_loop.py", "32", "2"]) == 0
    out, err = capsys.readouterr()
    lines = EXAMPLE.read_text().splitlines()
    found = [
        (finding["kind"], lines[finding["line"] - 1].split()[0], finding["count"]) for finding in json.loads(out)["findings"]
    ]
    assert found[:3] == [("h2d", "tokens,", 2), ("sync", "total", 1), ("sync", "hits", 1)]
    assert all(kind == "sync" and line.startswith("print") and count < 0.2 for kind, line, count in found[3:])  # each 20th step
    assert "shuffle=True, pin_memory=True" in err and message("doctor/example:slow_loop").within(err)
    assert len(lines) < 50
