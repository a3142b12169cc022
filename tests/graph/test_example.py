"""examples/capture_a_step.py runs, learns, and is refused when its weight moves."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "capture_a_step.py"


def test_the_example():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[-1] < 1.0  # from a variance of 16
    assert "agree bit for bit" in done.stdout
    assert "refused: model.0.weight: got other memory than captured" in done.stdout
