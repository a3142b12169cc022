"""A run's checkpoints: which stay, when they are written, and what a full disk costs."""

import shutil
import threading
from types import SimpleNamespace

import pytest

from gpubound.errors import DataError
from gpubound.formatting import readable
from gpubound.train import TrainStep
from gpubound.train.checkpoint.files import Staging
from gpubound.train.prepare import prepare
from tests.messages import message

from .runs import assert_same, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_full_disk_costs_nothing_that_was_saved(corpus, tmp_path, monkeypatch):
    from gpubound.train.checkpoint import files

    write, written = files.write_tensors, []

    def until_full(tensors, path):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        write(tensors, path)

    monkeypatch.setattr(files, "write_tensors", until_full)
    with pytest.raises(DataError) as error:
        train(recipe(corpus, tmp_path, save_every=3))
    assert str(error.value) == message("train/run_checkpoints:a_full_disk_costs_nothin", tmp_path / "checkpoints")
    monkeypatch.setattr(files, "write_tensors", write)
    resumed, _ = train(recipe(corpus, tmp_path, save_every=3), resume=True)
    unbroken, _ = train(recipe(corpus, tmp_path / "whole", save_every=3))
    assert_same(resumed, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, times", [({"save_every": 8}, 1), ({"eval_every": 8}, 1), ({}, 0), ({"save_every": 8, "steps": 5}, 0)]
)
def test_a_run_that_will_save_makes_ready_once_it_is_seen_what_steps_need(corpus, tmp_path, monkeypatch, more, times):
    seen = []
    monkeypatch.setattr(Staging, "expect", lambda self, tensors: seen.append(set(tensors)))
    run, _ = train(recipe(corpus, tmp_path, **{"steps": 12, "save_every": 0, "eval_every": 0} | more))
    assert seen == [set(run._state())] * times


@pytest.mark.parametrize("missing, told", [(1, True), (0, False)])
def test_a_disk_without_room_for_one_is_told_of_before_the_first_step(
    corpus, finished, tmp_path, monkeypatch, said, missing, told
):
    """To the byte: what the file of one takes is in it, and what names its tensors."""
    needed = sum(tensor.nbytes for tensor in finished._state().values())
    (file,) = finished.checkpoints.paths()[0].glob("*.safetensors")
    assert needed <= file.stat().st_size < 1.2 * needed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - missing))
    said()
    train(recipe(corpus, tmp_path / "second", steps=1))
    words = (
        f"{tmp_path}/second/checkpoints: a checkpoint takes {readable(needed)}, and {readable(needed - missing)} are free on"
    )
    assert (words in said()) == told


def test_a_checkpoint_does_not_hold_up_the_step(corpus, tmp_path, monkeypatch):
    """The disk waits for the second step behind the one that was saved (a step's checkpoint is written when its record is out):
    were it the other way round, both would wait for good."""
    from gpubound.train.checkpoint import files

    launched, in_time, write = threading.Event(), [], files.write_tensors

    def slow_disk(*what):
        in_time.append(launched.wait(timeout=60))
        write(*what)

    monkeypatch.setattr(files, "write_tensors", slow_disk)
    run = prepare(recipe(corpus, tmp_path, steps=4, save_every=2), progress=False)
    launch = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda step, feed: (run.done >= 3 and launched.set(), launch(step, feed))[1])
    run.go(lambda record: None)
    assert in_time == [True, True] and run.checkpoints.latest().step == 4


@pytest.mark.slow
def test_a_checkpoint_comes_after_the_records_up_to_its_step(corpus, tmp_path, monkeypatch):
    """And after they are on disk, which `first` sees to."""
    run = prepare(recipe(corpus, tmp_path, save_every=2, eval_every=3), progress=False)
    seen, written, write = [], [], run.checkpoints._write
    monkeypatch.setattr(run.checkpoints, "_write", lambda step, *rest: (written.append((step, seen[-1])), write(step, *rest)))
    flushed = []
    run.checkpoints.before_commit = lambda: flushed.append(len(seen))
    run.go(lambda record: seen.append(record["step"]))
    assert [step for step, _ in written][-1] == 12 and len(written) >= 6 == len(
        {step for step, _ in written} & {*range(2, 13, 2)}
    )
    assert all(record >= step for step, record in written) and len(flushed) == len(written)
