"""What a run refuses before it begins, in its own words."""

import shutil
from functools import partial
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
from tests.messages import message, refusals

from .runs import recipe, texts, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_not_even_one_row_fits():
    def attempt(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DeviceError) as error:
        largest_micro_batch(Recipe(micro_batch=2), attempt, torch.device("cpu"))
    assert str(error.value) == message("train/run_refusals:not_even_one_row_fits")


def test_a_wrong_recipe():
    wrong = [
        {"steps": 0}, {"steps": 10**11}, {"steps": 2.5}, {"seed": 1 << 63}, {"vocabulary": 0}, {"data_bytes": 0},
        {"clip": -1.0}, {"lr": 0.0}, {"lr": float("nan")}, {"warmup": float("nan")}, {"graph": "maybe"}, {"graph": True},
        {"out": ""}, {"data": ("",)}, {"tokenizer": "a\0b"}, {"out": "\udcff"}, {"data": "books"},
        {"precision": "bf16-pure", "optimizer": "muon"}, {"phases": ({"name": "a"}, {"name": "b", "clip": -2.0})},
        {"phases": (3,)}, {"save_every": -1}, {"validation": 1.0}, {"steps": 3, "epochs": 2.0}, {"epochs": 0.0},
        {"betas": (0.9, "x")}, {"validation": 0.0, "eval_every": 5}, {"patience": 2}, {"optimizer": "sgd"},
        {"precision": "bf61"}, {"phases": ({"name": "a", "step": 1},)}, {"phases": ({"seed": 1},)},
        {"phases": ({"name": "a"}, {"name": "a"})}, {"phases": ({"name": "../a"},)},
    ]  # fmt: skip
    refusals("train/run_refusals:a_wrong_recipe", *(partial(Recipe, **changes) for changes in wrong))


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
