"""A run that stands still is ended with the rank, the step and the line; one that moves on is not."""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch

import gpubound as gb
from gpubound.distributed import join
from gpubound.distributed.failures import FOR_GPU, RankState, Watchdog, find_late_ranks
from gpubound.train.checkpoint import Checkpoints
from tests.distributed.processes import SECONDS, started
from tests.messages import message

SOON = timedelta(seconds=2)
LATER = timedelta(seconds=6)  # of ranks that take whole steps before one stands still


def read_a_file_for_ever(ranks):
    time.sleep(300)


def freeze(ranks):
    while ranks.watchdog._beat < 2:  # it has said where it is
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)


def standing_still(fate, folder, run, kind="cpu", deaf=False):
    """Rank 1 meets its fate in step 3, where rank 0 waits for it. deaf: rank 0 does not look whether it was judged."""
    rank = os.environ["RANK"]
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"note-{rank}"), "TORCHELASTIC_RUN_ID": run}
    with join(kind, SOON) as ranks:
        if deaf and ranks.rank == 0:
            ranks.watchdog._check = ranks.watchdog._write
        x = torch.ones(1, device=ranks.device)
        ranks.sum(x)  # NCCL's first call waits on the host until all are there
        ranks.wait()
        ranks.at(3, "reading a micro-batch")
        if ranks.rank == 1:
            fate(ranks)
        ranks.sum(x)
        ranks.at(3, FOR_GPU)
        x.tolist()


def note_of(folder, rank):
    return json.loads((folder / f"note-{rank}").read_text())["message"]


@pytest.mark.slow
def test_a_hung_rank_is_named_with_its_step_and_line_and_what_the_others_wait_in(tmp_path):
    """And by a rank that hears of the end of the one that judged before it hears the judgement. Both runs at once."""
    runs = []
    for deaf in (False, True):
        folder = tmp_path / str(deaf)
        folder.mkdir()
        runs.append((folder, started(2, standing_still, read_a_file_for_ever, folder, "gpubound-test", "cpu", deaf)))
    for folder, (processes, _, _store) in runs:
        assert [process.join(SECONDS) or process.exitcode for process in processes] == [1, 1]
        for note in [note_of(folder, rank) for rank in range(2)]:
            assert note["extraInfo"]["rank"] == 1 and note["extraInfo"]["kind"] == "hung"
            said = note["message"]
            assert said.startswith(
                "no step has ended within 2 s: rank 1 is reading a micro-batch in step 3, at tests/distributed"
            )
            assert message("parallel/watchdog:a_hung_rank_is_named_wit").within(said)
        assert message("parallel/watchdog:a_hung_rank_is_named_wit.2").within((folder / "stderr-1").read_text())
        assert (folder / "stderr-0").read_text() == ""  # the process that started it speaks


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_rank_that_never_comes_to_a_collective_of_nccl_is_named(tmp_path):
    """The other's host waits for its GPU, which waits for a GPU that was given nothing to do."""
    processes, _, _store = started(2, standing_still, read_a_file_for_ever, tmp_path, "gpubound-test", "cuda")
    assert [process.join(SECONDS) or process.exitcode for process in processes] == [1, 1]
    said = note_of(tmp_path, 0)["message"]
    assert message("parallel/watchdog:a_rank_that_never_comes").within(said)


@pytest.mark.slow
def test_a_frozen_rank_is_named_and_under_somebody_elses_torchrun_one_rank_says_so(tmp_path):
    processes, _, _store = started(2, standing_still, freeze, tmp_path, "theirs")
    processes[0].join(SECONDS)
    processes[1].kill()
    assert processes[0].exitcode == 1
    said = note_of(tmp_path, 0)["message"]
    assert message("parallel/watchdog:a_frozen_rank_is_named_a").within(said)
    assert (tmp_path / "stderr-0").read_text() == f"gpubound: {said}\n"


def loop_of_ones_own(what, folder):
    """Rank 0 does `what` behind the second of four steps."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"note-{os.environ['RANK']}")
    with join("cpu", LATER) as ranks:
        model = torch.nn.Linear(2, 2)
        step = gb.TrainStep(model, lambda m, x: (m(x).square().sum(), len(x)), precision="fp32", ranks=ranks)
        store = Checkpoints(folder, ranks=ranks)
        ranks.wait()
        for number in range(4):
            step(torch.ones(3, 2)).read()
            if number == 1 and ranks.first:
                what(store, model)


def save_alone(store, model):
    store.save(2, model.state_dict(), {})


def read_alone(store, model):
    time.sleep(300)


@pytest.mark.slow
def test_a_loop_of_ones_own_is_watched_where_it_calls_what_waits_for_others(tmp_path):
    """Two runs at once: each takes the time-out."""
    words = {save_alone: "waiting in new_group", read_alone: "busy with something else"}
    runs = {}
    for what in words:
        (tmp_path / what.__name__).mkdir()
        runs[what] = started(2, loop_of_ones_own, what, tmp_path / what.__name__)
    for what, (processes, _, _store) in runs.items():
        assert [process.join(SECONDS) or process.exitcode for process in processes] == [1, 1]
        said = note_of(tmp_path / what.__name__, 1)["message"]
        assert f"rank 0 is {words[what]} in step 2, at tests/distributed/" in said
        assert message("parallel/watchdog:a_loop_of_ones_own_is_wa", what.__name__).within(said)


def test_between_its_steps_a_loop_of_ones_own_may_do_what_it_likes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watchdog = Watchdog(0, 1, timedelta(minutes=10))
    monkeypatch.setattr(watchdog, "_thread", "nobody looks")
    with watchdog.timing("taking a step", 1):
        clock[0] += 601
        assert watchdog.late() == 601
    clock[0] += 601
    assert watchdog.late() < 0
    watchdog.at(2, "training")
    clock[0] += 601
    with watchdog.timing("taking a step", 1):
        assert watchdog.late() == 601, "what says where it is by itself is timed as ever"
    assert watchdog.late() == 601


def test_a_run_that_moves_on_is_not_late_and_after_its_last_step_it_may_rest(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watchdog = Watchdog(0, 1, timedelta(minutes=10))
    monkeypatch.setattr(watchdog, "_thread", "nobody looks")
    assert watchdog.late() == 0
    for step in range(1, 4):
        clock[0] += 500
        watchdog.at(step, "saving")
        assert watchdog.late() == 0
    clock[0] += 601
    assert watchdog.late() == 601
    watchdog.idle()
    assert watchdog.late() < 0


def place(step, beat, collective=None):
    return RankState(step, "saving", beat, f"a.py:{step} (f)", collective)


@pytest.mark.parametrize(
    "before, now, behind, words",
    [
        # all wait for each other in different steps: the one that is not as far as the others
        ([place(7, 1, "all_reduce"), place(6, 1, "barrier")], [place(7, 2, "all_reduce"), place(6, 2, "barrier")], [1],
         "rank 1 is waiting in barrier in step 6, at a.py:6 (f); the others are waiting in all_reduce in step 7"),
        # a GPU may wait for another's
        ([RankState(7, FOR_GPU, 1, "a", None), place(7, 1)], [RankState(7, FOR_GPU, 2, "a", None), place(7, 2)], [1],
         "rank 1 is saving in step 7, at a.py:7 (f); the others are waiting for the GPU in step 7, at a"),
        # nobody is behind: each is told
        ([place(7, 1), place(7, 1)], [place(7, 2), place(7, 2)], [0, 1],
         "rank 0 is saving in step 7, at a.py:7 (f); rank 1 is saving in step 7, at a.py:7 (f)"),
        ([place(7, 1), None], [place(7, 2), None], [1], "rank 1 is not in a step yet; the others are saving in step 7"),
    ],
)  # fmt: skip
def test_the_rank_that_is_behind_is_found(before, now, behind, words):
    said, found = find_late_ranks(before, now, 600)
    assert found == behind and words in said and said.startswith("no step has ended within 10 min 0 s: ")
