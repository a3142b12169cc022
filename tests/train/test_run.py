"""Whole runs: resumed ones are the uninterrupted one bit for bit, phases follow on, the best weights are found again."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from gpubound.errors import DataError, DeviceError
from gpubound.monitor import Tape
from gpubound.train import TrainStep
from gpubound.train.checkpoint import Checkpoints
from gpubound.train.data import hold_out
from gpubound.train.prepare import fitted, largest_micro_batch, prepare
from gpubound.train.recipe import Recipe

from .runs import assert_same, losses, recipe, texts, train

pytestmark = pytest.mark.usefixtures("on_reference", "one_thread")


@pytest.mark.parametrize(
    "more", [{}, {"ema": 0.9, "optimizer": "muon"}, {"precision": "bf16"}], ids=["fp32", "ema muon", "bf16"]
)
def test_a_resumed_run_is_the_uninterrupted_one(corpus, tmp_path, more):
    """Stopped at step 5 of 16, mid-epoch, and going on into the second epoch: same data, losses, weights, moments."""
    common = {"steps": 16, "micro_batch": 8, "evaluate_every": 6, **more}
    whole, records = train(recipe(corpus, tmp_path / "whole", **common))
    assert whole.done == 16 and whole.finished and whole.feed.epoch == 1

    first, before = train(recipe(corpus, tmp_path / "halved", **common), until=5)
    assert first.done == 5 and not first.finished and 0 < first.feed.batch < len(first.feed)
    second, after = train(recipe(corpus, tmp_path / "halved", **common), resume=True)
    assert losses(before) | losses(after) == losses(records) and len(before) + len(after) == 16
    assert second.evaluations == whole.evaluations and whole.evaluations.keys() == {6, 12, 16}
    assert_same(second, whole)


def test_recomputing_changes_no_number(corpus, tmp_path):
    """Every block, one of them, or none: what is kept for backward is another thing than what comes out of it."""
    runs = [train(recipe(corpus, tmp_path / way, recompute=way))[0] for way in ("cheap", "none", "blocks", "1")]
    assert [sum(m.gradient_checkpointing for m in run.model.model.layers) for run in runs] == [0, 0, 2, 1]
    for other in runs[1:]:
        assert_same(runs[0], other)


def test_a_recompute_budget_is_kept_by_each_phase(two_phases, tmp_path, monkeypatch):
    """Measured here by what autograd keeps for backward. The second phase has smaller batches and recomputes nothing."""
    peaks = []

    def kept(rehearse, device):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            rehearse()
        peaks.append(sum(sizes))
        return peaks[-1]

    first, second = two_phases["phases"]
    phases = {**two_phases, "phases": (first | {"micro_batch": 8}, second | {"micro_batch": 2})}
    plain, _ = train(recipe("", tmp_path / "plain", **phases))
    monkeypatch.setattr("gpubound.train.recompute.peak_bytes", kept)
    prepare(recipe("", tmp_path / "run", **phases, recompute="1 GB"), progress=False)  # it tries with every block first
    run = prepare(recipe("", tmp_path / "run", **phases, recompute=f"{peaks[0]} B"), progress=False)
    on = [[block.gradient_checkpointing for block in run.model.model.layers]]
    run.go(lambda record: None)
    on.append([block.gradient_checkpointing for block in run.model.model.layers])
    assert on == [[True, True], [False, False]]
    assert_same(run, plain)


def test_the_order_of_the_data_is_kept(corpus, tmp_path):
    """The batches themselves, not their losses: those of steps 8 to 12 come in the same order after a resumption."""
    whole = prepare(recipe(corpus, tmp_path / "whole"), progress=False)
    wanted = [whole.feed.take()["input_ids"] for _ in range(24)]
    train(recipe(corpus, tmp_path / "run"), until=7)
    again = prepare(recipe(corpus, tmp_path / "run"), resume=True, progress=False)
    got = [again.feed.take()["input_ids"] for _ in range(10)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted[14:])) and len({t.sum().item() for t in wanted}) > 20


def test_killed_in_the_middle_and_resumed(corpus, tmp_path):
    """kill -9 while it saves every second step: what is resumed ends where the uninterrupted run does, bit for bit.

    The child goes no farther than step 25, however late the kill comes.
    """
    script = """
        import sys
        import torch
        from gpubound.monitor import Tape
        from gpubound.train.prepare import prepare
        from gpubound.train.recipe import Recipe
        torch.use_deterministic_algorithms(True, warn_only=True)  # as the suite has it
        torch.set_num_threads(1)
        run = prepare(Recipe(**eval(sys.argv[1])), progress=False)
        tape = Tape.create(run.folder)
        run.checkpoints.first = tape.flush

        def on_record(record):
            tape.append(record)
            print(record["step"], flush=True)
            record["step"] < 25 or sys.stdin.read()

        run.go(on_record)
    """
    todo = recipe(corpus, tmp_path / "killed", steps=40, save_every=2)
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), repr(dataclasses.asdict(todo))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    with child.stdin, child.stdout as lines:
        assert any(int(line) == 15 for line in lines), "the child ended by itself"
        child.kill()
        child.wait()
    found = Checkpoints(tmp_path / "killed" / "checkpoints").latest()
    assert 12 <= found.step <= 26
    tape = Tape.open(tmp_path / "killed")
    tape.rewind(found.step)
    assert [record["step"] for record in tape.steps()] == list(range(1, found.step + 1)), "a checkpoint came before its line"
    resumed, _ = train(todo, resume=True)
    whole, _ = train(dataclasses.replace(todo, out=str(tmp_path / "whole")))
    assert resumed.done == 40
    assert_same(resumed, whole)


def test_a_finished_run_is_left_as_it_is(corpus, tmp_path):
    train(recipe(corpus, tmp_path))
    again, records = train(recipe(corpus, tmp_path), resume=True)
    assert again.finished and again.done == 12 and records == []


def test_an_export_is_what_transformers_computes(corpus, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = train(recipe(corpus, tmp_path / "run"))
    folder = run.export(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = texts()[0][:200]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == run.tokenizer.encode(text)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, run.model(ids), rtol=0, atol=1e-5)  # fp32, two layers: measured 1e-7


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


def test_checkpoints_that_stay_for_good(corpus, tmp_path):
    run, _ = train(recipe(corpus, tmp_path, steps=12, save_every=2, keep_every=4, keep=1))
    assert [p.name for p in run.checkpoints._paths()] == ["step-00000004", "step-00000008", "step-00000012"]


@pytest.mark.parametrize("shape", ["wsd", "linear", "cosine", "constant"])
def test_the_rates_are_the_recipes(corpus, tmp_path, shape):
    """In steps, with a fifth of them warm-up; wsd falls over its last half."""
    _, records = train(
        recipe(corpus, tmp_path, steps=10, schedule=shape, warmup=0.2, decay=0.5, final=0.0, lr=1e-3, accumulate=1)
    )
    x = torch.arange(8, dtype=torch.float64) / 8  # of what comes behind the warm-up
    falls = {"wsd": 1 - (2 * x - 1).clamp(min=0), "linear": 1 - x, "cosine": (1 + (x * torch.pi).cos()) / 2}
    wanted = [0.5e-3, 1e-3, *(1e-3 * falls.get(shape, torch.ones(8, dtype=torch.float64))).tolist()]
    assert [record["lr"] for record in records] == pytest.approx(wanted, rel=1e-6)


def test_out_of_patience_it_goes_back_to_the_best(corpus, tmp_path, monkeypatch):
    run = prepare(recipe(corpus, tmp_path, steps=40, evaluate_every=3, patience=2), progress=False)
    coming = iter([3.0, 2.0, 2.5, 2.2])  # at steps 3, 6, 9, 12: the best is step 6's
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    assert run.done == 12 and run.finished
    store = run.checkpoints
    assert [p.name for p in store._paths()] == ["step-00000003", "step-00000006", "step-00000012"]
    best, last = store.at(6).tensors(), store.at(12).tensors()
    kept = [name for name in best if name.startswith(("model.", "step."))]
    assert all(torch.equal(best[name], last[name]) for name in kept)
    again, records = train(recipe(corpus, tmp_path, steps=40, evaluate_every=3, patience=2), resume=True)
    assert again.finished and records == [], "a run that ended early has ended"


CHATS = [
    [{"role": "user", "content": f"what is {n} plus {n}?"}, {"role": "assistant", "content": f"it is {2 * n}, I think."}]
    for n in range(60)
]


@pytest.fixture(scope="module")
def two_phases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (folder / "books").mkdir()
    for number, text in enumerate(texts()):
        (folder / "books" / f"{number}.txt").write_text(text)
    return {
        "vocabulary": 300,
        "phases": (
            {"name": "pretrain", "data": (str(folder / "books"),), "steps": 6},
            {"name": "instruct", "data": (str(folder / "chats.jsonl"),), "steps": 5, "lr": 1e-4, "accumulate": 1},
        ),
    }


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


def test_stopped_between_two_phases(two_phases, tmp_path):
    whole, _ = train(recipe("", tmp_path / "whole", **two_phases))
    first, _ = train(recipe("", tmp_path / "halved", **two_phases), until=6)
    assert first.done == 6 and first.over and not first.finished
    second, _ = train(recipe("", tmp_path / "halved", **two_phases), resume=True)
    assert_same(second, whole)


def test_a_full_disk_costs_nothing_that_was_saved(corpus, tmp_path, monkeypatch):
    from gpubound.train import checkpoint

    write, written = checkpoint.save_file, []

    def until_full(tensors, path):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", until_full)
    with pytest.raises(DataError) as error:
        train(recipe(corpus, tmp_path, save_every=3))
    assert str(error.value) == (
        f"the checkpoint could not be written: [Errno 28] No space left on device; earlier checkpoints in "
        f"{tmp_path / 'checkpoints'} are intact. Free space or choose another folder."
    )
    monkeypatch.setattr(checkpoint, "save_file", write)
    resumed, _ = train(recipe(corpus, tmp_path, save_every=3), resume=True)
    whole, _ = train(recipe(corpus, tmp_path / "whole", save_every=3))
    assert_same(resumed, whole)


@pytest.mark.gpu
def test_a_resumed_run_on_a_gpu_is_the_uninterrupted_one(corpus, tmp_path):
    common = {"device": "cuda", "precision": "bf16", "ema": 0.9, "evaluate_every": 5}
    whole, _ = train(recipe(corpus, tmp_path / "whole", **common))
    train(recipe(corpus, tmp_path / "halved", **common), until=7)
    second, _ = train(recipe(corpus, tmp_path / "halved", **common), resume=True)
    assert_same(second, whole)


@pytest.mark.gpu
def test_a_recompute_budget_on_a_gpu(corpus, tmp_path):
    """Rehearsed on the run's own model, whose numbers it leaves alone."""
    common = {"device": "cuda", "precision": "bf16"}
    plain, _ = train(recipe(corpus, tmp_path / "plain", **common))
    ample, _ = train(recipe(corpus, tmp_path / "ample", **common, recompute="100 GB"))
    assert not any(m.gradient_checkpointing for m in ample.model.model.layers)
    assert_same(plain, ample)
    with pytest.raises(DeviceError, match=r"all 2 blocks recomputed a step still needs more than 1\.0 MB"):
        prepare(recipe(corpus, tmp_path / "tight", **common, recompute="1 MB"), progress=False)


@pytest.mark.gpu
def test_auto_batch_finds_what_fits(corpus, tmp_path):
    run = prepare(recipe(corpus, tmp_path, device="cuda", micro_batch=8, accumulate=2), auto_batch=True, progress=False)
    assert run.recipe.micro_batch * run.recipe.accumulate == 16 and run.recipe.micro_batch == 16, "16 rows of 32 fit any GPU"


def test_the_largest_that_fits_and_as_many_rows_a_step():
    tried = []

    def attempt(recipe):
        tried.append(recipe.micro_batch)
        if recipe.micro_batch > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = largest_micro_batch(Recipe(micro_batch=6, accumulate=4), attempt, torch.device("cpu"))
    assert (found.micro_batch, found.accumulate, tried) == (4, 6, [24, 12, 8, 6, 4])


def test_auto_batch_takes_one_phase(two_phases, tmp_path):
    run = prepare(recipe("", tmp_path, **two_phases), progress=False)
    with pytest.raises(ValueError) as error:
        fitted(run.stages, run.tokenizer, torch.device("cuda"))
    assert str(error.value) == "auto_batch: got phases, wanted a single one; give each phase a micro_batch of its own."


def test_one_text_is_split_inside(corpus, tmp_path):
    """A single file is a common first corpus: its end is held out, and no token is lost or in both parts."""
    from gpubound.corpus import Corpus

    whole = Corpus.open(corpus)
    one = Corpus(whole.parts, whole.vocab_size, whole.fingerprint, whole.path)
    training, held_out = hold_out(one, 0.02)  # 0.02 of 12 documents is none
    assert held_out.tokens == int(0.02 * one.tokens) and training.tokens + held_out.tokens == one.tokens
    assert training.documents == 12 and held_out.documents == 1
    joined = [*training.parts[0].tokens, *held_out.parts[0].tokens]
    assert joined == list(one.parts[0].tokens)


def test_a_checkpoint_does_not_hold_up_the_step(corpus, tmp_path, monkeypatch):
    """The disk waits for the second step behind the one that was saved (a step's checkpoint is written when its record is out):
    were it the other way round, both would wait for good."""
    from gpubound.train import checkpoint

    launched, in_time, write = threading.Event(), [], checkpoint.save_file

    def slow_disk(*what):
        in_time.append(launched.wait(timeout=30))
        write(*what)

    monkeypatch.setattr(checkpoint, "save_file", slow_disk)
    run = prepare(recipe(corpus, tmp_path, steps=4, save_every=2), progress=False)
    launch = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda step, feed: (run.done >= 3 and launched.set(), launch(step, feed))[1])
    run.go(lambda record: None)
    assert in_time == [True, True] and run.checkpoints.latest().step == 4


def test_a_checkpoint_comes_after_the_records_up_to_its_step(corpus, tmp_path, monkeypatch):
    """And after they are on disk, which `first` sees to."""
    run = prepare(recipe(corpus, tmp_path, save_every=2, evaluate_every=3), progress=False)
    seen, written, write = [], [], run.checkpoints._write
    monkeypatch.setattr(run.checkpoints, "_write", lambda step, *rest: (written.append((step, seen[-1])), write(step, *rest)))
    flushed = []
    run.checkpoints.first = lambda: flushed.append(len(seen))
    run.go(lambda record: seen.append(record["step"]))
    assert [step for step, _ in written][-1] == 12 and len(written) >= 6 == len(
        {step for step, _ in written} & {*range(2, 13, 2)}
    )
    assert all(record >= step for step, record in written) and len(flushed) == len(written)


def test_the_best_weights_are_exported(corpus, tmp_path, monkeypatch):
    """Not the last ones, which the run keeps for going on."""
    from gpubound.models import load_hf

    run = prepare(recipe(corpus, tmp_path / "run", steps=12, evaluate_every=3, keep=1, ema=0.5), progress=False)
    coming = iter([3.0, 2.0, 2.5, 2.2])  # at steps 3, 6, 9, 12
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    live = {name: t.clone() for name, t in run.model.state_dict().items()}
    assert run.best == 6 and [p.name for p in run.checkpoints._paths()] == ["step-00000006", "step-00000012"]
    exported = dict(load_hf(run.export(tmp_path / "model")).named_parameters())
    wanted = run.checkpoints.at(6).tensors()
    assert all(torch.equal(exported[name], wanted[f"average.{name}"]) for name in run.average.average)
    assert all(torch.equal(live[name], t) for name, t in run.model.state_dict().items())


def test_without_an_average_the_best_step_s_own_weights(corpus, tmp_path, monkeypatch):
    run = prepare(recipe(corpus, tmp_path, steps=6, evaluate_every=3), progress=False)
    coming = iter([1.0, float("nan")])
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    last, best = (run.checkpoints.at(step).tensors()["model.model.norm.weight"] for step in (6, 3))
    name = "model.norm.weight"
    with run.best_weights() as step:
        assert step == 3 and torch.equal(run.model.state_dict()[name], best)
    assert torch.equal(run.model.state_dict()[name], last) and not torch.equal(last, best)


def test_a_run_that_only_skips_steps_ends(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("gpubound.train.run.HOPELESS", 5)
    run = prepare(recipe(corpus, tmp_path, steps=40, lr=1e20, warmup=0.0), progress=False)
    heard = run._heard(lambda record: None)
    for _ in range(9):
        heard({"skipped": 3})
    assert not run.diverged, "three steps were skipped long ago"
    records = []
    run.go(records.append)
    assert run.diverged and not run.finished and 6 <= len(records) <= 12
    assert [r["skipped"] for r in records[-7:-1]] == list(range(records[-7]["skipped"], records[-7]["skipped"] + 6))
    assert run.checkpoints.latest() is None, "weights of no use are not saved"


def test_a_mistake_in_the_second_phase_is_found_before_the_first_trains(two_phases, tmp_path):
    first, second = two_phases["phases"]
    for change, sentence in (
        ({"micro_batch": 5000}, "phase instruct: data: the training documents have 1,"),
        ({"seq": 1_000_000}, "phase instruct: data: the training documents have 1,"),
        ({"validation": 0.001}, "phase instruct: validation: the held-out documents have "),
    ):
        with pytest.raises(DataError) as error:
            prepare(recipe("", tmp_path / "run", **{**two_phases, "phases": (first, second | change)}), progress=False)
        assert str(error.value).startswith(sentence)
    prepare(recipe("", tmp_path / "run", **two_phases), progress=False)  # the same folder, once it is mended


def test_a_second_phase_without_anything_to_learn(two_phases, tmp_path):
    (tmp_path / "asked.jsonl").write_text(
        (json.dumps({"messages": [{"role": "user", "content": "what is it? " * 9}]}) + "\n") * 90
    )
    first, second = two_phases["phases"]
    phases = (first, second | {"data": (str(tmp_path / "asked.jsonl"),)})
    with pytest.raises(DataError) as error:
        prepare(recipe("", tmp_path / "run", **{**two_phases, "phases": phases}), progress=False)
    assert str(error.value) == (
        "phase instruct: data: the training documents hold no token to learn; give chats with assistants' turns."
    )
