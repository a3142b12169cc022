"""`objective: dpo` in a run: the reference of all weights is computed once and kept, and rows come in pairs."""

import json
import math

import pytest
import torch

from gpubound import trace
from gpubound.data import Corpus, Tokenizer, train_tokenizer
from gpubound.errors import DataError
from gpubound.train.objectives.preference import Preference
from gpubound.train.prepare import prepare
from gpubound.train.stages import stage_of
from tests.messages import refusal

from .runs import assert_same, recipe, texts, train


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Fifty pairs, which make 42 rows of 21 pairs after nine are held out: a last batch of two rows remains."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {"prompt": f"is {n} more than {n - 1}?", "chosen": f" yes, {n} is", "rejected": " no idea at all"} for n in range(50)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(texts(), 300).save(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def corpus_of_pairs(pairs):
    return Corpus.build(pairs / "pairs.jsonl", Tokenizer.load(pairs / "tokenizer"), pairs / "corpus", progress=False)


def of_pairs(pairs, out, **changes):
    options = {"data": (str(pairs / "pairs.jsonl"),), "tokenizer": str(pairs / "tokenizer"), "seq": 64, "accumulate": 1}
    dpo = {"objective": "dpo", "objective_options": {"beta": 0.5}, "micro_batch": 4, "steps": 6, "lr": 3e-3}
    return recipe("", out, **options | dpo | {"validation": 0.18, "eval_every": 3, "pack": "pairs"} | changes)


@pytest.mark.slow
def test_a_run_begins_at_its_reference_and_prefers_what_was_chosen(pairs, tmp_path):
    run, records = train(of_pairs(pairs, tmp_path))
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-5), "the model is its own reference"
    assert run.stage.training.documents == 82 and run.feed.packing.rows == 82
    last = records[-1]
    assert last["held_out"] < 0.6 and last["accuracy"] > 0.8 and last["margin"] > 0
    assert last["tokens"] == pytest.approx(4 * 64 * run.feed.packing.efficiency), "tokens of the rows, not pairs"


@pytest.mark.slow
def test_adapters_train_on_packed_pairs(pairs, tmp_path_factory, tmp_path):
    base, _ = train(of_pairs(pairs, tmp_path_factory.mktemp("base"), steps=1))
    options = {"model": str(base.export(tmp_path / "hf")), "lora": {"rank": 4}, "lr": 2e-2}
    run, records = train(of_pairs(pairs, tmp_path / "run", pack="auto", **options))
    made = run.stage.recipe
    assert (made.pack, made.seq, made.micro_batch) == ("packed_pairs", 128, 2), "as many tokens as of an answer a row"
    assert run.feed.packing.efficiency > 0.8 and run.feed.packing.examples == 82
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    last = records[-1]
    assert last["held_out"] < 0.6 and last["accuracy"] > 0.8
    run.export(tmp_path / "adapter")


@pytest.mark.slow
def test_each_row_gets_the_value_of_its_own_answer(pairs, tmp_path):
    run = prepare(of_pairs(pairs, tmp_path), progress=False)
    check_values(run)
    rows = run.feed.packing.rows
    stored = run.stage.training.batches(64, 2, shuffle=False, pack="pairs", row_values={"row": torch.arange(rows)})
    assert [batch["row"].tolist() for batch in stored][-1] == [rows - 2, rows - 1]


def check_values(run):
    objective = Preference()
    for batch in (run.feed.take(), run.feed.take(), run.eval_feeds[0].take()):
        want = objective.reference_values(run.model.eval(), batch)
        torch.testing.assert_close(batch["reference"].flatten(), want, rtol=1e-5, atol=1e-5)


def test_each_answer_of_a_packed_row_gets_its_own_value(pairs, tmp_path):
    run = prepare(of_pairs(pairs, tmp_path, pack="packed_pairs", seq=192, micro_batch=3), progress=False)
    check_values(run)
    values = run.references[0]
    assert values.shape[0] == run.feed.packing.rows % 3 + 3 * len(run.feed), "those of a last, smaller batch too"
    assert 82 <= (values < 0).sum() <= values.numel()


@pytest.mark.parametrize("changes, made", [
    ({}, ("packed_pairs", 128, 2)), ({"buckets": 2}, ("pairs", 64, 4)), ({"pack": "pairs"}, ("pairs", 64, 4)),
    ({"pack": "packed_pairs"}, ("packed_pairs", 64, 4)), ({"micro_batch": 2}, ("packed_pairs", 128, 1)),
])  # fmt: skip
def test_what_auto_takes(pairs, corpus_of_pairs, tmp_path, changes, made):
    stage = stage_of("", of_pairs(pairs, tmp_path, **{"pack": "auto"} | changes), corpus_of_pairs)
    assert (stage.recipe.pack, stage.recipe.seq, stage.recipe.micro_batch) == made


def test_models_that_see_other_examples_of_a_row_take_an_answer_a_row(pairs, corpus_of_pairs, tmp_path):
    before = dict(trace.fallbacks)
    stage = stage_of("", of_pairs(pairs, tmp_path, pack="auto"), corpus_of_pairs, unpacked=lambda: "it has no mask")
    assert (stage.recipe.pack, stage.recipe.seq, stage.recipe.micro_batch) == ("pairs", 64, 4)
    assert {op for op, why in trace.fallbacks.keys() - before.keys()} == {"packed rows"}


TWO = ({"name": "first", "steps": 2}, {"name": "second", "steps": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, until",
    [
        ({"buckets": 2}, 3),
        ({"phases": TWO}, 4),
        ({"pack": "packed_pairs", "seq": 128, "micro_batch": 2}, 3),
    ],
    ids=["buckets", "phase 2", "packed"],
)
def test_a_resumed_run_keeps_its_reference(pairs, tmp_path, monkeypatch, more, until):
    """Which is of the weights that the phase began with: a checkpoint has its values."""
    whole, _ = train(of_pairs(pairs, tmp_path / "whole", **more))
    train(of_pairs(pairs, tmp_path / "cut", **more), until=until)
    with monkeypatch.context() as patch:
        patch.setattr("gpubound.train.loop.reference_values", None)  # nothing is computed again
        resumed, _ = train(of_pairs(pairs, tmp_path / "cut", **more), resume=True)
    assert_same(whole, resumed)


@pytest.mark.slow
def test_values_of_other_rows(pairs, tmp_path):
    """Computed again in the first phase, whose weights can be had; refused in a later one."""
    first, _ = train(of_pairs(pairs, tmp_path / "one", eval_every=0), until=2)
    more_held_out = of_pairs(pairs, tmp_path / "one", eval_every=0, validation=0.3)
    run = prepare(more_held_out, resume=True, allow=("validation",), progress=False)
    fresh = prepare(of_pairs(pairs, tmp_path / "fresh", validation=0.3), progress=False)
    assert [len(values) for values in run.references] == [70, 30] and run.done == first.done
    assert all(torch.equal(a, b) for a, b in zip(run.references, fresh.references, strict=True))
    train(of_pairs(pairs, tmp_path / "two", eval_every=0, phases=TWO), until=4)
    other = of_pairs(pairs, tmp_path / "two", eval_every=0, phases=(TWO[0], TWO[1] | {"validation": 0.3}))
    refused = refusal(DataError, lambda: prepare(other, resume=True, allow=("validation",), progress=False))
    assert "phase second" in refused and "reference values" in refused


def test_held_out_rows_of_another_kind_are_refused(pairs, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "is it?", "completion": " yes"}) + "\n")
    made = of_pairs(pairs, tmp_path / "run", eval_data=(str(tmp_path / "chats.jsonl"),))
    refused = refusal(ValueError, lambda: prepare(made, progress=False))
    assert refused.startswith("eval_data: chats") and "preferences" in refused


@pytest.mark.slow
def test_rows_of_several_lengths_get_their_own_values(pairs, tmp_path):
    run = prepare(of_pairs(pairs, tmp_path, data=(str(of_several_lengths(pairs)),), seq=128, buckets=3), progress=False)
    lengths = set()
    for _ in range(len(run.feed)):
        batch = run.feed.take()
        lengths.add(batch["input_ids"].shape[1])
        want = Preference().reference_values(run.model.eval(), batch)
        torch.testing.assert_close(batch["reference"], want, rtol=1e-5, atol=1e-5)
    assert len(lengths) == 3


def of_several_lengths(pairs):
    path = pairs / "lengths.jsonl"
    rows = [{"prompt": f"is {n} odd?" + " really?" * (n % 9), "chosen": f" {n}", "rejected": " ?"} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
