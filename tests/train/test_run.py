"""Whole runs: phases, rates, what they refuse before they begin, their memory, checkpoints, and best weights."""

import json
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gpubound.data import Corpus
from gpubound.errors import DataError, DeviceError
from gpubound.formatting import readable
from gpubound.models.registry import presets
from gpubound.train import Schedule, TrainStep
from gpubound.train.checkpoint.files import Staging
from gpubound.train.prepare import fit_micro_batch, largest_micro_batch, prepare
from gpubound.train.recipe import Recipe
from gpubound.train.stages import Stage, hold_out
from tests.messages import message, refusal, refusals

from .runs import assert_same, losses, recipe, texts, train

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
    said = refusal(DataError, lambda: prepare(recipe("", tmp_path / "run", **{**two_phases, "phases": phases}), progress=False))
    assert said == message("train/run:a_second_phase_without_a")


@pytest.mark.slow
def test_not_even_one_row_fits():
    def attempt(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    said = refusal(DeviceError, lambda: largest_micro_batch(Recipe(micro_batch=2), attempt, torch.device("cpu")))
    assert said == message("train/run_refusals:not_even_one_row_fits")


def test_a_wrong_recipe():
    wrong = [
        {"steps": 0}, {"steps": 10**11}, {"steps": 2.5}, {"seed": 1 << 63}, {"vocabulary": 0}, {"data_bytes": 0},
        {"clip": -1.0}, {"lr": 0.0}, {"lr": float("nan")}, {"warmup": float("nan")}, {"graph": "maybe"}, {"graph": True},
        {"out": ""}, {"data": ("",)}, {"tokenizer": "a\0b"}, {"out": "\udcff"}, {"data": "books"},
        {"precision": "bf16-pure", "optimizer": "muon"}, {"phases": ({"name": "a"}, {"name": "b", "clip": -2.0})},
        {"phases": (3,)}, {"save_every": -1}, {"validation": 1.0}, {"steps": 3, "epochs": 2.0}, {"epochs": 0.0},
        {"betas": (0.9, "x")}, {"validation": 0.0, "eval_every": 5}, {"ema": 1.0}, {"patience": 2}, {"optimizer": "sgd"},
        {"precision": "bf61"}, {"phases": ({"name": "a", "step": 1},)}, {"phases": ({"seed": 1},)},
        {"phases": ({"name": "a"}, {"name": "a"})}, {"phases": ({"name": "../a"},)},
    ]  # fmt: skip
    refusals("train/run_refusals:a_wrong_recipe", *(partial(Recipe, **changes) for changes in wrong))


def test_what_a_run_cannot_begin_with(corpus, tmp_path):
    def refused(kind=ValueError, **changes):
        return refusal(kind, lambda: prepare(recipe(corpus, tmp_path / "new", **changes), progress=False))

    assert refused(model="12m").startswith(f"model: got '12m', wanted one of {', '.join(presets())} (with -tiny added: ")
    assert refused(data=("nowhere.txt",)) == message("train/run_refusals:what_a_run_cannot_begin")
    book = tmp_path / "book.txt"
    book.write_text("A text. " * 500)
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    assert refused(DataError, data=(str(book),), tokenizer=str(bad)).startswith(
        f"{bad}: is not a tokenizer that the tokenizers library reads: "
    )
    assert not (tmp_path / "new" / "checkpoints").exists()


def test_as_few_rows_as_a_micro_batch_has():
    """129 tokens are 4 rows of 32 with their next tokens, 128 are 3."""
    own = Recipe(seq=32, micro_batch=4, pack="stream")

    def corpus(tokens):
        return SimpleNamespace(tokens=tokens, masked=False, learnt=lambda begins, ends: ends - begins)

    Stage("", own, corpus(129)).check_rows()
    with pytest.raises(DataError, check=message("train/run_refusals:as_few_rows_as_a_micro_b")):
        Stage("", own, corpus(128)).check_rows()


def test_auto_batch_needs_a_gpu(corpus, tmp_path):
    said = refusal(ValueError, lambda: prepare(recipe(corpus, tmp_path), auto_batch=True, progress=False))
    assert said == message("train/run_refusals:auto_batch_needs_a_gpu")


def test_a_folder_with_another_run(corpus, tmp_path):
    train(recipe(corpus, tmp_path, steps=2))
    said = refusal(ValueError, lambda: prepare(recipe(corpus, tmp_path, steps=2), progress=False))
    assert said == message("train/run_refusals:a_folder_with_another_ru", tmp_path / "checkpoints")
    said = refusal(ValueError, lambda: prepare(recipe(corpus, tmp_path, steps=2, lr=1e-4, seed=1), resume=True, progress=False))
    assert said == message("train/run_refusals:a_folder_with_another_ru.2")


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_that_are_all_damaged_are_not_replaced(corpus, tmp_path, resume):
    step = tmp_path / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{")
    said = refusal(DataError, lambda: prepare(recipe(corpus, tmp_path), resume=resume, progress=False))
    assert said == message("train/run_refusals:checkpoints_that_are_all", tmp_path / "checkpoints")


def test_a_corpus_that_was_built_anew_from_other_texts(corpus, tmp_path):
    """In the same place. Its batches would be others than those that the run has not seen yet."""
    shutil.copytree(corpus, tmp_path / "corpus")
    train(recipe(tmp_path / "corpus", tmp_path / "run", steps=2))
    shutil.rmtree(tmp_path / "corpus")
    Corpus.build(texts()[::-1], Corpus.open(corpus).tokenizer(), tmp_path / "corpus", progress=False)
    with pytest.raises(DataError) as error:
        prepare(recipe(tmp_path / "corpus", tmp_path / "run", steps=4), resume=True, progress=False)
    assert str(error.value) == message("train/run_refusals:a_corpus_that_was_built", tmp_path / "corpus")


def test_nothing_to_resume_is_said(corpus, tmp_path, said):
    prepare(recipe(corpus, tmp_path), resume=True, progress=False)
    assert message("train/run_refusals:nothing_to_resume_is_sai", tmp_path / "checkpoints").within(said())


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(corpus, tmp_path):
    """It was found out at the first checkpoint, hours later."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("no folder")
    with pytest.raises(DataError, check=message("train/run_refusals:checkpoints_that_cannot")):
        prepare(recipe(corpus, tmp_path / "run"))


@pytest.mark.slow
def test_recomputing_changes_no_number(corpus, tmp_path):
    """Every block, one of them, or none: what is kept for backward is another thing than what comes out of it."""
    runs = [train(recipe(corpus, tmp_path / way, recompute=way, steps=4))[0] for way in ("cheap", "none", "blocks", "1")]
    assert [sum(m.gradient_checkpointing for m in run.model.model.layers) for run in runs] == [0, 0, 2, 1]
    for other in runs[1:]:
        assert_same(runs[0], other)


@pytest.mark.gpu
def test_auto_batch_finds_what_fits(corpus, tmp_path):
    run = prepare(recipe(corpus, tmp_path, device="cuda", micro_batch=8, accumulate=2), auto_batch=True, progress=False)
    assert run.recipe.micro_batch * run.recipe.accumulate == 16 and run.recipe.micro_batch == 16, "16 rows of 32 fit any GPU"


@pytest.mark.slow
def test_the_largest_that_fits_and_as_many_rows_a_step():
    tried = []

    def attempt(recipe):
        tried.append(recipe.micro_batch)
        if recipe.micro_batch > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = largest_micro_batch(Recipe(micro_batch=6, accumulate=4), attempt, torch.device("cpu"))
    assert (found.micro_batch, found.accumulate, tried) == (4, 6, [24, 12, 8, 6, 4])
    tried.clear()
    pairs = largest_micro_batch(Recipe(micro_batch=6, accumulate=3), attempt, torch.device("cpu"), group=2)
    assert (pairs.micro_batch, pairs.accumulate, tried) == (2, 9, [18, 6, 2]), "two rows a pair"


def test_auto_batch_takes_one_phase(two_phases, tmp_path):
    run = prepare(recipe("", tmp_path, **two_phases), progress=False)
    said = refusal(ValueError, lambda: fit_micro_batch(run.stages, run.tokenizer, torch.device("cuda")))
    assert said == message("train/run_memory:auto_batch_takes_one_pha")


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


def test_the_average_is_what_its_recurrence_says(corpus, tmp_path):
    """Against the weights as they were after each step, and it is what is exported."""
    run = prepare(recipe(corpus, tmp_path / "run", ema=0.5, steps=3), progress=False)
    name, weight = next(iter(run.model.named_parameters()))
    wanted, history = weight.detach().clone(), []
    update = run.average.update
    run.average.update = lambda: (update(), history.append(weight.detach().clone()))
    run.go(lambda record: None)
    for t, now in enumerate(history, 1):
        decay = min(0.5, (1 + t) / (10 + t))
        wanted = decay * wanted + (1 - decay) * now
    torch.testing.assert_close(run.average.average[name], wanted, rtol=1e-6, atol=1e-7)
    from gpubound.models import load_hf

    exported = dict(load_hf(run.export(tmp_path / "model")).named_parameters())[name]
    assert torch.equal(exported, run.average.average[name]) and not torch.equal(exported, history[-1])
    assert torch.equal(weight, history[-1]), "the run goes on with its own weights"


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

    run = prepare(recipe(corpus, tmp_path / "run", steps=12, eval_every=3, keep=1, ema=0.5), progress=False)
    coming = iter([3.0, 2.0, 2.5, 2.2])  # at steps 3, 6, 9, 12
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    live = {name: t.clone() for name, t in run.model.state_dict().items()}
    assert run.best == 6 and [p.name for p in run.checkpoints.paths()] == ["step-00000006", "step-00000012"]
    exported = dict(load_hf(run.export(tmp_path / "model")).named_parameters())
    wanted = run.checkpoints.at(6).tensors()
    assert all(torch.equal(exported[name], wanted[f"average.{name}"]) for name in run.average.average)
    assert all(torch.equal(live[name], t) for name, t in run.model.state_dict().items())
    assert json.loads((tmp_path / "model" / "gpubound.json").read_text()) == {"run": run.id, "step": 6, "done": 12}


def test_without_an_average_the_best_step_s_own_weights(corpus, tmp_path, monkeypatch):
    run = prepare(recipe(corpus, tmp_path, steps=6, eval_every=3), progress=False)
    coming = iter([1.0, float("nan")])
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    last, best = (run.checkpoints.at(step).tensors()["model.model.norm.weight"] for step in (6, 3))
    name = "model.norm.weight"
    with run.best_weights() as step:
        assert step == 3 and torch.equal(run.model.state_dict()[name], best)
    assert torch.equal(run.model.state_dict()[name], last) and not torch.equal(last, best)
