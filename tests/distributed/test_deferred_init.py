"""A model that is made in shards has the values of the model that one process makes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.distributed import join
from gpubound.distributed.fsdp import shard_deferred
from gpubound.models.llama import Decoder, DecoderConfig
from tests.distributed.processes import on_ranks

SHAPE = DecoderConfig(24, 40, 2, 4, 1, 26, tied=True, qkv_bias=True)
SMALL = 16, 24, 2, 2, 2, 26


class Computed(nn.Module):
    """Its weight is a product of random numbers."""

    def __init__(self, device):
        super().__init__()
        layer = nn.Linear(3, 3, device=device)
        layer.weight = nn.Parameter(torch.empty(3, 3, device=device).normal_().matmul(torch.ones(3, 3, device=device)))
        self.layers = nn.ModuleList([layer])


def made(make):
    with join("cpu") as ranks:
        torch.manual_seed(ranks.rank)  # the first rank's generator is everyone's
        model = shard_deferred(make, lambda model: getattr(model, "model", model).layers, ranks, torch.float32)
        drawn = torch.rand(3).tolist()
        weights = {name: p.full_tensor().detach().numpy().copy() for name, p in model.named_parameters()}
        if not isinstance(model, Decoder):
            return weights, drawn, None
        step = gb.TrainStep(model, "causal_lm", precision="fp32", ranks=ranks)
        return weights, drawn, step(words()).read().loss


def words():
    ids = torch.arange(12).view(2, 6)
    return {"input_ids": ids, "labels": ids}


def untied(device):
    return Decoder(replace(SHAPE, tied=False), device=device)


def tied(device):
    return Decoder(SHAPE, device=device)


@pytest.mark.parametrize("make", [tied, untied, Computed])
def test_shards_are_those_of_the_model_that_the_first_rank_makes(make):
    """Also of values that are computed, and from then on all generators are the first rank's."""
    torch.manual_seed(0)
    model = make("cpu")
    wanted, after = dict(model.named_parameters()), torch.rand(3).tolist()
    for theirs, drawn, loss in on_ranks(2, made, make):
        assert theirs.keys() == wanted.keys() and drawn == after
        for name, parameter in wanted.items():
            torch.testing.assert_close(torch.from_numpy(theirs[name]), parameter.data, rtol=0, atol=0, msg=name)
        if isinstance(model, Decoder):
            assert loss == pytest.approx(model.loss(**words()).item(), rel=1e-6)
