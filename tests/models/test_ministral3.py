"""Ministral 3: queries that are scaled by their position. tests/place has what every family is held to."""

import pytest
import torch

import gpubound as gb

from ..place.models import assert_close, batch, place, tiny, tokens, training_run, twin


def test_the_scale_of_later_queries():
    model = tiny("ministral3")  # from position 8 on
    other, alike = twin(model), tiny("ministral3")
    alike.config.rope_parameters = alike.config.rope_parameters | {"llama_4_scaling_beta": 0.0}
    placement = place(model, strict=True)
    model.eval(), other.eval(), alike.eval()
    for positions in (None, torch.arange(12)[None] + 20, torch.stack([torch.arange(12), torch.arange(12) + 9])):
        got, want, unscaled = (m(tokens(), position_ids=positions, use_cache=False).logits for m in (model, other, alike))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert (want - unscaled).abs().max() > 1e-2
    assert placement.fallbacks == 0
    want = training_run(twin(other), batch(length=8))
    assert_close(training_run(model, batch(length=8)), want)


def test_an_attention_of_another_implementation_is_called():
    model = tiny("ministral3")
    other = twin(model).eval()
    placement = place(model, strict=True)
    for one in (model.eval(), other):
        one.config._attn_implementation = "eager"
    got, want = (m(tokens(), use_cache=False).logits for m in (model, other))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert placement.fallbacks > 0


def test_texts_that_reach_the_scale_are_not_decoded_by_the_kernels():
    fast = gb.decoder(tiny("ministral3").eval(), 1, 12)
    assert "scaled beyond 8 tokens, and max_length is 12" in fast.path
    assert gb.decoder(tiny("ministral3").eval(), 1, 8).path == ""
    with pytest.raises(ValueError, match="scaled beyond 8"):
        gb.decoder(tiny("ministral3").eval(), 1, 12, weights="int8")
