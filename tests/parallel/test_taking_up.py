"""A TrainStep that goes on from a checkpoint of other ranks: one process, replicas, shards, each after another."""

from contextlib import nullcontext

import pytest
import torch

import gpubound as gb
from gpubound.models import Decoder, DecoderConfig
from gpubound.parallel import ALONE, join
from gpubound.parallel.sharded import shard
from gpubound.train.checkpoint import Checkpoints, open_checkpoint
from gpubound.train.recompute import blocks_of
from gpubound.train.run import joined
from gpubound.train.taking_up import taken_up
from tests.parallel.processes import on_ranks

MICRO = 4  # micro-batches of a step, whatever the number of ranks


def batch(step, number):
    g = torch.Generator().manual_seed(100 * step + number)
    words, labels = torch.randint(26, (2, 6), generator=g), torch.randint(26, (2, 6), generator=g)
    labels[:, 6 - number % 4 :] = -100
    return {"input_ids": words, "labels": labels}


def trained(folder, world, sharded, until, save=True):
    """Losses by step, from the newest checkpoint to step `until`."""
    with join("cpu") if world > 1 else nullcontext(ALONE) as ranks:
        torch.manual_seed(5)
        model = Decoder(DecoderConfig(24, 40, 2, 4, 1, 26, tied=True))
        if sharded:
            shard(model, blocks_of(model), ranks, torch.float32)
        adamw = gb.AdamW(lr=1e-2, weight_decay=0.1, eps=1e-4)  # with 1e-8 a gradient of nothing but noise moves by the rate
        each = ranks.share(MICRO)
        step = gb.TrainStep(model, "next_token", adamw, accumulate=each, clip=0.5, precision="fp32", graph="off", ranks=ranks)
        store, done, losses = Checkpoints(folder, ranks=ranks), 0, {}
        if found := store.latest():
            state = taken_up(found, joined(model=model.state_dict(), step=step.state_dict()))
            step.load_state_dict({name[5:]: t for name, t in state.items() if name.startswith("step.")})
            done = found.step
        for number in range(done + 1, until + 1):
            losses[number] = step([batch(number, ranks.rank + world * i) for i in range(each)]).read().loss
        if save:
            store.save(until, joined(model=model.state_dict(), step=step.state_dict()), {}, wait=True)
        step.close()
        return losses


def test_one_process_replicas_and_shards_go_on_from_each_other(tmp_path):
    unbroken = trained(tmp_path / "unbroken", 1, False, 8, save=False)
    losses = {}
    for world, sharded, until in ((2, False, 2), (2, True, 4), (1, False, 6), (4, True, 8)):
        folder = tmp_path / "moved"
        each = on_ranks(world, trained, folder, world, sharded, until) if world > 1 else [trained(folder, 1, False, until)]
        assert all(other == each[0] for other in each)
        assert open_checkpoint(folder / f"step-{until:08d}").sharded is sharded
        losses |= each[0]
    assert losses == pytest.approx(unbroken, abs=1e-6) and len(losses) == 8
