"""What several tests of adapters are made of."""

import copy
from functools import cache, partial

import torch
from torch import nn

import gpubound as gb
from gpubound.kernels.accumulate import record_of
from gpubound.lora import layers

from .. import messages
from ..place.models import place, tiny


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


refusal = partial(messages.refusal, ValueError)
