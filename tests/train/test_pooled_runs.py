"""Runs of other objectives: labels or matches in, folders for transformers out; a teacher; preferences and their reference."""

import json
import math

import pytest
import torch

import gpubound as gb
from gpubound import trace
from gpubound.data import Corpus, Tokenizer, train_tokenizer
from gpubound.errors import DataError
from gpubound.models.llama import checkpoint as llama
from gpubound.train.objectives.preference import Preference
from gpubound.train.prepare import check_inputs, prepare
from gpubound.train.stages import stage_of
from tests.messages import refusal

from .runs import assert_same, recipe, texts, train


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Forty texts, whose first word tells the class, and as many questions with their answers."""
    folder = tmp_path_factory.mktemp("rows")
    labelled = [
        {"text": f"{('no', 'yes')[n % 2]}, it is {n}", "label": ("no", "yes")[n % 2] if n < 30 else n % 2} for n in range(40)
    ]
    matches = [{"query": f"what is {n}?", "positive": f"it is {n}"} for n in range(40)]
    negatives = [row | {"negative": f"it is {n + 1}"} for n, row in enumerate(matches)]
    for name, of in (("labelled", labelled), ("matches", matches), ("negatives", negatives)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    return folder


def of_classes(rows, base, out, **changes):
    options = {"model": str(base), "data": (str(rows / "labelled.jsonl"),), "objective": "classification"}
    options |= {"objective_options": {"classes": ["no", "yes"]}, "seq": 64, "accumulate": 1, "validation": 0.2}
    return recipe("", out, **options | {"steps": 16, "lr": 3e-3, "eval_every": 8} | changes)


@pytest.mark.slow
def test_a_run_learns_classes_and_exports_what_transformers_loads(rows, base, tmp_path):
    run, records = train(of_classes(rows, base, tmp_path / "run"))
    held_out = [record for record in records if "held_out" in record]
    assert held_out[-1]["accuracy"] == 1 and held_out[-1]["held_out"] < 0.2
    assert run.stage.recipe.pack == "examples" and run.feed.packing.efficiency > 0.7
    folder = run.export(tmp_path / "hf")
    ids = torch.tensor([Corpus.open(tmp_path / "run/corpus").document(0)[:-1].tolist()])
    again = llama.load(folder)
    with torch.no_grad(), run.best_weights():
        want = run.model.eval()(ids)[:, -1]
        torch.testing.assert_close(again(ids)[:, -1], want)
    assert again.classes == ("no", "yes") and again.undecoded()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.id2label == {0: "no", 1: "yes"}
    padded = torch.cat([ids, torch.full((1, 3), theirs.config.pad_token_id)], 1)
    with torch.no_grad():
        torch.testing.assert_close(theirs(padded.expand(2, -1)).logits, want.expand(2, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_adapters_and_the_head_train_and_are_merged(rows, base, tmp_path):
    lora = {"lora": {"rank": 4}, "lr": 2e-2}
    run, records = train(of_classes(rows, base, tmp_path / "run", **lora))
    assert [record for record in records if "held_out" in record][-1]["accuracy"] > 0.8
    kept = {name for name in run.checkpoints.latest().tensors() if name.startswith("model.")}
    assert "model.lm_head.weight" in kept and all("lora" in name for name in kept - {"model.lm_head.weight"})
    ids = torch.tensor([Corpus.open(tmp_path / "run/corpus").document(0)[:-1].tolist()])
    with torch.no_grad(), run.best_weights():
        want = run.model.eval()(ids)
    whole = llama.load(run.export(tmp_path / "hf", merge=True))
    with torch.no_grad():
        torch.testing.assert_close(whole(ids), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="merge"):
        gb.train(**vars(of_classes(rows, base, tmp_path / "bare", **lora)), export=str(tmp_path / "adapters"))


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one_to_the_bit(rows, base, tmp_path):
    short = {"steps": 4, "eval_every": 0}
    whole, _ = train(of_classes(rows, base, tmp_path / "whole", **short))
    train(of_classes(rows, base, tmp_path / "cut", **short), until=2)
    resumed, _ = train(of_classes(rows, base, tmp_path / "cut", **short), resume=True)
    assert_same(whole, resumed)


@pytest.mark.slow
def test_a_run_brings_matches_together(rows, base, tmp_path):
    contrastive = {"data": (str(rows / "matches.jsonl"),), "objective": "contrastive", "micro_batch": 8, "eval_every": 4}
    run, records = train(of_classes(rows, base, tmp_path, objective_options={"temperature": 0.1}, **contrastive))
    first, *_, last = (record for record in records if "held_out" in record)
    assert last["held_out"] < first["held_out"] and last["accuracy"] >= first["accuracy"]
    assert run.stage.recipe.pack == "pairs" and records[0]["tokens"] > 8, "tokens of the rows"


def test_a_run_takes_negatives_in_chunks(rows, base, tmp_path):
    """The default rows of a micro-batch are whole matches, of three texts each."""
    of = {"data": (str(rows / "negatives.jsonl"),), "objective": "contrastive", "micro_batch": 8, "steps": 2, "eval_every": 1}
    options = {"temperature": 0.1, "negatives": 1, "chunk": 4}
    run, records = train(of_classes(rows, base, tmp_path / "run", objective_options=options, **of))
    assert run.stage.recipe.micro_batch == 6 and run.stage.training.group == 3 and "accuracy" in records[-1]
    with pytest.raises(ValueError, match="multiple of 3"):
        prepare(of_classes(rows, base, tmp_path / "odd", objective_options=options, **of | {"micro_batch": 7}), progress=False)
    with pytest.raises(ValueError, match="negatives: 1"):
        prepare(of_classes(rows, base, tmp_path / "other", objective_options={"negatives": 2}, **of), progress=False)


def test_what_is_refused(rows, base, tmp_path):
    def refused(**changes):
        return refusal(ValueError, lambda: check_inputs(of_classes(rows, base, tmp_path, **changes)))

    assert "phase" in refused(phases=({"name": "one", "steps": 2}, {"name": "two", "steps": 2, "objective": "next_token"}))
    with pytest.raises(ValueError, match="classes"):
        prepare(of_classes(rows, base, tmp_path / "none", objective_options={}), progress=False)
    with pytest.raises(ValueError, match="wants classes"):
        prepare(
            of_classes(rows, base, tmp_path / "other", data=(str(rows / "matches.jsonl"),), format="matches"), progress=False
        )


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    """A folder like that of `base`, with other weights."""
    torch.manual_seed(1)
    model = llama.make("tiny", 320, 4096, torch.device("cpu"))
    for p in model.parameters():
        p.data.mul_(1.5)
    return llama.save(model, tmp_path_factory.mktemp("teacher") / "hf", Corpus.open(corpus).tokenizer())


def of(corpus, base, teacher, out, **changes):
    options = {"model": str(base), "objective": "distillation", "objective_options": {"teacher": str(teacher)}}
    return recipe(corpus, out, **options | {"steps": 6, "lr": 3e-3, "eval_every": 3} | changes)


@pytest.mark.slow
def test_a_run_learns_its_teacher_and_resumes_to_the_bit(corpus, base, teacher, tmp_path):
    whole, records = train(of(corpus, base, teacher, tmp_path / "whole"))
    first, last = (record for record in records if "held_out" in record)
    assert 0 < last["held_out"] == last["divergence"] < first["divergence"] and last["cross_entropy"] > 0
    names = whole.checkpoints.latest().tensors().keys()
    weights = {name for name in names if name.startswith("model.")}
    assert weights == {f"model.{name}" for name in whole.model.state_dict()}
    train(of(corpus, base, teacher, tmp_path / "cut"), until=3)
    resumed, _ = train(of(corpus, base, teacher, tmp_path / "cut"), resume=True)
    assert_same(whole, resumed)


def test_what_a_run_refuses_before_it_builds(corpus, base, tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*config\.json"):
        check_inputs(of(corpus, base, tmp_path / "nowhere", tmp_path))
    torch.manual_seed(1)
    foreign = llama.save(llama.make("tiny", 320, 4096, torch.device("cpu")), tmp_path / "other", train_tokenizer(texts(6), 300))
    with pytest.raises(ValueError, match="another tokenizer"):
        prepare(of(corpus, base, foreign, tmp_path / "run"), progress=False)


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
