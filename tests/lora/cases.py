"""What several tests of adapters are made of."""

import copy
import io
from functools import cache

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.kernels.tensor_state import record_of
from gpubound.lora import layers

from ..place.models import assert_near, batch, place, tiny, tokens


def placed(**options):
    """Return a copy of a tiny model that is placed: placing verifies it, which takes 30 times as long."""
    return copy.deepcopy(_placed(*options.items()))


@cache
def _placed(*options):
    model = tiny(**dict(options))
    place(model, strict=True)
    return model


def adapted(model, seed=3, **options):
    """With b at random too, so that the adapters say something and all of their gradients are there."""
    torch.manual_seed(seed)
    gb.lora.add(model, **{"rank": 4, "alpha": 8, "init": False} | options)
    return model


def records(model):
    return [record_of(m.weight) for m in model.modules() if isinstance(m, nn.Linear)]


def adapted_layers(model):
    return [layer for _, layer in layers.adapted_layers(model)]


def folded(model):
    """Return a copy without adapters whose weights hold what these add."""
    deltas = {
        name: sum(layer.get_delta_weight(word) for word in layers.names_in(layer))
        for name, layer in layers.adapted_layers(model)
    }
    plain = copy.deepcopy(model)
    gb.lora.remove(plain)
    with torch.no_grad():
        for name, delta in deltas.items():
            plain.get_submodule(name).weight += delta
    return plain


def refusal(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def assert_it_adds_what_it_says(model, order, add, folded):
    """Placed before or after, or not at all, beside a plain model into whose weights the adapters are folded."""
    if order == "placed first":
        place(model, strict=True)
    add(model)
    if order == "added first":
        place(model, strict=True)
    want = folded(model)
    assert_near(model(tokens()).logits, want(tokens()).logits)
    with torch.no_grad():
        assert_near(model(tokens()).logits, want(tokens()).logits)


def assert_copies_keep_them(model):
    want = model(tokens()).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_near(other(tokens()).logits, want)
        with torch.no_grad():
            for p in gb.lora.parameters(other):
                p.zero_()
        assert not torch.allclose(other(tokens()).logits, want)
        torch.testing.assert_close(model(tokens()).logits, want, msg="the copy's adapters are its own")


def assert_a_step_trains_them_alone(ours):
    """Three steps of it have the losses that autograd and torch's AdamW have, and write nothing but adapters."""
    before, theirs = copy.deepcopy(ours.state_dict()), copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(gb.lora.parameters(theirs), lr=1e-2, weight_decay=0.0)
    config = gb.AdamW(lr=1e-2, weight_decay=0.0)
    step = gb.TrainStep(ours, "causal_lm", config, clip=None, precision="fp32", graph="off")
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(**batch()).loss
        loss.backward()
        optimizer.step()
        assert step(batch()).read().loss == pytest.approx(loss.item(), rel=1e-5)
    step.close()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name]) != (".lora_" in name), name
