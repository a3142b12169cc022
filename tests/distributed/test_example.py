"""The example runs as it is written, only shorter, alone and on two ranks; both take the same steps."""

import contextlib
import io
import runpy
from pathlib import Path

from gpubound import device as facts
from tests.distributed.processes import on_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_on_many.py"


def run() -> str:
    facts.interpreted = lambda: False  # the reference kernels: in the interpreter it would take a minute
    main = runpy.run_path(str(EXAMPLE))["main"]
    main.__globals__["STEPS"] = 5
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    return out.getvalue()


def test_train_on_many():
    (alone,), (first, second) = on_ranks(1, run), on_ranks(2, run)
    assert second == "" and alone.split("  ")[0] == "step 5"
    for line, ranks in ((alone, 1), (first, 2)):
        assert line.endswith(f"tokens {4 * 4 * 63} a step, {ranks} ranks\n")
    losses = [float(line.split("loss ")[1].split()[0]) for line in (alone, first)]
    assert abs(losses[0] - losses[1]) <= 2e-4 and losses[1] < 5.4
