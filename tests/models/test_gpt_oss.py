"""gpt-oss, placed: attention with sinks, no masks in memory. tests/place and test_packed_rows.py have what all are held to."""

import pytest
import torch

from gpubound.layers.invariant import BatchInvariant
from gpubound.models import gpt_oss, layer_types

from ..place.models import assert_close, batch, place, tiny, tokens, training_run, twin


def made(**options):
    """The model before and after placing, with sinks that take half of the weights."""
    model = tiny("gpt_oss", **options)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(0.5, 2.5)
    other = twin(model)
    return other, model, place(model, strict=True)


@pytest.fixture
def calls(monkeypatch):
    """(window, whether rows are packed) of each call of the op; a mask in memory is an error."""
    seen = []

    def counted(q, k, v, sinks, scale, window, bounds):
        seen.append((window, bounds is not None))
        return op(q, k, v, sinks, scale, window, bounds)

    op = gpt_oss.sink_attention
    monkeypatch.setattr(gpt_oss, "sink_attention", counted)
    monkeypatch.setattr(layer_types, "MASKS", {})
    return seen


@pytest.mark.parametrize("window", [5, 12])
@pytest.mark.parametrize("ones", [False, True])
def test_training_makes_no_mask(window, ones, calls):
    other, model, placement = made(sliding_window=window)
    inputs = batch() | ({"attention_mask": torch.ones(2, 12, dtype=torch.long)} if ones else {})
    calls.clear()
    got, want = training_run(model, inputs), training_run(other, inputs)
    assert calls == [(window, False), (None, False)] and placement.fallbacks == 0
    assert_close(got, want)
    assert want["model.layers.0.self_attn.sinks"].norm() > 1e-3


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a_recomputed_layer_has_the_same_gradients(calls):
    other, model, _ = made()
    model.gradient_checkpointing_enable()
    calls.clear()
    assert_close(training_run(model, batch()), training_run(other, batch()))
    assert len(calls) == 4


def test_frozen_sinks(calls):
    other, model, _ = made()
    for m in (other, model):
        for layer in m.model.layers:
            layer.self_attn.sinks.requires_grad_(False)
    got = training_run(model, batch())
    assert "model.layers.0.self_attn.sinks" not in got
    assert_close(got, training_run(other, batch()))


def test_autocast_computes_attention_in_16_bits():
    """Both round their products' inputs to bf16, 2^-9 each; the model's own softmax is rounded, too."""
    other, model, _ = made()
    want = training_run(other, batch())
    with torch.autocast("cpu", torch.bfloat16):
        got, own = training_run(model, batch()), training_run(other, batch())
    error, before = ((run["loss"] - want["loss"]).abs().item() for run in (got, own))
    assert error <= 2 * before + 1e-2


@pytest.mark.parametrize("case", ["mask", "positions", "dropout", "exact"])
def test_what_the_loop_leaves_to_transformers(case):
    """transformers' own forward looks for no packed rows in position_ids: a token attends to those before a restart."""
    other, model, placement = made(attention_dropout=0.3 if case == "dropout" else 0.0)
    inputs = batch()
    if case == "mask":
        inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.long).tril(9)
    if case == "positions":
        inputs["position_ids"] = torch.arange(6).repeat(2, 2)
    if case == "exact":
        with BatchInvariant(), pytest.raises(ValueError, match="leave exact out"):
            model.train()(tokens())
        return
    assert_close(training_run(model, inputs), training_run(other, inputs))
    assert (placement.fallbacks > 0) is (case != "mask")
