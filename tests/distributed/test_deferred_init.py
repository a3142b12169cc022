"""A model made on the meta device has the values of the same model made on a real one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.distributed import join
from gpubound.distributed.fsdp import InitRecorder, key_of, shard_deferred
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.models.richards import RichardsConfig, RichardsDecoder
from tests.distributed.processes import on_ranks
from tests.messages import message

SHAPE = DecoderConfig(24, 40, 2, 4, 1, 26, tied=True, qkv_bias=True)
SMALL = 16, 24, 2, 2, 2, 26
PARTS = RichardsConfig(*SMALL, mlp="moe", experts=3, norm="dyt")
CURVES = RichardsConfig(*SMALL, attention="poly", mlp="richards_glu", max_pos=4, gates=True)
RECURRENT = RichardsConfig(*SMALL, attention="rg_lru")


def values_of(make):
    """By name: as made on the meta device and drawn again, and as made at once. The generator then stands where it stood."""
    torch.manual_seed(5)
    with InitRecorder() as drawing:
        model = make("meta")
    drawn = dict(drawing.values(torch.device("cpu")))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    wanted = make("cpu")
    assert torch.equal(after, torch.get_rng_state())
    return {name: drawn[key_of(p)] for name, p in model.named_parameters()}, dict(wanted.named_parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda device: Decoder(SHAPE, device=device),
        lambda device: RichardsDecoder(PARTS, device=device),
        lambda device: RichardsDecoder(CURVES, device=device),
        lambda device: RichardsDecoder(RECURRENT, device=device),
        lambda device: nn.Sequential(nn.Linear(5, 7, device=device), nn.LayerNorm(7, device=device)),
    ],
    ids=["llama", "experts", "poly and curves", "recurrent", "torch"],
)
def test_values_are_those_of_the_model_made_at_once(make):
    drawn, wanted = values_of(make)
    assert drawn.keys() == wanted.keys()
    for name, parameter in wanted.items():
        torch.testing.assert_close(drawn[name], parameter.data, rtol=0, atol=0, msg=name)


def test_numbers_that_are_changed_behind_their_drawing_are_changed_again_and_others_are_drawn_in_their_order():
    def make(device):
        one, two = (nn.Parameter(torch.empty(5, device=device)) for _ in range(2))
        with torch.no_grad():
            one.uniform_(1, 2).log_().mul_(3)
            two.normal_()
            one.add_(1)
        return nn.ParameterList([one, two])

    drawn, wanted = values_of(make)
    for name, parameter in wanted.items():
        torch.testing.assert_close(drawn[name], parameter.data, rtol=0, atol=0, msg=name)


def orthogonal(device):
    return nn.ParameterList([nn.Parameter(torch.empty(3, 3, device=device).normal_().matmul(torch.ones(3, 3, device=device)))])


def dropped(device):
    """Random numbers a second time, in place: behind the first they would come out of their order."""
    return nn.ParameterList([nn.Parameter(torch.ones(3, device=device).bernoulli_(0.5))])


def made(make):
    with join("cpu") as ranks:
        torch.manual_seed(ranks.rank)  # the first rank's generator is everyone's
        try:
            model = shard_deferred(make, lambda model: model.model.layers, ranks, torch.float32)
        except ValueError as error:
            return str(error)
        weights = {name: p.full_tensor().detach().numpy().copy() for name, p in model.named_parameters()}
        step = gb.TrainStep(model, "causal_lm", precision="fp32", ranks=ranks)
        return weights, step(words()).read().loss


def words():
    ids = torch.arange(12).view(2, 6)
    return {"input_ids": ids, "labels": ids}


def untied(device):
    return Decoder(replace(SHAPE, tied=False), device=device)


def tied(device):
    return Decoder(SHAPE, device=device)


@pytest.mark.parametrize("make", [tied, untied])
def test_shards_of_a_model_that_was_never_whole_are_those_of_one_process(make):
    torch.manual_seed(0)
    model = make("cpu")
    wanted = dict(model.named_parameters())
    for theirs, loss in on_ranks(2, made, make):
        assert loss == pytest.approx(model.loss(**words()).item(), rel=1e-6)
        assert theirs.keys() == wanted.keys()
        for name, parameter in wanted.items():
            torch.testing.assert_close(torch.from_numpy(theirs[name]), parameter.data, rtol=0, atol=0, msg=name)


def test_values_that_are_computed_are_refused():
    for said in on_ranks(2, made, orthogonal):
        assert said == message("parallel/drawn:values_that_are_computed")


def test_values_that_are_drawn_again_in_place_are_refused():
    with InitRecorder() as drawing:
        (given,) = dropped("meta").parameters()
    with pytest.raises(ValueError, match="it is computed by aten::bernoulli_"):
        drawing.check("it", given)
