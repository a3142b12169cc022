"""`objective: classification` and `contrastive` in a run: rows with labels or matches in, folders for transformers out."""

import json

import pytest
import torch

import gpubound as gb
from gpubound.data import Corpus
from gpubound.models.llama import checkpoint as llama
from gpubound.train.prepare import check_inputs, prepare

from .runs import assert_same, recipe, train


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
        with pytest.raises(ValueError) as error:
            check_inputs(of_classes(rows, base, tmp_path, **changes))
        return str(error.value)

    assert "phase" in refused(phases=({"name": "one", "steps": 2}, {"name": "two", "steps": 2, "objective": "next_token"}))
    with pytest.raises(ValueError, match="classes"):
        prepare(of_classes(rows, base, tmp_path / "none", objective_options={}), progress=False)
    with pytest.raises(ValueError, match="wants classes"):
        prepare(
            of_classes(rows, base, tmp_path / "other", data=(str(rows / "matches.jsonl"),), format="matches"), progress=False
        )
