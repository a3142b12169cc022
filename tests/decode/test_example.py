"""examples/generate_from_a_model.py: the model learns its text, and the decoder speaks from the weights as they are."""

import re
import runpy
from pathlib import Path

import pytest

from tests.messages import message

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_from_a_model.py"
LEARNT = 0.5  # nats a byte; ten seeds end at 0.05 to 0.08, and an untrained model has 5.5


@pytest.fixture(autouse=True)
def kernels_path():
    """As its reader runs it."""


@pytest.mark.slow
def test_the_example(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr()
    assert message("decode/example:the_example").within(printed.out) and "greedy tokens equal" in printed.out
    steps = re.findall(r"step (\d+), loss ([\d.]+): ", printed.out)
    assert [int(step) for step, _ in steps] == [30, 60, 90, 120] and float(steps[-1][1]) < LEARNT
    assert re.search(r"\nlikeliest of 4: .*; 400 tokens by \d+ launches\n", printed.out)
    assert "no longer where it was" not in printed.err
