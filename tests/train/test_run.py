"""Whole runs: phases follow on, rates are the recipe's, and one that only skips steps ends."""

import json

import pytest
import torch

from gpubound.errors import DataError
from gpubound.train import Schedule
from gpubound.train.prepare import prepare
from gpubound.train.stages import hold_out
from tests.messages import message

from .runs import assert_same, losses, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_rates_are_the_recipes(corpus, tmp_path):
    """In steps, with a fifth of them warm-up, and a fall over the last half of all. Every shape: test_schedule.py."""
    options = {"steps": 10, "warmup": 0.2, "decay": 0.5, "final": 0.0}
    for shape in ("linear", "cosine", "constant"):
        assert recipe(corpus, tmp_path, schedule=shape, **options).rates == Schedule(shape, **options)
    _, records = train(recipe(corpus, tmp_path, schedule="wsd", lr=1e-3, accumulate=1, **options))
    wanted = [0.5, 1, *(1 - (torch.arange(3, 11) - 5).clamp(min=0).double() / 6).tolist()]
    assert [record["lr"] for record in records] == pytest.approx([1e-3 * factor for factor in wanted], rel=1e-6)


@pytest.mark.slow
def test_phases_follow_each_other(two_phases, tmp_path):
    """The second learns what the assistant says and not what it is asked; a run that is stopped in it resumes in it."""
    whole, records = train(recipe("", tmp_path / "whole", **two_phases))
    assert whole.finished and whole.phase == 1 and whole.began == 6 and [r["step"] for r in records] == list(range(1, 12))
    assert records[5]["tokens"] == 2 * 4 * 32 and 0 < records[6]["tokens"] < 4 * 32 * 0.7, "prompts do not count"
    assert records[5]["lr"] > 1e-4 >= records[6]["lr"]
    first, _ = train(recipe("", tmp_path / "halved", **two_phases), until=8)
    assert first.done == 8 and first.phase == 1
    second, after = train(recipe("", tmp_path / "halved", **two_phases), resume=True)
    assert losses(after) == {step: loss for step, loss in losses(records).items() if step > 8}
    assert_same(second, whole)
    assert whole.evaluations.keys() == {6, 11}
    whole.evaluations[6] = 0.0
    assert whole.best == 11, "the best of the last phase, whatever an earlier one had on other data"
    labels = whole.feed.take()["labels"]
    learnt = whole.tokenizer.decode(labels[labels != -100].tolist())
    assert "it is" in learnt and "what is" not in learnt


def test_one_text_is_split_inside(corpus, tmp_path):
    """A single file is a common first corpus: its end is held out, and no token is lost or in both parts."""
    from gpubound.data import Corpus

    whole = Corpus.open(corpus)
    one = Corpus(whole.parts, whole.vocab_size, whole.fingerprint, whole.path)
    training, held_out = hold_out(one, 0.02)  # 0.02 of 12 documents is none
    assert held_out.tokens == int(0.02 * one.tokens) and training.tokens + held_out.tokens == one.tokens
    assert training.documents == 12 and held_out.documents == 1
    joined = [*training.parts[0].tokens, *held_out.parts[0].tokens]
    assert joined == list(one.parts[0].tokens)


def test_a_run_that_only_skips_steps_ends(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("gpubound.train.loop.HOPELESS", 5)
    run = prepare(recipe(corpus, tmp_path, steps=40, lr=1e20, warmup=0.0), progress=False)
    records = []
    run.go(records.append)
    assert run.diverged and not run.finished and 6 <= len(records) <= 12
    assert [r["skipped"] for r in records[-7:-1]] == list(range(records[-7]["skipped"], records[-7]["skipped"] + 6))
    assert run.checkpoints.latest() is None, "weights of no use are not saved"


@pytest.mark.slow
def test_a_mistake_in_the_second_phase_is_found_before_the_first_trains(two_phases, tmp_path):
    first, second = two_phases["phases"]
    for change, facts in (
        ({"micro_batch": 5000}, ("phase instruct: data:", "micro_batch = 5,000")),
        ({"seq": 1_000_000}, ("phase instruct: data:", "1 rows of seq 1,000,000")),
    ):
        with pytest.raises(DataError) as error:
            prepare(recipe("", tmp_path / "run", **{**two_phases, "phases": (first, second | change)}), progress=False)
        assert all(fact in str(error.value) for fact in facts)
    prepare(recipe("", tmp_path / "run", **two_phases), progress=False)  # the same folder, once it is mended


def test_a_second_phase_without_anything_to_learn(two_phases, tmp_path):
    (tmp_path / "asked.jsonl").write_text(
        (json.dumps({"messages": [{"role": "user", "content": "what is it? " * 9}]}) + "\n") * 90
    )
    first, second = two_phases["phases"]
    phases = (first, second | {"data": (str(tmp_path / "asked.jsonl"),)})
    with pytest.raises(DataError) as error:
        prepare(recipe("", tmp_path / "run", **{**two_phases, "phases": phases}), progress=False)
    assert str(error.value) == message("train/run:a_second_phase_without_a")
