"""gpt-oss, placed: attention with sinks, no masks in memory. tests/place and test_packed_rows.py have what all are held to."""

import copy
from functools import partial

import pytest
import torch

from gpubound.layers.invariant import BatchInvariant
from gpubound.layers.packed_attention import Segments
from gpubound.models import gpt_oss, layer_types
from gpubound.models.language_model import hidden_of

from ..place.models import assert_close, assert_near, batch, place, tiny, tokens, training_run, twin


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


def test_packed_rows_make_masks_only_for_transformers(calls, monkeypatch):
    """T x T numbers for each type of layer, which the placed model does not read."""
    made_masks, bias = [], Segments.bias
    monkeypatch.setattr(Segments, "bias", lambda self, *a: made_masks.append(a) or bias(self, *a))
    other, model, placement = made(sliding_window=5)
    inputs = {"input_ids": tokens(), "segment_ids": torch.arange(12).div(7, rounding_mode="floor").expand(2, 12)}
    inputs["cu_seqlens"] = torch.tensor([0, 7, 12, 19, 24], dtype=torch.int32)
    calls.clear()
    made_masks.clear()
    got = hidden_of(model.eval(), inputs)
    assert (made_masks, calls, placement.fallbacks) == ([], [(5, True), (None, True)], 0)
    assert_near(got, hidden_of(other.eval(), inputs), 1e-4)
    assert [window for _, window in made_masks] == [5, None]


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


@pytest.mark.parametrize("hooked", [False, True])
def test_experts_run_as_they_are_only_with_hooks(hooked, monkeypatch):
    other, model, _ = made()
    want, seen = training_run(other, batch()), []
    experts = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(experts, "forward", lambda *a, own=experts.forward: seen.append(1) or own(*a))
    if hooked:
        model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    assert_close(training_run(model, batch()), want)
    assert len(seen) == hooked
    assert want["model.layers.0.mlp.experts.gate_up_proj_bias"].norm() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_that_nobody_chose_have_no_gradient(dtype, device):
    """Of 4 experts 2 are chosen. Results and gradients are those of a loop over the experts in fp64."""
    experts = tiny("gpt_oss").model.layers[0].mlp.experts.to(device, dtype)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    ids = torch.tensor([[3, 0]] * 5 + [[0, 3]] * 4, device=device)
    shares = torch.linspace(0.1, 0.9, 18, device=device).view(9, 2).to(dtype).requires_grad_()
    exact = copy.deepcopy(experts).double()
    exact.config = copy.deepcopy(exact.config)
    exact.config._experts_implementation = "eager"
    leaves, wide = (x, shares), [t.detach().double().requires_grad_() for t in (x, shares)]
    y, want = gpt_oss.run_experts(experts, x, ids, shares, partial(gpt_oss.unit, experts)), exact(wide[0], ids, wide[1])
    g = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    y.backward(g)
    want.backward(g.double())
    # in bf16 about ten roundings of 2^-9 follow each other, forward and backward
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    assert_near(y, want, limit)
    for got, t in zip((*leaves, *experts.parameters()), (*wide, *exact.parameters())):
        assert_near(got.grad, t.grad, limit)
    assert experts.gate_up_proj_bias.grad[1:3].abs().max() == 0
