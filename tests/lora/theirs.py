"""Gradients of adapters under the names and in the forms of PEFT's files, to compare with PEFT's own."""

import copy

from gpubound.lora.pairs import pairs

from ..place.models import assert_close


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
    there = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return {name.replace("_vector.weight", "_vector"): gradient for name, gradient in there.items()}


def assert_same_gradients(ours, theirs):
    """To 1e-4 of each one's norm: ten times what the order of sums in fp32 makes of them."""
    assert_close(filed_gradients(ours), gradients_of(theirs), 1e-4)
