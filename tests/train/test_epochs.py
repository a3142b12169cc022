"""The length of a run in epochs, what it is evaluated on, and what a resumed one may change."""

import dataclasses
import json
import math
import os
from types import SimpleNamespace

import pytest

from gpubound.data import Corpus
from gpubound.errors import DataError
from gpubound.train.data import check_data, source_names
from gpubound.train.prepare import ALLOWED, check_same, prepare, recipe_of
from gpubound.train.recipe import PHASED
from gpubound.train.stages import Stage
from tests.messages import refusal

from .runs import assert_same, recipe, texts, train


def in_epochs(corpus, out, epochs, **changes):
    return recipe(corpus, out, steps=None, epochs=epochs, **{"micro_batch": 16, "accumulate": 1} | changes)


@pytest.mark.slow
def test_epochs_visit_every_row_in_another_order(corpus, tmp_path):
    """Every row of a batch is a row of the corpus: two epochs of the rows that fill batches, each row once an epoch."""
    run, records = train(in_epochs(corpus, tmp_path, 2.0))
    batches = len(run.feed)
    assert run.finished and run.done == run.steps == 2 * batches == len(records)
    run.feed.seek(0)
    drawn = [[tuple(row) for row in run.feed.take()["input_ids"].tolist()] for _ in range(run.done)]
    first, second = ([row for batch in half for row in batch] for half in (drawn[:batches], drawn[batches:]))
    rows = (run.stage.training.tokens - 1) // 32
    assert len(set(first)) == len(set(second)) == 16 * batches and first != second
    assert len({*first, *second}) <= rows < 16 * (batches + 1)


@pytest.mark.parametrize("epochs, accumulate", [(1.0, 3), (0.5, 1), (3.0, 2)])
def test_steps_of_epochs(corpus, tmp_path, epochs, accumulate):
    run = prepare(in_epochs(corpus, tmp_path, epochs, accumulate=accumulate), progress=False)
    assert run.steps == math.ceil(epochs * len(run.feed) / accumulate)
    assert run.stage.recipe.rates.steps == run.steps


@pytest.mark.slow
def test_stopped_in_the_middle_of_an_epoch(corpus, tmp_path):
    """The second epoch of two goes on where it was left, bit for bit."""
    common = {"validation": 0.4, "eval_every": 0}
    whole, _ = train(in_epochs(corpus, tmp_path / "whole", 2.0, **common))
    until = whole.steps - 3
    train(in_epochs(corpus, tmp_path / "halved", 2.0, **common), until=until)
    second, records = train(in_epochs(corpus, tmp_path / "halved", 2.0, **common), resume=True)
    assert [record["step"] for record in records] == list(range(until + 1, whole.steps + 1))
    assert until > len(whole.feed), "in the second epoch"
    assert_same(second, whole)


@pytest.mark.slow
def test_more_epochs_extend_a_run_and_a_finished_one_says_so(corpus, tmp_path, capsys):
    first, _ = train(in_epochs(corpus, tmp_path, 0.5))
    again = prepare(in_epochs(corpus, tmp_path, 0.5), resume=True, progress=False)
    assert again.finished and "nothing to do" in capsys.readouterr().err
    longer, records = train(in_epochs(corpus, tmp_path, 1.0), resume=True)
    assert longer.finished and longer.done == len(longer.feed) and records[0]["step"] == first.done + 1


def test_phases_in_epochs_and_in_steps(corpus, tmp_path):
    phases = ({"name": "a", "epochs": 0.5}, {"name": "b", "steps": 2})
    run = prepare(in_epochs(corpus, tmp_path, 3.0, phases=phases), progress=False)
    assert [stage.steps for stage in run.stages] == [math.ceil(0.5 * len(run.feed)), 2]


# What is evaluated


@pytest.fixture
def files(tmp_path):
    for name, part in (("train", texts()[:8]), ("code", texts()[8:10]), ("prose", ["The rain falls on the plain. " * 20])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    return tmp_path


@pytest.mark.slow
def test_every_source_of_eval_data_has_its_loss(files):
    paths = tuple(str(files / f"{name}.txt") for name in ("code", "prose"))
    run, records = train(recipe(files / "train.txt", files / "run", vocabulary=300, eval_data=paths, eval_every=2, steps=4))
    last = records[-1]
    assert last["held_out"] == pytest.approx((last["held_out/code"] + last["held_out/prose"]) / 2)
    assert last["held_out/code"] != last["held_out/prose"]
    assert run.evaluations.keys() == {2, 4} and run.evaluations[4] == last["held_out"]
    assert run.stage.training.tokens == Corpus.open(files / "run" / "corpus").tokens, "nothing is held out of data"
    again, _ = train(run.recipe, resume=True)
    assert again.evaluations == run.evaluations


@pytest.mark.slow
def test_sources_with_weights(files, capsys):
    """An epoch has their documents so often; each source has a loss of documents that are not trained on."""
    for name, count in (("a", 24), ("b", 40)):
        rows = [
            json.dumps({"text": f"{name} {number} " + text[:150]}) + "\n" for number, text in zip(range(count), texts(count))
        ]
        (files / f"{name}.jsonl").write_text("".join(rows))
    changes = {"data": tuple(str(files / f"{name}.jsonl") for name in "ab"), "data_weights": (2.5, 0.5), "vocabulary": 300}
    run, records = train(recipe("", files / "run", **changes, validation=0.2, steps=None, epochs=1.0, evals_per_epoch=2.0))
    a, b = (sum(part.source == number for part in run.stage.training.parts) for number in (0, 1))
    assert a and b and run.stage.training.documents == pytest.approx(0.8 * (2.5 * 24 + 0.5 * 40), abs=6)
    kept = {
        each.name: {each.corpus.document(n).tobytes() for n in range(each.corpus.documents)} for each in run.stage.eval_sets
    }
    trained = {run.stage.training.document(n).tobytes() for n in range(run.stage.training.documents)}
    assert kept.keys() == {"a", "b"} and not trained & (kept["a"] | kept["b"]) and len(kept["a"] | kept["b"]) == 13
    evaluated = [record for record in records if "held_out" in record]
    assert [record["step"] for record in evaluated] == [math.ceil(run.steps / 2), run.steps]
    for record in evaluated:
        assert record["held_out"] == pytest.approx((record["held_out/a"] + record["held_out/b"]) / 2)
    from_here = {"data": tuple(map(os.path.relpath, run.recipe.data)), "data_weights": (3.0, 3.0)}
    again = prepare(dataclasses.replace(run.recipe, **from_here), resume=True, allow=["data"], progress=False)
    assert len(again.feed) > 0 and again.changes[0].startswith(f"from step {run.done + 1} on data_weights was")


def test_sources_that_are_refused(files, corpus):
    def refused(**changes):
        return refusal(ValueError, lambda: check_data(recipe("", files / "run", **changes)))

    twice = (str(files / "code.txt"),) * 2
    assert "each once" in refused(data=twice, data_weights=(1.0, 1.0)) and "stdlib" in refused(
        data=("stdlib",), data_weights=(2.0,)
    )
    assert str(corpus) in refused(data=(str(corpus),), data_weights=(2.0,))
    assert source_names(["x/a.jsonl", "y/b.jsonl"]) == ["a", "b"] and source_names([]) == []
    assert source_names(["x/a.jsonl", "y/a.jsonl", "z/b.jsonl"]) == ["x-a.jsonl", "y-a.jsonl", "z-b.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("per_epoch, steps", [(1.0, [7, 14, 18]), (0.5, [14, 18]), (3.0, [3, 5, 7, 9, 12, 14, 16, 18])])
def test_evaluations_and_checkpoints_by_epoch(corpus, tmp_path, monkeypatch, per_epoch, steps):
    """Of an epoch of 20 micro-batches and steps of three: at the first step that completes each part, and at the end."""
    monkeypatch.setattr(Stage, "steps_per_epoch", 20 / 3)
    run = prepare(recipe(corpus, tmp_path, steps=18, evals_per_epoch=per_epoch), progress=False)
    at = []
    monkeypatch.setattr(run, "validate", lambda: at.append(run.done) or {"held_out": 1.0})
    run.go(lambda record: None)
    assert at == steps


def test_one_source_of_eval_data(files):
    changes = {"vocabulary": 300, "eval_data": (str(files / "prose.txt"),), "steps": 2}
    _, records = train(recipe(files / "train.txt", files / "run", **changes))
    assert math.isfinite(records[-1]["held_out"]) and not any("/" in key for key in records[-1])


def test_eval_data_that_is_refused(files, corpus):
    def refused(kind=ValueError, **changes):
        return refusal(kind, lambda: prepare(recipe(files / "train.txt", files / "run", vocabulary=300, **changes)))

    assert "nowhere.txt" in refused(eval_data=("nowhere.txt",))
    assert "train.txt" in refused(eval_data=(str(files / "train.txt"),))
    assert "tokenizer" in refused(DataError, eval_data=(str(corpus),))


def test_validation_can_be_switched_off(corpus, tmp_path):
    run, records = train(recipe(corpus, tmp_path, validation=0.0, steps=2))
    assert run.finished and run.best is None and "held_out" not in records[-1]
    assert run.stage.training.tokens == Corpus.open(corpus).tokens
    with run.best_weights() as step:
        assert step == 2


# What a resumed run may change


@pytest.mark.slow
def test_the_rate_changes_on_the_way_where_it_is_allowed(corpus, tmp_path, capsys):
    train(recipe(corpus, tmp_path, schedule="constant"), until=6)
    lower = recipe(corpus, tmp_path, schedule="constant", lr=1e-4)
    assert "allow: [lr]" in refusal(ValueError, lambda: prepare(lower, resume=True, progress=False))
    run = prepare(lower, resume=True, progress=False, allow=["lr"])
    records = []
    run.go(records.append)
    assert [record["lr"] for record in records] == pytest.approx([1e-4] * 6) and run.changes == [
        "from step 7 on lr was 0.003, is 0.0001"
    ]
    assert run.changes[0] in capsys.readouterr().err
    again = prepare(lower, resume=True, progress=False)
    assert again.changes == run.changes, "a later start needs no permission for it"


@pytest.mark.slow
def test_rows_change_on_the_way_where_it_is_allowed(corpus, tmp_path):
    train(recipe(corpus, tmp_path), until=6)
    longer = recipe(corpus, tmp_path, seq=64, micro_batch=2)
    assert "allow: [seq, batch]" in refusal(ValueError, lambda: prepare(longer, resume=True, progress=False, allow=["lr"]))
    run = prepare(longer, resume=True, progress=False, allow=["seq", "batch"])
    assert (run.feed.epoch, run.feed.batch) == (0, 0) and run.done == 6
    run.go(lambda record: None)
    assert run.finished and run.feed.batch == 12


def test_what_may_be_allowed():
    assert {key for keys in ALLOWED.values() for key in keys} <= set(PHASED)


def test_an_unknown_permission_is_refused(corpus, tmp_path):
    made = recipe(corpus, tmp_path)
    assert "'model'" in refusal(ValueError, lambda: prepare(made, resume=True, progress=False, allow=["model"]))


def test_a_checkpoint_of_an_earlier_version_has_fewer_keys(corpus, tmp_path):
    """What they say now is not compared, so that a run of then can be given the rows that it had."""
    was = recipe(corpus, tmp_path)
    saved = {key: value for key, value in dataclasses.asdict(was).items() if key not in ("pack", "betas")}
    checkpoint = SimpleNamespace(facts={"recipe": saved, "phase": 0, "began": 0}, step=3)
    assert check_same(checkpoint, recipe_of(checkpoint), dataclasses.replace(was, pack="stream")) == {}
    with pytest.raises(ValueError, match="seed"):
        check_same(checkpoint, recipe_of(checkpoint), dataclasses.replace(was, seed=9))
