"""Recomputing and the micro-batch that fits: they change what a run holds, and no number of it."""

import pytest
import torch

from gpubound.train.prepare import fit_micro_batch, largest_micro_batch, prepare
from gpubound.train.recipe import Recipe
from tests.messages import message

from .runs import assert_same, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


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
    with pytest.raises(ValueError) as error:
        fit_micro_batch(run.stages, run.tokenizer, torch.device("cuda"))
    assert str(error.value) == message("train/run_memory:auto_batch_takes_one_pha")
