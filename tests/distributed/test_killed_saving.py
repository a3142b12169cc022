"""kill -9 of a rank in each stage of a sharded checkpoint: what was whole stays whole, and nobody waits for the dead."""

import os
import shutil
import signal

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from gpubound.distributed import join, sharded_checkpoint
from gpubound.train.checkpoint import Checkpoints, checkpoints, files
from tests.distributed.processes import RankFailed, on_ranks, started
from tests.messages import message

STAGES = [
    # who is killed, at which call, before or behind it, whether the checkpoint is there
    (1, checkpoints.Staging, "give", "before", False),
    (1, sharded_checkpoint._SavePlanner, "resolve_data", "before", False),  # its file is open
    (1, files, "flushed", "behind", False),  # its files are on disk, but it has not said so
    (0, os, "replace", "before", False),  # all have said so
    (0, os, "replace", "behind", True),
]


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed(owner, name, when):
    whole = getattr(owner, name)
    setattr(owner, name, die if when == "before" else lambda *given: (whole(*given), die()))


def saves(folder, wanted, stage=None):
    """Check what is there, save it anew as the next step, and be killed in the one after that."""
    with join("cpu") as ranks:
        model = fully_shard(nn.Linear(4, 5))
        store = Checkpoints(folder, ranks=ranks)
        newest = store.latest()
        assert (newest.step if newest else 0) == wanted
        if newest is not None:
            (weight,) = newest.tensors(begin=("weight",)).values()
            assert weight.eq(wanted).all()
        store.clean()
        for step in (wanted + 1, wanted + 2):
            if step == wanted + 2 and stage is not None and ranks.rank == STAGES[stage][0]:
                be_killed(*STAGES[stage][1:4])
            for p in model.parameters():
                torch.nn.init.constant_(p.data.to_local(), float(step))
            store.save(step, model.state_dict(), {}, wait=True)


def test_a_rank_killed_in_any_stage_leaves_the_last_whole_checkpoint(tmp_path):
    wanted = 0
    for stage, (victim, _, name, when, there) in enumerate(STAGES):
        processes, pipes, _store = started(2, saves, tmp_path, wanted, stage)
        for process in processes:
            process.join(60)
        assert processes[victim].exitcode == -signal.SIGKILL, (name, when)
        other = pipes[1 - victim].recv()
        if not there:  # it was waiting for the dead one, and heard that it is gone
            assert isinstance(other, RankFailed) and message("parallel/killed_saving:a_rank_killed_in_any_sta").within(
                str(other)
            ), (name, when, other)
        wanted += 2 if there else 1
    on_ranks(2, saves, tmp_path, wanted)
    assert not list(tmp_path.glob(".step-*"))


def test_leftovers_are_removed_with_a_line(tmp_path, capsys):
    for name in ("step-00000003", ".step-00000004.77", ".step-00000005.78"):
        (tmp_path / name).mkdir()
    Checkpoints(tmp_path).clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert capsys.readouterr().err == message("parallel/killed_saving:leftovers_are_removed_wi", tmp_path)
    Checkpoints(tmp_path).clean()
    assert not capsys.readouterr().err
    shutil.rmtree(tmp_path)
    Checkpoints(tmp_path).clean()
