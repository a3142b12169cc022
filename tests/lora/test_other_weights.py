"""Adapters whose layer has another weight than when they were added, or which have other parameters themselves."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import gpubound as gb

from ..place.models import assert_near, place, tiny, tokens
from .cases import adapted


class Two(nn.Module):
    """Two layers, and beside their forward the formula of what they and their adapters compute."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, device=device), nn.Linear(6, 5, device=device)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

    def wanted(self, x):
        for layer in (self.first, self.second):
            own = layer.lora.default
            x = x @ layer.weight.t() + layer.bias + own.scale * (x @ own.a.t()) @ own.b.t()
            x = torch.relu(x) if layer is self.first else x
        return x


def two(device="cpu"):
    return adapted(Two(device), rank=2)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def other_weight(model):
    model.first.weight = nn.Parameter(torch.randn(6, 8))


def other_half(model):
    model.second.lora.default.b = nn.Parameter(torch.randn(5, 2))


def pruned(model):
    prune.l1_unstructured(model.first, "weight", 0.5)


def normed(model):
    parametrizations.weight_norm(model.second)
    model.second.parametrizations.weight.original0.data.mul_(2)


@pytest.mark.parametrize("change", [other_weight, other_half, pruned, normed])
def test_they_follow_a_change(change):
    model = two()
    before = model(X)
    change(model)
    torch.testing.assert_close(model(X), model.wanted(X))
    assert not torch.allclose(model(X), before)
    with gb.lora.disable(model):
        off = model(X)
    torch.testing.assert_close(model(X), model.wanted(X))
    assert not torch.allclose(off, model.wanted(X))


def test_they_follow_a_model_that_leaves_the_meta_device():
    model = two("meta").to_empty(device="cpu")
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p)
    torch.testing.assert_close(model(X), model.wanted(X))


@pytest.mark.parametrize("which", ["all", "adapters", "weights"])
@pytest.mark.parametrize("parameters", [True, False])
def test_a_call_with_lent_parameters(which, parameters):
    """torch.func.functional_call puts tensors in the parameters' places for one call."""
    model, other = two(), two()
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    lent = {key: p for key, p in other.named_parameters() if which == "all" or (which == "adapters") == ("lora" in key)}
    mine = model(X)
    got = torch.func.functional_call(model, lent if parameters else {key: p.detach() for key, p in lent.items()}, (X,))
    want = copy.deepcopy(model)
    want.load_state_dict(lent, strict=False)
    torch.testing.assert_close(got, want.wanted(X))
    assert torch.equal(model(X), mine), "what was lent is gone"


@pytest.mark.parametrize("change", [other_weight, other_half, pruned, normed])
def test_copies_follow(change):
    model = two()
    change(model)
    for p in model.parameters():
        p.requires_grad_(False)  # what a hook has computed of one that trains cannot be copied
    model(X)
    model = copy.deepcopy(model)
    torch.testing.assert_close(model(X), model.wanted(X))


def test_what_was_lent_does_not_reach_a_copy_nor_a_captured_graph():
    model = two()
    lent = {key: p * 2 for key, p in model.named_parameters()}
    captured = gb.capture(lambda x: model(x), X)
    want = model(X)
    torch.func.functional_call(model, lent, (X,))
    assert torch.equal(captured(X), want)
    assert torch.equal(copy.deepcopy(model)(X), want)


def test_each_layer_of_a_weight_that_came_to_be_shared_has_its_own():
    model, other = two(), two()
    other.first.weight = model.first.weight
    for one in (model, other, model):
        torch.testing.assert_close(one(X), one.wanted(X))
        with gb.lora.disable(other):
            torch.testing.assert_close(model(X), model.wanted(X))


def test_gradients_of_lent_parameters():
    model = two()
    lent = dict(model.named_parameters())
    got = torch.func.grad(lambda lent: torch.func.functional_call(model, lent, (X,)).square().sum())(lent)
    for p in lent.values():
        p.requires_grad_(True)
    want = torch.autograd.grad(model.wanted(X).square().sum(), list(lent.values()))
    for (key, gradient), wanted in zip(got.items(), want, strict=True):
        torch.testing.assert_close(gradient, wanted, msg=key)


def test_a_placed_model_follows():
    model = tiny()
    place(model, strict=True)
    adapted(model)
    plain = adapted(tiny())
    torch.manual_seed(2)
    for key, layer in plain.named_modules():
        if key.endswith(("q_proj", "up_proj", "down_proj")):
            weight = torch.randn_like(layer.weight) / 5
            layer.weight.data.copy_(weight)
            model.get_submodule(key).weight = nn.Parameter(weight.clone())
    with torch.no_grad():
        assert_near(model(tokens()).logits, plain(tokens()).logits)
    with torch.no_grad(), gb.lora.disable(plain):
        assert not torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-3)
