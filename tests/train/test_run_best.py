"""The best weights are found again and exported; a run goes on from what was exported."""

import json

import pytest
import torch

from gpubound.train.prepare import prepare

from .runs import recipe, texts, train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_export_is_what_transformers_computes(finished, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.export(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = texts()[0][:200]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == finished.tokenizer.encode(text)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, finished.model(ids), rtol=0, atol=1e-5)  # fp32, two layers: 1e-7


@pytest.mark.slow
def test_a_run_goes_on_from_an_exported_folder(corpus, tmp_path):
    """With the folder's own tokenizer and weights: its first loss is near where the first run ended, not near a new model's."""
    first, before = train(recipe(corpus, tmp_path / "first", steps=60))
    folder = first.export(tmp_path / "model")
    book = tmp_path / "book.txt"
    book.write_text("\n".join(texts()))
    second, after = train(recipe("", tmp_path / "second", model=str(folder), data=(str(book),), steps=2, lr=1e-5))
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert before[0]["loss"] > 5.5 and abs(after[0]["loss"] - before[-1]["loss"]) < 0.5 < before[0]["loss"] - after[0]["loss"]


@pytest.mark.slow
def test_out_of_patience_it_goes_back_to_the_best(corpus, tmp_path, monkeypatch):
    run = prepare(recipe(corpus, tmp_path, steps=40, eval_every=3, patience=2), progress=False)
    coming = iter([3.0, 2.0, 2.5, 2.2])  # at steps 3, 6, 9, 12: the best is step 6's
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    assert run.done == 12 and run.finished
    store = run.checkpoints
    assert [p.name for p in store.paths()] == ["step-00000003", "step-00000006", "step-00000012"]
    best, last = store.at(6).tensors(), store.at(12).tensors()
    kept = [name for name in best if name.startswith(("model.", "step."))]
    assert all(torch.equal(best[name], last[name]) for name in kept)
    again, records = train(recipe(corpus, tmp_path, steps=40, eval_every=3, patience=2), resume=True)
    assert again.finished and records == [], "a run that ended early has ended"


@pytest.mark.slow
def test_the_best_weights_are_exported(corpus, tmp_path, monkeypatch):
    """Not the last ones, which the run keeps for going on."""
    from gpubound.models import load_hf

    run = prepare(recipe(corpus, tmp_path / "run", steps=12, eval_every=3, keep=1), progress=False)
    coming = iter([3.0, 2.0, 2.5, 2.2])  # at steps 3, 6, 9, 12
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    live = {name: t.clone() for name, t in run.model.state_dict().items()}
    assert run.best == 6 and [p.name for p in run.checkpoints.paths()] == ["step-00000006", "step-00000012"]
    exported = dict(load_hf(run.export(tmp_path / "model")).named_parameters())
    wanted = run.checkpoints.at(6).tensors()
    assert all(torch.equal(tensor, wanted[f"model.{name}"]) for name, tensor in exported.items())
    assert all(torch.equal(live[name], t) for name, t in run.model.state_dict().items())
    assert json.loads((tmp_path / "model" / "gpubound.json").read_text()) == {"run": run.id, "step": 6, "done": 12}


def test_inside_best_weights_the_model_has_those_of_the_best_step(corpus, tmp_path, monkeypatch):
    run = prepare(recipe(corpus, tmp_path, steps=6, eval_every=3), progress=False)
    coming = iter([1.0, float("nan")])
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    last, best = (run.checkpoints.at(step).tensors()["model.model.norm.weight"] for step in (6, 3))
    name = "model.norm.weight"
    with run.best_weights() as step:
        assert step == 3 and torch.equal(run.model.state_dict()[name], best)
    assert torch.equal(run.model.state_dict()[name], last) and not torch.equal(last, best)
