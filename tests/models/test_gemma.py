"""Gemma 2, placed: capped scores and logits, windows by layer, gains of 1 + w. tests/place has what every family is held to."""

import pytest
import torch

from gpubound.models.hf_modules import HFShiftedNorm
from tests.messages import message

from ..place.models import assert_close, batch, place, rows, tiny, tokens, training_run, twin


def test_the_cap_on_scores_is_transformers_own():
    model, loose = tiny("gemma2"), tiny("gemma2", attn_logit_softcapping=None)
    want, uncapped = training_run(twin(model), batch()), training_run(loose, batch())
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), want)
    assert abs(want["loss"] - uncapped["loss"]) > 1e-3, "a cap of 0.5 shows"
    assert rows(placement)["model.layers.0.self_attn"].kernel == message("models/gemma:the_cap_on_scores_is_tra")
    assert placement.unsupported is None and placement.fallbacks == 0


@pytest.mark.parametrize("window", [5, 12])
def test_layers_with_a_window_and_without(window):
    model = tiny("gemma2", sliding_window=window)
    other = twin(model)
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    padded = {"input_ids": tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long).tril(9)}
    torch.testing.assert_close(model.eval()(**padded).logits, other.eval()(**padded).logits, rtol=1e-4, atol=1e-5)
    assert placement.fallbacks == 0 or model.config.use_cache


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_the_loss_of_capped_logits(cap):
    model = tiny("gemma2", final_logit_softcapping=cap)
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    assert placement.verified and rows(placement)["(the model)"].kernel.startswith("loss without whole logits")
    assert_close(training_run(model, batch()), want)


def test_scores_are_given_to_who_asks():
    model = tiny("gemma2")
    other = twin(model).eval()
    place(model, strict=True)
    got, want = (m.eval()(tokens(), output_attentions=True) for m in (model, other))
    assert len(got.attentions) == 2
    for a, b in zip(got.attentions, want.attentions):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("added", [False, True])
def test_a_gain_of_one_and_a_little_keeps_the_little(added):
    """1 + 2^-10 is 1 in bf16, and Gemma adds in fp32."""
    model = tiny("gemma2", torch.bfloat16)
    place(model, strict=True)
    norm = model.model.norm
    assert norm.part is HFShiftedNorm
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)
    x = torch.full((1, 32), 0.5)
    fine = norm.add(x, x)[0] if added else norm(2 * x)
    assert fine[0, 0].item() == pytest.approx(1 + 2.0**-10, abs=1e-5)


def test_16_bit_error_is_no_larger_than_before():
    model = tiny("gemma2", torch.bfloat16)
    truth, own = training_run(twin(model).float(), batch()), training_run(twin(model), batch())
    place(model, strict=True)
    got = training_run(model, batch())
    whole = [sum((g[name].float() - t).square().sum() for name, t in truth.items()).sqrt() for g in (got, own)]
    assert whole[0] <= 1.25 * whole[1]
