"""A rank is killed at any moment, in each stage of a save too: the others end, what is saved is whole, and the run goes on."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import gpubound as gb
from gpubound.distributed import join, sharded_checkpoint
from gpubound.train.checkpoint import Checkpoints, checkpoints, files, files as one_file
from tests.distributed.processes import RankFailed, on_ranks, started
from tests.messages import message
from tests.train.runs import build_corpus

KILLS = int(os.environ.get("KILLS", "0"))
STEPS = 12 + 8 * KILLS
SAVED_EVERY = 2


class Next(nn.Module):
    """Guesses a word by the one before it."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(300, 16), nn.Linear(16, 300)

    def forward(self, words):
        return self.head(torch.tanh(self.table(words)))


def loss(model, batch):
    words, labels = batch["input_ids"], batch["labels"]
    summed = nn.functional.cross_entropy(
        model(words).flatten(0, 1), labels.flatten().long(), reduction="sum", ignore_index=-100
    )
    return summed, (labels >= 0).sum()


def trained(folder, fate=(None, None, None)):
    """Train on from the newest checkpoint; rank 0 writes down each loss. `fate`: the rank, moment and step of a kill."""
    victim, moment, fatal = fate
    with join("cpu") as ranks:
        torch.manual_seed(0)
        step = gb.TrainStep(model := Next(), loss, gb.AdamW(lr=1e-2), precision="fp32", graph="off", ranks=ranks)
        feed = gb.Corpus.open(folder / "corpus").batches(16, 4, device="cpu", rank=ranks.rank, world=ranks.world)
        checkpoints, done = Checkpoints(folder / "checkpoints"), 0
        if found := checkpoints.latest():
            tensors, done = found.tensors(), found.step
            assert ranks.of_first(done) == done
            model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
            step.load_state_dict({name[5:]: t for name, t in tensors.items() if name.startswith("step.")})
            feed.load_state_dict(found.facts)
        if victim == ranks.rank and moment == "write":
            plain = one_file.write_tensors
            one_file.write_tensors = lambda tensors, path: (plain(tensors, path), done >= fatal and die())
        while done < STEPS:
            done += 1
            if victim == ranks.rank and moment == "step" and done == fatal:
                die()
            said = step(feed).read()
            if ranks.first:
                with open(folder / "losses", "a") as file:
                    file.write(json.dumps([done, said.loss]) + "\n")
                if done % SAVED_EVERY == 0:
                    named = {f"model.{name}": t for name, t in model.state_dict().items()}
                    named |= {f"step.{name}": t for name, t in step.state_dict().items()}
                    checkpoints.save(done, named, feed.state_dict())
        checkpoints.wait()
        ranks.wait()
        step.close()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def losses(folder):
    return [json.loads(line) for line in (folder / "losses").read_text().splitlines()]


def kill_one(folder, rng):
    """Some milliseconds after the first new loss, whatever the ranks are at."""
    before = len(losses(folder)) if (folder / "losses").exists() else 0
    processes, pipes, store = started(2, trained, folder)
    until = time.monotonic() + 60
    while not (folder / "losses").exists() or len(losses(folder)) == before:
        assert time.monotonic() < until and all(process.is_alive() for process in processes)
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.08))
    victim = rng.randrange(2)
    processes[victim].kill()
    return processes, pipes, store, victim


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of the run that nobody disturbs, by step."""
    folder = tmp_path_factory.mktemp("whole")
    build_corpus(folder / "corpus")
    on_ranks(2, trained, folder)
    assert [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
    return folder, dict(losses(folder))


def test_a_run_whose_ranks_are_killed_goes_on_as_if_they_had_not_been(whole, tmp_path):
    (tmp_path / "corpus").symlink_to(whole[0] / "corpus")
    rng = random.Random(7)
    ended = []
    for fate in [(0, "step", 4), (1, "step", 6), (0, "write", 8)] if not KILLS else [None] * KILLS:
        if fate is None:
            processes, _pipes, _store, victim = kill_one(tmp_path, rng)
        else:
            processes, _pipes, _store = started(2, trained, tmp_path, fate)
            victim = fate[0]
        for process in processes:
            process.join(60)
        assert processes[victim].exitcode == -signal.SIGKILL
        assert processes[1 - victim].exitcode is not None  # it hangs no longer than the other lives
        newest = Checkpoints(tmp_path / "checkpoints").latest()
        ended.append((victim, losses(tmp_path)[-1][0], newest and newest.step))
    on_ranks(2, trained, tmp_path)
    print(f"killed (rank, after step, newest checkpoint): {ended}")
    found = losses(tmp_path)
    assert sorted({step for step, _ in found}) == list(range(1, STEPS + 1)) and found[-1][0] == STEPS
    assert len(found) > STEPS or KILLS  # some were done again
    for step, value in found:
        assert value == pytest.approx(whole[1][step], rel=1e-6)
    assert not list((tmp_path / "checkpoints").glob(".step-*"))  # the next writer has swept up


STAGES = [
    # who is killed, at which call, before or behind it, whether the checkpoint is there
    (1, checkpoints.Staging, "give", "before", False),
    (1, sharded_checkpoint._SavePlanner, "resolve_data", "before", False),  # its file is open
    (1, files, "flushed", "behind", False),  # its files are on disk, but it has not said so
    (0, os, "replace", "before", False),  # all have said so
    (0, os, "replace", "behind", True),
]


def die_here(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed(owner, name, when):
    whole = getattr(owner, name)
    setattr(owner, name, die_here if when == "before" else lambda *given: (whole(*given), die_here()))


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
