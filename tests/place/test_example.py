"""The example runs, and says what it shows."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "place_a_llama.py"


@pytest.mark.slow
def test_place_a_llama(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "model.layers.*.self_attn (2)" in printed and "11 swapped, 0 refused" in printed
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 0.5 < losses[0]
    assert re.search(r"\{'model': \{'(cache|past_key_values) was given': 24\}\}", printed)
