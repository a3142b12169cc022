"""Adapters whose layer has another weight than when they were added, or which have other parameters themselves."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import gpubound as gb

from .cases import adapted

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two layers, and the formula of what they and their adapters compute."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, device=device), nn.Linear(6, 5, device=device)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

    def wanted(self, x):
        for layer in (self.first, self.second):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            base = layer.base_layer
            x = x @ base.weight.t() + base.bias + layer.scaling["default"] * (x @ a.t()) @ b.t()
            x = torch.relu(x) if layer is self.first else x
        return x


def two(device="cpu"):
    return adapted(Two(device), rank=2)


def other_weight(model):
    model.first.base_layer.weight = nn.Parameter(torch.randn(6, 8))


def other_half(model):
    model.second.lora_B["default"].weight = nn.Parameter(torch.randn(5, 2))


def pruned(model):
    prune.l1_unstructured(model.first.base_layer, "weight", 0.5)


def normed(model):
    parametrizations.weight_norm(model.second.base_layer)
    model.second.base_layer.parametrizations.weight.original0.data.mul_(2)


@pytest.mark.parametrize("change", [other_weight, other_half, pruned, normed])
def test_they_follow_a_change(change):
    model = two()
    before = model(X)
    change(model)
    for p in model.parameters():
        p.requires_grad_(False)  # a weight that a hook computes of one that trains cannot be copied
    assert not torch.allclose(model(X), before)
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one(X), one.wanted(X))
        with gb.lora.disable(one):
            assert not torch.allclose(one(X), one.wanted(X))


def test_they_follow_a_model_that_leaves_the_meta_device():
    model = two("meta").to_empty(device="cpu")
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p)
    torch.testing.assert_close(model(X), model.wanted(X))


@pytest.mark.parametrize("which", ["", "lora_", "base_layer"])
def test_a_call_with_parameters_of_functional_call(which):
    model, other = two(), two()
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    passed = {key: p for key, p in other.named_parameters() if which in key}
    before, want = model(X), copy.deepcopy(model)
    want.load_state_dict(passed, strict=False)
    for values in (passed, {key: p.detach() for key, p in passed.items()}):
        torch.testing.assert_close(torch.func.functional_call(model, values, (X,)), want.wanted(X))
    assert torch.equal(model(X), before)


def test_gradients_by_torch_func():
    model = two()
    passed = dict(model.named_parameters())
    got = torch.func.grad(lambda passed: torch.func.functional_call(model, passed, (X,)).square().sum())(passed)
    for p in passed.values():
        p.requires_grad_(True)
    want = torch.autograd.grad(model.wanted(X).square().sum(), list(passed.values()))
    for (key, gradient), wanted in zip(got.items(), want, strict=True):
        torch.testing.assert_close(gradient, wanted, msg=key)
