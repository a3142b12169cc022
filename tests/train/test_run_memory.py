"""Recomputing and the micro-batch that fits: they change what a run holds, and no number of it."""

import pytest
import torch

from gpubound.errors import DeviceError
from gpubound.train.prepare import fitted, largest_micro_batch, prepare
from gpubound.train.recipe import Recipe
from tests.messages import message

from .runs import assert_same, recipe, train

pytestmark = pytest.mark.usefixtures("on_reference", "one_thread")


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


@pytest.mark.gpu
def test_a_recompute_budget_on_a_gpu(corpus, tmp_path):
    """Rehearsed on the run's own model, whose numbers it leaves alone."""
    common = {"device": "cuda", "precision": "bf16"}
    plain, _ = train(recipe(corpus, tmp_path / "plain", **common))
    ample, _ = train(recipe(corpus, tmp_path / "ample", **common, recompute="100 GB"))
    assert not any(m.gradient_checkpointing for m in ample.model.model.layers)
    assert_same(plain, ample)
    with pytest.raises(DeviceError, check=message("train/run_memory:a_recompute_budget_on_a")):
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
    assert str(error.value) == message("train/run_memory:auto_batch_takes_one_pha")
