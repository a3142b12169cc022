"""Layers with low-rank adapters that are not PEFT's."""

from contextlib import contextmanager

import torch
from torch import nn

from gpubound.layers.fused_weights import READERS, LinearSite
from gpubound.layers.linear_product import linear
from gpubound.lora.adapter import LowRank
from gpubound.train.offload import recompute_from


class Adapted(nn.Module):
    """An nn.Linear and its adapters, as PEFT's layers are read."""

    def __init__(self, base, *adapters):
        super().__init__()
        self.base_layer, self.adapters = base, list(adapters)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return linear(x, self.weight, self.bias, self.adapters)


READERS[Adapted.__module__, Adapted.__qualname__] = lambda layer: LinearSite(layer.weight, layer.bias, layer.adapters)


def low_rank(inputs, outputs, rank=4, seed=5, dtype=torch.float32, scale=0.5, dropout=0.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (rank, inputs), (outputs, rank)
    a, b = (nn.Parameter((0.3 * torch.randn(shape, generator=generator)).to(dtype)) for shape in shapes)
    return LowRank(a, b, scale, nn.Dropout(dropout))


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(y, tensors):
    return torch.autograd.grad(y, tensors, draw(*y.shape, seed=9, dtype=y.dtype))


@contextmanager
def recomputing(model, least):
    """Let the parts of `model` recompute results of `least` bytes and more inside."""
    undo = recompute_from(model, least)
    try:
        yield
    finally:
        undo()
