"""Every family through TrainStep: placed, it learns what transformers' own modules learn."""

import pytest

import gpubound as gb

from ..place.models import place, tiny, tokens


def losses(model):
    step = gb.TrainStep(model.train(), "next_token", gb.AdamW(lr=1e-2), precision="fp32", accumulate=2)
    batches = ({"input_ids": t, "labels": t} for t in (tokens(seed=seed % 2) for seed in range(6)))
    return [float(step(batches).loss) for _ in range(3)]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "phi3", "olmo2"])
def test_three_steps(kind):
    model, other = tiny(kind), tiny(kind)
    place(model, strict=True)
    got, want = losses(model), losses(other)
    assert got == pytest.approx(want, rel=1e-5)
    assert want[2] < want[0] - 0.1, "the same batch, learnt"
