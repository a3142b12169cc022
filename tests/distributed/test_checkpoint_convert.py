"""A TrainStep that goes on from a checkpoint of other ranks: one process, replicas, shards, each after another."""

from contextlib import nullcontext

import pytest
import torch

import gpubound as gb
from gpubound.distributed import ALONE, join
from gpubound.distributed.fsdp import shard
from gpubound.kernels.adamw import decode
from gpubound.models import Decoder, DecoderConfig
from gpubound.train.adamw import AdamW8bit
from gpubound.train.checkpoint import Checkpoints, joined, open_checkpoint
from gpubound.train.checkpoint.checkpoints import convert_tensors
from gpubound.train.offload import blocks_of
from tests.distributed.processes import on_ranks
from tests.distributed.test_fsdp import batch

MICRO = 4  # micro-batches of a step, whatever the number of ranks


def trained(folder, world, sharded, until, save=True, kind=gb.AdamW, seen=None):
    """Losses by step, from the newest checkpoint to step `until`; or `seen(step)`, then."""
    with join("cpu") if world > 1 else nullcontext(ALONE) as ranks:
        torch.manual_seed(5)
        model = Decoder(DecoderConfig(24, 40, 2, 4, 1, 26, tied=True))
        if sharded:
            shard(model, blocks_of(model), ranks, torch.float32)
        adamw = kind(lr=1e-2, weight_decay=0.1, eps=1e-4)  # with 1e-8 a gradient of nothing but noise moves by the rate
        each = ranks.share(MICRO)
        step = gb.TrainStep(model, "next_token", adamw, accumulate=each, clip=0.5, precision="fp32", graph="off", ranks=ranks)
        store, done, losses = Checkpoints(folder, ranks=ranks), 0, {}
        if found := store.latest():
            state = convert_tensors(found, joined(model=model.state_dict(), step=step.state_dict()))
            step.load_state_dict({name[5:]: t for name, t in state.items() if name.startswith("step.")})
            done = found.step
        for number in range(done + 1, until + 1):
            losses[number] = step([batch(number, ranks.rank + world * i) for i in range(each)]).read().loss
        if save:
            store.save(until, joined(model=model.state_dict(), step=step.state_dict()), {}, wait=True)
        result = seen(step) if seen else losses
        step.close()
        return result


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


def test_scales_are_read_whole(tmp_path):
    """As many scales may be another number of ranks', so they are never taken for this process's own."""
    live = {name: torch.zeros(4) for name in ("step.scale.m.0", "step.m.w")}
    Checkpoints(tmp_path).save(1, {name: torch.arange(4.0) for name in live}, {}, wait=True)
    got = convert_tensors(open_checkpoint(tmp_path / "step-00000001"), live)
    assert got["step.m.w"] is live["step.m.w"] and not live["step.scale.m.0"].any()
    assert got["step.scale.m.0"].tolist() == [0, 1, 2, 3]


def numbers(step):
    """Its moments as numbers, whole."""
    found = {}
    for kind, moments in (("m", step._optimizer.m8), ("v", step._optimizer.v8)):
        for group, coded in moments.items():
            flat = decode(coded.codes, coded.scales)
            views = {f"{kind}.{slot.name}": slot.view(flat, group.start) for slot in step._weights.layout.slots_of(group)}
            state = step._sharding.global_state(views)
            found |= {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    return {name: t.numpy() for name, t in found.items()}


def test_moments_in_8_bits_are_the_same_numbers_on_another_number_of_ranks(tmp_path):
    """Other numbers share a scale there, so they are coded again: a number moves by half a step of its code at most."""
    seen = []
    for world, sharded, until in ((1, False, 3), (2, True, 3), (2, True, 4), (4, True, 4), (1, False, 4)):
        args = tmp_path, world, sharded, until, len(seen) in (0, 2), AdamW8bit, numbers
        seen.append(on_ranks(world, trained, *args)[0] if world > 1 else trained(*args))
    for was, now in ((0, 1), (2, 3), (2, 4)):
        for kind, steps in (("m", 64), ("v", 128)):
            there = {name: t for name, t in seen[was].items() if name.startswith(kind)}
            most = max(abs(t).max() for t in there.values())
            assert max(abs(seen[now][name] - t).max() for name, t in there.items()) <= 0.51 * 7 / 8 / steps * most
            assert all(abs(t).max() > 0 for t in there.values())
    assert any((seen[2][name] != t).any() for name, t in seen[3].items())
