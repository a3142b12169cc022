"""examples/denoise.py runs, and names the radius of what it draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

EXAMPLE = Path(__file__).parents[3] / "examples" / "denoise.py"


@pytest.mark.slow
def test_denoise():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([forked.python(), str(EXAMPLE)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("radius ") and len(EXAMPLE.read_text().splitlines()) < 50
