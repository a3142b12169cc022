"""Gemma 3's text model, placed: normed heads, angles and windows by layer. tests/place has what every family is held to."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.messages import message

from ..place.models import GEMMA, VOCABULARY, assert_close, batch, place, rows, tiny, tokens, training_run, twin

THETAS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}


def test_layers_have_angles_of_their_own():
    model, alike = tiny("gemma3", rope_parameters=THETAS), tiny("gemma3")
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), want)
    assert abs(want["loss"] - training_run(alike, batch())["loss"]) > 1e-3
    assert placement.fallbacks == 0 and placement.unsupported is None


@pytest.mark.parametrize("window", [5, 12])
def test_layers_with_a_window_and_without(window):
    model = tiny("gemma3", sliding_window=window, rope_parameters=THETAS)
    other = twin(model)
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    assert placement.fallbacks == 0
    for extra in (
        {"attention_mask": torch.ones(2, 12, dtype=torch.long).tril(9)},
        {"position_ids": torch.arange(12)[None] + 3},
    ):
        got, want = (m.eval()(tokens(), use_cache=False, **extra).logits for m in (model, other))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert placement.fallbacks == 0


def test_one_that_reads_both_ways_keeps_its_loop():
    model = tiny("gemma3", use_bidirectional_attention=True)
    other = twin(model)
    placement = place(model)
    found = rows(placement)
    assert found["model.layers.0.self_attn"].why.startswith("verified: ")
    assert found["model"].why == message("models/gemma3:one_that_reads_both_ways")
    assert_close(training_run(model, batch()), training_run(other, batch()))
    assert placement.fallbacks == 0


def test_changing_frequencies_keep_their_own_loop():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny("gemma3", rope_parameters=THETAS | {"full_attention": rope})
    want = training_run(twin(model), batch())
    placement = place(model)
    assert rows(placement)["model"].why == message("models/gemma3:changing_frequencies_kee")
    assert_close(training_run(model, batch()), want)


def test_within_a_model_that_sees():
    """Its text model brings its masks itself, so that the loop is transformers' own; the parts in it are ours."""
    text = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "pad_token_id": 0, **GEMMA}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    config = Gemma3Config(
        text_config=text, vision_config=vision | {"patch_size": 4}, mm_tokens_per_image=1, image_token_index=88
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    ids = tokens().clamp_max(80)
    want = model(input_ids=ids).logits
    placement = place(model, example={"input_ids": ids})
    assert placement.verified and placement.swapped > 10
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-5)
