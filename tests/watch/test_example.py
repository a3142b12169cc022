"""examples/assert_no_sync.py runs and finds its own careless line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import message

from .. import forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "assert_no_sync.py"


@pytest.mark.slow
def test_assert_no_sync():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # PYTHONPATH=src would lead nowhere from the example's folder
    done = subprocess.run(
        [forked.python(), str(EXAMPLE)], capture_output=True, text=True, timeout=120, cwd=EXAMPLE.parent, env=env
    )
    assert done.returncode == 0, done.stderr
    (line,) = [n for n, text in enumerate(EXAMPLE.read_text().splitlines(), 1) if "loss.item()" in text]
    careful, careless, guarded = done.stdout.strip().split("\n\n")
    assert careful == message("watch/example:assert_no_sync")
    assert careless.startswith("the careless step: over budget: syncs 1 (allowed 0).\n")
    assert message("watch/example:assert_no_sync.2", line).within(careless)
    assert guarded.startswith(
        f"under the guard: assert_no_sync.py:{line} in step: `best = min(best, loss.item())` makes the host wait"
    )
    assert len(EXAMPLE.read_text().splitlines()) < 50
