"""The example runs as it is written, only shorter."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_step.py"


def test_train_step(capsys):
    script = runpy.run_path(str(EXAMPLE))
    main = script["main"]
    main.__globals__["STEPS"] = 6
    main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0].rstrip(",")) for line in lines]
    assert lines[-1].startswith("step   6") and losses[-1] < losses[0] - 0.2
