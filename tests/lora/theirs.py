"""Gradients of adapters under the names and in the forms of PEFT's files, to compare with PEFT's own."""

import copy

import torch

from gpubound.lora.pairs import pairs


def filed_gradients(model):
    """Of ours, by the forms in which values are filed: these move numbers and change none."""
    found, there = {}, pairs(model, None, "test")
    layers = {key: adapters.layer for key, adapters, _ in there}
    for key, adapters, own in there:
        gradients = copy.deepcopy(own)
        for name, parameter in own.named_parameters():
            getattr(gradients, name).data = parameter.grad
        path = f"base_model.model.{adapters.filed_under(key, layers)}"
        found.update({f"{path}.{half}": gradients.filed(half).clone() for half in own.HALVES})
    return found


def gradients_of(theirs):
    return {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs, rtol=1e-4, atol=1e-4):
    got, want = filed_gradients(ours), gradients_of(theirs)
    assert got.keys() == want.keys()
    for name, truth in want.items():
        torch.testing.assert_close(got[name], truth, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
