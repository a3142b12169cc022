"""Models with three adapters of different ranks and scales, and a batch whose rows have one of them each, or none."""

import torch
import torch.nn.functional as F
from torch import nn

import gpubound as gb
from gpubound.layers import Stacked
from gpubound.layers.fused_weights import Projecting

from ..layers.adapted import draw as draw
from ..place.models import place, tiny
from .cases import placed

NAMES = ["one", "two", "three"]
RANKS, ALPHAS = (4, 2, 3), (8, 3, 1)
IDS = torch.tensor([1, 0, -1, 2, 1, 0])
K = 24


def adapted(model, names=NAMES, **options):
    for i, name in enumerate(names):
        torch.manual_seed(i + 5)
        gb.lora.add(model, RANKS[i], alpha=ALPHAS[i], name=name, init=False, **options)
    return model


class Projections(Projecting):
    """q, k and v as one product."""

    def __init__(self, outputs=(16, 8, 8)):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleDict({name: nn.Linear(K, size) for name, size in zip("qkv", outputs)})
        self.stacked = Stacked()

    def projections(self):
        return list(self.layers.values())

    def forward(self, x):
        return self.stacked.product(x, self.projections())


def formula(model, x, ids, mask=None):
    """Row by row, as PEFT writes it, by autograd."""
    found = []
    for row, place_ in zip(range(len(x)), ids.tolist()):
        parts = []
        for layer in model.layers.values():
            y = F.linear(x[row], layer.weight, layer.bias)
            if place_ >= 0 and (name := NAMES[place_]) in getattr(layer, "lora_A", {}):
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                kept = x[row] if mask is None else x[row] * mask[row]
                y = y + layer.scaling[name] * (kept @ a.t()) @ b.t()
            parts.append(y)
        found.append(torch.cat(parts, -1))
    return torch.stack(found)


def assert_same(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **{"rtol": 1e-4, "atol": 1e-5} | tolerance)


def gradients(y, leaves):
    """Those that none of the rows has are zero."""
    made = torch.autograd.grad(y, leaves, draw(*y.shape, seed=9), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, made)]


def ours(order="placed first"):
    model = adapted(placed() if order == "placed first" else tiny())
    if order == "placed last":
        place(model, strict=True)
    return model
