"""A resumed run is the uninterrupted one bit for bit, and what may change when a run is resumed."""

import dataclasses
import json
import shutil
import subprocess
import textwrap

import pytest

from gpubound.monitor import RunTape
from gpubound.train.checkpoint import Checkpoints
from gpubound.train.prepare import prepare
from tests.messages import message, refusal

from .. import forked
from ..processes import plain_environment
from .runs import CHATS, assert_same, losses, recipe, texts, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"ema": 0.9, "optimizer": "muon"}, {"precision": "bf16"}], ids=["fp32", "ema muon", "bf16"]
)
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
    common = {"device": "cuda", "precision": "bf16", "ema": 0.9, "eval_every": 5}
    whole, _ = train(recipe(corpus, tmp_path / "whole", **common))
    train(recipe(corpus, tmp_path / "halved", **common), until=7)
    second, _ = train(recipe(corpus, tmp_path / "halved", **common), resume=True)
    assert_same(second, whole)


STEADY = {"schedule": "constant", "warmup": 0.0}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("\n".join(texts()))
    return path


def phases(book, *changes, more=()):
    """Two phases of 3 steps on one text."""
    both = [{"name": name, "data": (str(book),), "steps": 3} | change for name, change in zip("ab", (*changes, {}, {}))]
    return {"vocabulary": 300, "phases": (*both, *more)}


@pytest.fixture(scope="module")
def stopped(book, tmp_path_factory):
    """The folder of a run of both phases that was stopped in the first one."""
    return train(recipe("", tmp_path_factory.mktemp("stopped"), **phases(book)), until=2)[0].folder


@pytest.fixture(scope="module")
def both(book, tmp_path_factory):
    """The folder of a run that has finished both phases."""
    return train(recipe("", tmp_path_factory.mktemp("both"), **phases(book)))[0].folder


@pytest.mark.slow
@pytest.mark.parametrize("until", [None, 5], ids=["finished", "stopped"])
def test_with_more_steps_it_is_the_longer_run(corpus, tmp_path, until):
    """Under a constant rate, bit for bit; what was done is not done again."""
    first, before = train(recipe(corpus, tmp_path / "run", steps=8, **STEADY), until=until)
    longer, after = train(recipe(corpus, tmp_path / "run", steps=12, **STEADY), resume=True)
    whole, records = train(recipe(corpus, tmp_path / "whole", steps=12, **STEADY))
    assert first.finished == (until is None) and longer.finished and longer.done == 12
    assert losses(before) | losses(after) == losses(records) and len(before) + len(after) == 12
    assert_same(longer, whole)


@pytest.mark.slow
def test_more_steps_say_what_the_schedule_does(corpus, tmp_path, said):
    _, before = train(recipe(corpus, tmp_path, steps=8))
    _, after = train(recipe(corpus, tmp_path, steps=12), resume=True)
    assert message("train/resume:more_steps_say_what_the", f"{before[-1]['lr']:.2e}", f"{after[0]['lr']:.2e}").within(said())


def test_fewer_steps_than_are_done(corpus, tmp_path):
    train(recipe(corpus, tmp_path, steps=4))
    said = refusal(ValueError, lambda: prepare(recipe(corpus, tmp_path, steps=3), resume=True, progress=False))
    assert said == message("train/resume:fewer_steps_than_are_don")


def test_a_phase_that_has_not_begun_may_change(book, stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    run, records = train(recipe("", out, **phases(book, {}, {"lr": 1e-5, "steps": 2})), resume=True)
    assert run.finished and run.done == 5 and records[-1]["phase"] == "b" and records[-1]["lr"] <= 1e-5


def test_a_finished_run_gets_another_phase(book, both, tmp_path):
    out = shutil.copytree(both, tmp_path / "run")
    old = Checkpoints(out / "checkpoints").latest().shapes()
    another = phases(book, more=[{"name": "c", "steps": 1, "data": (str(book),)}])
    run, records = train(recipe("", out, **another), resume=True)
    assert run.finished and [(r["step"], r["phase"]) for r in records] == [(7, "c")]
    assert old.keys() == run.checkpoints.latest().shapes().keys()


@pytest.mark.parametrize(
    "changes, more, said",
    [
        (({"lr": 1e-5}, {}), {}, "phase a: lr was 0.003, is 1e-05"),
        (({"name": "c"}, {}), {}, "phase 1 was a, is c"),
        (({}, {}), {"seed": 1, "ema": 0.5}, "ema was 0.0, is 0.5; seed was 0, is 1"),
    ],
)
def test_what_was_trained_with_may_not_change(book, stopped, changes, more, said):
    changed = recipe("", stopped, **phases(book, *changes), **more)
    refused = refusal(ValueError, lambda: prepare(changed, resume=True, progress=False))
    assert f" {said}. " in refused and ("{allow: [lr]}" in refused) == ("lr" in said)


@pytest.mark.slow
def test_a_path_may_be_written_otherwise(corpus, tmp_path, monkeypatch):
    """What it leads to counts: relative, from the root, by a detour or a link."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "names"):
        (tmp_path / name).symlink_to(corpus)
    shutil.copytree(corpus, tmp_path / "copy")
    train(recipe("data", tmp_path / "run", tokenizer="data", steps=2))
    for data, tokenizer in ((corpus, "./data"), ("run/../data", corpus), ("names", str(tmp_path / "data"))):
        again = recipe(data, tmp_path / "run", tokenizer=str(tokenizer), steps=2)
        assert prepare(again, resume=True, progress=False).done == 2
    with pytest.raises(ValueError, check=message("train/resume:a_path_may_be_written_ot")):
        prepare(recipe("copy", tmp_path / "run", tokenizer="data", steps=2), resume=True, progress=False)


def in_folder(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / name)


def test_a_run_that_moved_with_its_data(corpus, tmp_path, monkeypatch):
    in_folder(tmp_path, monkeypatch, "one")
    shutil.copytree(corpus, tmp_path / "one" / "data")
    train(recipe("data", "run", steps=2))
    (tmp_path / "one").rename(tmp_path / "two")
    in_folder(tmp_path, monkeypatch, "two")
    assert prepare(recipe("data", "run", steps=2), resume=True, progress=False).done == 2


def test_it_may_end_where_it_was_stopped(corpus, tmp_path):
    train(recipe(corpus, tmp_path, steps=8), until=5)
    run, records = train(recipe(corpus, tmp_path, steps=5), resume=True)
    assert run.finished and run.done == 5 and records == []


@pytest.mark.slow
def test_a_phase_that_is_over_keeps_its_steps(book, tmp_path):
    train(recipe("", tmp_path, **phases(book)), until=5)
    with pytest.raises(ValueError, check=message("train/resume:a_phase_that_is_over_kee")):
        prepare(recipe("", tmp_path, **phases(book, {"steps": 4}, {})), resume=True, progress=False)


def test_phases_may_not_go_away(book, both):
    for shorter in (phases(book) | {"phases": phases(book)["phases"][:1]}, {"data": (str(book),), "vocabulary": 300}):
        with pytest.raises(ValueError, check=message("train/resume:phases_may_not_go_away")):
            prepare(recipe("", both, **shorter), resume=True, progress=False)
