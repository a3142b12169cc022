"""examples/generate_from_a_model.py: what the model has learned is heard at once."""

import re
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_from_a_model.py"


def test_the_example(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr()
    assert "path: fused kernels over the live weights" in printed.out and "greedy tokens equal" in printed.out
    heard = re.findall(r"step \d+: '(.*)'", printed.out)
    assert len(heard) == 4 and len(set(heard)) > 2
    assert heard[-1].startswith(" reads the weights where they lie")
    assert "of 4: ' reads the" in printed.out and "400 tokens by" in printed.out
    assert "no longer where it was" not in printed.err
