"""A resumed run is the uninterrupted one bit for bit: stopped, killed, between two phases, finished."""

import dataclasses
import json
import subprocess
import textwrap

import pytest

from gpubound.monitor import RunTape
from gpubound.train.checkpoint import Checkpoints

from .. import forked
from ..processes import plain_environment
from .runs import CHATS, assert_same, losses, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"optimizer": "muon"}, {"precision": "bf16"}], ids=["fp32", "muon", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(corpus, tmp_path, more):
    """Stopped at step 5 of 14, mid-epoch, and going on into the second epoch: same data, losses, weights, moments."""
    common = {"steps": 14, "micro_batch": 16, "accumulate": 1, "eval_every": 6, **more}
    whole, records = train(recipe(corpus, tmp_path / "whole", **common))
    assert whole.done == 14 and whole.finished and whole.feed.epoch == 1

    first, before = train(recipe(corpus, tmp_path / "halved", **common), until=5)
    assert first.done == 5 and not first.finished and 0 < first.feed.batch < len(first.feed)
    second, after = train(recipe(corpus, tmp_path / "halved", **common), resume=True)
    assert losses(before) | losses(after) == losses(records) and len(before) + len(after) == 14
    assert second.evaluations == whole.evaluations and whole.evaluations.keys() == {6, 12, 14}
    assert_same(second, whole)


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed(corpus, tmp_path):
    """kill -9 after the first epoch of packed chats, which are saved every second step: what is resumed ends where the
    uninterrupted run does, bit for bit.

    The child goes no further than step 15, however late the kill comes.
    """
    script = """
        import sys
        import torch
        from gpubound.monitor import RunTape
        from gpubound.train.prepare import prepare
        from gpubound.train.recipe import Recipe
        torch.use_deterministic_algorithms(True, warn_only=True)  # as the suite has it
        torch.set_num_threads(1)
        run = prepare(Recipe(**eval(sys.argv[1])), progress=False)
        tape = RunTape.create(run.folder)
        run.checkpoints.before_commit = tape.flush

        def on_record(record):
            tape.append(record)
            print(record["step"], flush=True)
            record["step"] < 15 or sys.stdin.read()

        run.go(on_record)
    """
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    rows = {"data": (str(tmp_path / "chats.jsonl"),), "tokenizer": str(corpus), "seq": 128, "accumulate": 1}
    todo = recipe("", tmp_path / "killed", **rows, steps=18, save_every=2)
    child = subprocess.Popen(
        [forked.python(), "-W", "ignore", "-c", textwrap.dedent(script), repr(dataclasses.asdict(todo))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=plain_environment(),
    )
    with child.stdin, child.stdout as lines:
        assert any(int(line) == 9 for line in lines), "the child ended by itself"
        child.kill()
        lines.read()  # to its end, which is the program's
        child.wait()
    found = Checkpoints(tmp_path / "killed" / "checkpoints").latest()
    assert 6 <= found.step <= 16 and found.facts["feed"]["pack"] == "examples"
    assert found.facts["feed"]["epoch"] >= 1
    tape = RunTape.open(tmp_path / "killed")
    tape.rewind(found.step)
    assert [record["step"] for record in tape.steps()] == list(range(1, found.step + 1)), "a checkpoint came before its line"
    resumed, _ = train(todo, resume=True)
    whole, _ = train(dataclasses.replace(todo, out=str(tmp_path / "whole")))
    assert resumed.done == 18
    assert_same(resumed, whole)


def test_a_finished_run_is_left_as_it_is(corpus, finished):
    again, records = train(recipe(corpus, finished.folder), resume=True)
    assert again.finished and again.done == 12 and records == []


@pytest.mark.slow
def test_stopped_between_two_phases(two_phases, tmp_path):
    whole, _ = train(recipe("", tmp_path / "whole", **two_phases))
    first, _ = train(recipe("", tmp_path / "halved", **two_phases), until=6)
    assert first.done == 6 and first.over and not first.finished
    second, _ = train(recipe("", tmp_path / "halved", **two_phases), resume=True)
    assert_same(second, whole)


@pytest.mark.gpu
def test_a_resumed_run_on_a_gpu_is_the_uninterrupted_one(corpus, tmp_path):
    common = {"device": "cuda", "precision": "bf16", "eval_every": 5}
    whole, _ = train(recipe(corpus, tmp_path / "whole", **common))
    train(recipe(corpus, tmp_path / "halved", **common), until=7)
    second, _ = train(recipe(corpus, tmp_path / "halved", **common), resume=True)
    assert_same(second, whole)
