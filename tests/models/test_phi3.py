"""Phi-3, placed: stacked weights, partial rotation, longrope. tests/place has what every family is held to."""

import torch
from torch import nn

from tests.messages import message

from ..place.models import assert_close, batch, place, rows, tiny, tokens, training_run, twin

PAIRS = 4
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(PAIRS)],
    "long_factor": [2.0 + i for i in range(PAIRS)],
    "original_max_position_embeddings": 8,
}


def test_stacked_weights_stay_where_they_are():
    model = tiny("phi3")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    placement = place(model, strict=True)
    training_run(model, batch())
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    found = rows(placement)
    assert found["model.layers.0.self_attn"].kernel == message("models/phi3:stacked_weights_stay_whe")
    assert found["model.layers.0.mlp"].kernel == message("models/phi3:stacked_weights_stay_whe.2")
    assert "model.layers.0.mlp.gate_up_proj" not in found, "the MLP's row speaks for it"
    assert placement.fallbacks == 0 and placement.unsupported is None


def test_longrope_follows_the_length_of_each_batch():
    """Short, long and short again: no angle of one batch is kept for the next."""
    model = tiny("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=8)
    other = twin(model)
    placement = place(model, strict=True)
    losses = []
    for length in (6, 12, 6, 8, 9):
        want = training_run(other, batch(length=length))
        assert_close(training_run(model, batch(length=length)), want)
        losses.append(want["loss"])
    assert placement.fallbacks == 0
    for positions in (torch.arange(6)[None], torch.arange(6)[None] + 4):
        got, want = (m.eval()(tokens(length=6), position_ids=positions, use_cache=False).logits for m in (model, other))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_dropout_on_the_residual_keeps_its_own_loop():
    model = tiny("phi3", resid_pdrop=0.1)
    placement = place(model)
    found = rows(placement)
    assert found["model"].why == message("models/phi3:dropout_on_the_residual")
    assert found["model.layers.0.self_attn"].why.startswith("verified: ")


class Adapted(nn.Module):
    """An adapter in a projection's place."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.more = inner, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.inner(x) * (1 + self.more)


def test_adapted_projections_are_called():
    model = tiny("phi3")
    for layer in model.model.layers:
        layer.self_attn.qkv_proj = Adapted(layer.self_attn.qkv_proj)
        layer.mlp.gate_up_proj = Adapted(layer.mlp.gate_up_proj)
    want = training_run(twin(model), batch())
    placement = place(model)
    assert_close(training_run(model, batch()), want)
    assert rows(placement)["model.layers.0.self_attn"].kernel == message("models/phi3:adapted_projections_are")
