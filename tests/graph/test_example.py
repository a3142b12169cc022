"""examples/capture_a_step.py runs, learns, and is refused when its weight moves."""

import re
from pathlib import Path

from tests.messages import message

from ..kernels.apart import apart

EXAMPLE = Path(__file__).parents[2] / "examples" / "capture_a_step.py"


def test_the_example():
    said = apart(f"import runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 3 and losses[-1] < 1.0  # from a variance of 16
    assert "agree bit for bit" in said
    assert message("graph/example:the_example").within(said)
