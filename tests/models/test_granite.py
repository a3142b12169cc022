"""Granite: factors of embeddings, additions, scores and logits. tests/place and tests/decode have what holds for all."""

import pytest
import torch

import gpubound as gb

from ..decode import cases, conftest as of_decode
from ..place.models import assert_close, batch, place, tiny, training_run, twin

kernels_path = of_decode.kernels_path  # a fixture: the way that a GPU takes


@pytest.mark.parametrize("weights", [None, "int8"])
def test_log_probabilities_are_those_of_scaled_logits(weights, kernels_path):
    model = cases.build("Granite")
    fast = gb.decoder(model, 2, 32, weights=weights)
    (row,) = fast.generate([3, 1, 4], max_new_tokens=5, stop=(), logprobs=True, temperature=1.5, seed=1).sequences
    ids = [3, 1, 4, *row.tokens]
    own = cases.logits(model, ids)[2:-1].log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(row.logprobs), own, rtol=0, atol=1e-4 if weights is None else 0.2)
    torch.testing.assert_close(torch.tensor(fast.score([ids])[0][2:]), own, rtol=0, atol=1e-4 if weights is None else 0.2)


def test_factors_of_each_layer_are_read_when_it_runs():
    model = tiny("granite")
    placement = place(model, strict=True)
    model.model.layers[1].residual_multiplier = 0.9
    assert_close(training_run(model, batch()), training_run(released(model), batch()))
    assert placement.fallbacks == 0
    assert "residual_multiplier" in gb.decoder(model.eval(), 1, 16).path


def released(model):
    """The model with transformers' own classes."""
    other = twin(model)
    for module in other.modules():
        if hasattr(module, "original"):
            module.__class__ = module.original
    return other
