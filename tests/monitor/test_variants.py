"""What a comparison says of losses: intervals by Student's t, seed by seed, and no more than they show."""

import math

import numpy as np
import pytest

from gpubound.monitor import RunTape
from gpubound.monitor.report import RESULT, T_95, LossDifference, Variants
from tests.messages import message


def test_t_holds_95_percent():
    """The density, integrated here, for each number of seeds."""
    for freedom, t in enumerate(T_95, 1):
        x = np.linspace(0, t, 20_001)
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
        inside = 2 * np.trapezoid(scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2), x)
        assert inside == pytest.approx(0.95, abs=1e-4)


def runs(tmp_path, **losses):
    """Made tapes: a loss for each seed, None for a run that failed."""
    found = {}
    for name, values in losses.items():
        found[name] = []
        for seed, loss in enumerate(values):
            tape = RunTape.create(tmp_path / name / str(seed), name=f"{name} {seed}")
            tape.append({"step": 1, "loss": 2.0, "tokens_per_s": 1000.0 if name == "base" else 800.0})
            result = {"variant": name, "seed": seed, "failed": loss is None, "held_out": loss, "parameters": 5_000, "steps": 1}
            tape.tell(**{RESULT: result})
            found[name].append(tape)
    return found


def test_seeds_are_paired(tmp_path):
    """Losses that move by 0.3 from seed to seed, and a difference of 0.05 at each: shown. The same losses out of order: not."""
    base = [2.0, 2.3, 2.6]
    made = runs(tmp_path, base=base, better=[1.95, 2.251, 2.549], chance=[2.25, 1.951, 2.549], one=[2.1, None, None])
    comparison = Variants(made)
    _, better, chance, one = comparison.as_dict()["variants"]
    pairs = [1.95 - 2.0, 2.251 - 2.3, 2.549 - 2.6]
    assert better["difference"] == pytest.approx(np.mean(pairs))
    assert better["interval_95"] == pytest.approx(4.303 * np.std(pairs, ddof=1) / math.sqrt(3))
    assert better["shown"] and not chance["shown"] and better["difference"] == pytest.approx(chance["difference"])
    assert better["spread"] == pytest.approx(np.std([1.95, 2.251, 2.549], ddof=1)) and better["speed"] == pytest.approx(0.8)
    assert one["failed"] == 2 and one["interval_95"] is None and not one["shown"] and comparison.failed
    said = str(comparison)
    assert (
        "better: 0.0500 below base" in said
        and message("monitor/variants:seeds_are_paired").within(said)
        and "no difference is shown" in said
    )
    page = comparison.report(tmp_path / "page.html").read_text()
    assert page.count('<span class="s0"><i class="key"></i></span>base') == 3, "a variant's runs share its colour"


def test_a_worse_one_is_called_worse(tmp_path):
    assert "worse by more" in str(Variants(runs(tmp_path, base=[1.0, 1.0], bad=[1.5, 1.51])))
    assert LossDifference.of([0.0, 0.0]).shown is False, "equal losses show no difference"
    assert message("monitor/variants:a_worse_one_is_called_wo").within(
        str(Variants(runs(tmp_path / "equal", base=[1.0], twin=[1.0])))
    )
