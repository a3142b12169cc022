"""What a run refuses before it begins, in its own words."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from gpubound import trace
from gpubound.data import Corpus
from gpubound.errors import DataError, DeviceError
from gpubound.models.registry import presets
from gpubound.train.prepare import largest_micro_batch, prepare
from gpubound.train.recipe import Recipe
from gpubound.train.stages import Stage
from tests.messages import message, refusal

from .runs import recipe, texts, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_not_even_one_row_fits():
    def attempt(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DeviceError) as error:
        largest_micro_batch(Recipe(micro_batch=2), attempt, torch.device("cpu"))
    assert str(error.value) == message("train/run_refusals:not_even_one_row_fits")


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"steps": 0}, "recipe: steps must lie between 1 and 10,000,000, got 0."),
        ({"steps": 10**11}, "recipe: steps must lie between 1 and 10,000,000, got 100,000,000,000."),
        ({"steps": 2.5}, "recipe: steps must be a whole number, got 2.5."),
        ({"seed": 1 << 63}, f"recipe: seed must lie between 0 and {(1 << 63) - 1:,}, got {1 << 63:,}."),
        ({"vocabulary": 0}, "recipe: vocabulary must lie between 261 and 16,777,216, got 0."),
        ({"data_bytes": 0}, f"recipe: data_bytes must lie between 1 and {1 << 62:,}, got 0."),
        ({"clip": -1.0}, "recipe: clip must be above 0, got -1.0; 0 or none does not clip."),
        ({"lr": 0.0}, "recipe: lr must be above 0, got 0.0."),
        ({"lr": float("nan")}, "recipe: lr must be a finite number, got nan."),
        ({"warmup": float("nan")}, "recipe: warmup must be a finite number, got nan."),
        ({"graph": "maybe"}, "recipe: graph must be one of auto, require, off, got 'maybe'."),
        ({"graph": True}, "recipe: graph must be a text, got True."),
        ({"out": ""}, "recipe: out must be UTF-8 text, not empty, without control characters, got ''."),
        ({"data": ("",)}, "recipe: data must be UTF-8 text, not empty, without control characters, got ''."),
        ({"tokenizer": "a\0b"}, r"recipe: tokenizer must be UTF-8 text, not empty, without control characters, got 'a\x00b'."),
        ({"out": "\udcff"}, r"recipe: out must be UTF-8 text, not empty, without control characters, got '\udcff'."),
        ({"data": "books"}, "recipe: data must be a text, such as a path, or a list of them, got 'books'."),
        (
            {"precision": "bf16-pure", "optimizer": "muon"},
            "recipe: precision bf16-pure rounds at random in AdamW alone, got optimizer muon; take precision bf16.",
        ),
        (
            {"phases": ({"name": "a"}, {"name": "b", "clip": -2.0})},
            "recipe: phase b: clip must be above 0, got -2.0; 0 or none does not clip.",
        ),
        ({"phases": (3,)}, "recipe: a phase must have keys and values such as 'steps: 2000', got 3."),
        ({"save_every": -1}, "recipe: save_every must lie between 0 (off) and 2,147,483,648, got -1."),
        ({"validation": 1.0}, "recipe: validation must lie between 0 and 1, got 1.0; 0.02 holds out 2 % of the documents."),
        ({"steps": 3, "epochs": 2.0}, "recipe: steps and epochs: got 3 and 2; give one of them."),
        ({"epochs": 0.0}, "recipe: epochs must be above 0 and at most 4,096, got 0.0."),
        ({"betas": (0.9, "x")}, "recipe: betas must be two numbers, got (0.9, 'x')."),
        (
            {"validation": 0.0, "eval_every": 5},
            "recipe: eval_every: there is no held-out loss, got validation 0 and no eval_data; give one of them.",
        ),
        ({"ema": 1.0}, "recipe: ema must be 0 (off) or a decay below 1 such as 0.999, got 1.0."),
        ({"patience": 2}, "recipe: patience counts held-out losses, and eval_every is 0; say how often to evaluate."),
        ({"optimizer": "sgd"}, "recipe: optimizer must be adamw, adamw8bit or muon, got 'sgd'."),
        ({"precision": "bf61"}, "precision: got 'bf61', wanted one of fp32, tf32, bf16, bf16-pure, bf16-split, fp16, fp8."),
        ({"phases": ({"name": "a", "step": 1},)}, "recipe: phase a: 'step' is unknown; did you mean 'steps'?"),
        ({"phases": ({"seed": 1},)}, "recipe: phase phase-1: 'seed' is the whole run's, not a phase's."),
        ({"phases": ({"name": "a"}, {"name": "a"})}, "recipe: phases need names that differ, got a, a."),
        (
            {"phases": ({"name": "../a"},)},
            "recipe: phase '../a': wanted a name of letters, digits, - and _; it names a folder.",
        ),
    ],
)
def test_a_wrong_recipe(changes, sentence):
    assert refusal(ValueError, lambda: Recipe(**changes)) == sentence


def test_what_a_run_cannot_begin_with(corpus, tmp_path):
    def refusal(kind=ValueError, **changes):
        with pytest.raises(kind) as error:
            prepare(recipe(corpus, tmp_path / "new", **changes), progress=False)
        return str(error.value)

    assert refusal(model="12m").startswith(f"model: got '12m', wanted one of {', '.join(presets())} (with -tiny added: ")
    assert refusal(data=("nowhere.txt",)) == message("train/run_refusals:what_a_run_cannot_begin")
    book = tmp_path / "book.txt"
    book.write_text("A text. " * 500)
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    assert refusal(DataError, data=(str(book),), tokenizer=str(bad)).startswith(
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
    with pytest.raises(ValueError) as error:
        prepare(recipe(corpus, tmp_path), auto_batch=True, progress=False)
    assert str(error.value) == message("train/run_refusals:auto_batch_needs_a_gpu")


def test_a_folder_with_another_run(corpus, tmp_path):
    train(recipe(corpus, tmp_path, steps=2))
    with pytest.raises(ValueError) as error:
        prepare(recipe(corpus, tmp_path, steps=2), progress=False)
    assert str(error.value) == message("train/run_refusals:a_folder_with_another_ru", tmp_path / "checkpoints")
    with pytest.raises(ValueError) as error:
        prepare(recipe(corpus, tmp_path, steps=2, lr=1e-4, seed=1), resume=True, progress=False)
    assert str(error.value) == message("train/run_refusals:a_folder_with_another_ru.2")


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_that_are_all_damaged_are_not_replaced(corpus, tmp_path, resume):
    step = tmp_path / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{")
    with pytest.raises(DataError) as error:
        prepare(recipe(corpus, tmp_path), resume=resume, progress=False)
    assert str(error.value) == message("train/run_refusals:checkpoints_that_are_all", tmp_path / "checkpoints")


def test_a_corpus_that_was_built_anew_from_other_texts(corpus, tmp_path):
    """In the same place. Its batches would be others than those that the run has not seen yet."""
    shutil.copytree(corpus, tmp_path / "corpus")
    train(recipe(tmp_path / "corpus", tmp_path / "run", steps=2))
    shutil.rmtree(tmp_path / "corpus")
    Corpus.build(texts()[::-1], Corpus.open(corpus).tokenizer(), tmp_path / "corpus", progress=False)
    with pytest.raises(DataError) as error:
        prepare(recipe(tmp_path / "corpus", tmp_path / "run", steps=4), resume=True, progress=False)
    assert str(error.value) == message("train/run_refusals:a_corpus_that_was_built", tmp_path / "corpus")


def test_nothing_to_resume_is_said(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())
    prepare(recipe(corpus, tmp_path), resume=True, progress=False)
    assert message("train/run_refusals:nothing_to_resume_is_sai", tmp_path / "checkpoints").within(capsys.readouterr().err)


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(corpus, tmp_path):
    """It was found out at the first checkpoint, hours later."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("no folder")
    with pytest.raises(DataError, check=message("train/run_refusals:checkpoints_that_cannot")):
        prepare(recipe(corpus, tmp_path / "run"))
