"""A model that a script has wrapped in DistributedDataParallel, given to TrainStep."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gpubound as gb
from gpubound import trace
from tests.distributed.processes import on_ranks
from tests.messages import message, refusal

RATE, STEPS, WORLD = 0.3, 3, 2


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def micro_batch(step, rank, device="cpu"):
    g = torch.Generator().manual_seed(10 * step + rank)
    rows = 2 + 3 * rank  # ranks have different numbers of items: the mean over all is not the mean of their means
    return torch.randn(rows, 5, generator=g).to(device), torch.randint(3, (rows,), generator=g).to(device)


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


def trained(device):
    """Losses and weights of a step that is given the script's own wrapper, and that wrapper."""
    model = DistributedDataParallel(made(dist.get_rank()).to(device))
    step = gb.TrainStep(model, loss, partial(torch.optim.SGD, lr=RATE), precision="fp32")
    losses = [step(micro_batch(number, dist.get_rank(), device)).read().loss for number in range(STEPS)]
    weights = [p.detach().cpu().numpy().copy() for p in model.parameters()]
    step.close()
    return losses, weights, model


def wrapped():
    """The same, then what is refused, and the warning of a step that has no ranks."""
    dist.init_process_group("gloo")
    losses, weights, model = trained("cpu")
    said = [refused(model) for model in (nn.Sequential(model), hooked(made(0)))]
    gb.TrainStep(fully_shard(made(0)), loss, precision="fp32").close()  # its parameters know their ranks: no warning
    assert not any("trains alone" in line for line in trace._printed)
    gb.TrainStep(made(0), loss, precision="fp32").close()
    said += [line for line in trace._printed if line.startswith("train: ") and ("Distributed" in line or "ranks" in line)]
    return losses, weights, sorted(said)


def wrapped_on_gpus():
    torch.cuda.set_device(own := int(os.environ["RANK"]))
    dist.init_process_group("nccl")
    losses, weights, _ = trained(f"cuda:{own}")
    dist.destroy_process_group()
    return losses, weights


def hooked(model):
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, halved)
    return model


def halved(state, bucket):
    raise AssertionError("nobody calls it")


def refused(model):
    return refusal(ValueError, lambda: gb.TrainStep(model, loss, precision="fp32"))


def one_process():
    """The losses and weights of one process that has all items, in fp64."""
    model = made(0).double()  # the first rank's weights are everyone's
    wanted = []
    for number in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(micro_batch(number, rank) for rank in range(WORLD))))
        mean = nn.functional.cross_entropy(model(x.double()), y)
        wanted.append(mean.item())
        for p, grad in zip(model.parameters(), torch.autograd.grad(mean, list(model.parameters()))):
            p.data -= RATE * grad
    return wanted, [p.detach().float() for p in model.parameters()]


def check(losses, weights):
    wanted, their = one_process()
    assert losses == pytest.approx(wanted, rel=1e-6)
    for weight, p in zip(weights, their):
        torch.testing.assert_close(torch.tensor(weight), p, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_model_in_ddp_on_gpus():
    for losses, weights in on_ranks(WORLD, wrapped_on_gpus):
        check(losses, weights)


def test_a_model_in_ddp_takes_the_steps_of_one_process_with_all_items():
    for losses, weights, said in on_ranks(WORLD, wrapped):
        check(losses, weights)
        assert said == [
            message("parallel/wrapped:a_model_in_ddp_takes_the"),
            message("parallel/wrapped:a_model_in_ddp_takes_the.2"),
            message("parallel/wrapped:a_model_in_ddp_takes_the.3"),
            message("parallel/wrapped:a_model_in_ddp_takes_the.4"),
        ]


def test_data_parallel_is_refused_with_the_way_out():
    assert refused(nn.DataParallel(made(0))) == message("parallel/wrapped:data_parallel_is_refused")
