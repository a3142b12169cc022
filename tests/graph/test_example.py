"""examples/capture_a_step.py runs, learns, and is refused when its weight moves."""

import re
import runpy
from pathlib import Path

from tests.messages import message

EXAMPLE = Path(__file__).parents[2] / "examples" / "capture_a_step.py"


def test_the_example(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 1.0  # from a variance of 16
    assert "agree bit for bit" in printed
    assert message("graph/example:the_example").within(printed)
