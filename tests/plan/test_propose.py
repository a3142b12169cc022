"""Which ways to run a step are proposed, and in which order."""

import json
from dataclasses import replace

import pytest
import torch

from gpubound.models.llama.checkpoint import hf_config
from gpubound.models.llama.decoder import PRESETS
from gpubound.plan.costs import collectives, seconds, total
from gpubound.plan.propose import FREE, proposals, summed_once
from gpubound.plan.step import GPUS, step_of
from gpubound.train.recipe import Recipe
from gpubound.train.recipe_checks import MOST_ACCUMULATE

H200 = GPUS["h200"]


def test_proposals_keep_the_step_and_the_best_one_fits():
    recipe = Recipe(model="8b", vocabulary=128256, seq=4096, micro_batch=4, accumulate=512)
    for world in (1, 8):
        as_it_is, found = proposals(recipe, world, H200, H200.memory)
        assert all(p.step.tokens_per_step == recipe.tokens_per_step for p in [as_it_is, *found])
        best = found[0]
        if world == 1:
            assert not best.fits and all(p.bytes > H200.memory * (1 - FREE) for p in found)
        else:
            assert best.parallel == "fsdp" and best.fits and not as_it_is.fits
            assert all(p.tokens_per_s <= best.tokens_per_s / 0.98 for p in found if p.fits)


def test_a_model_that_fits_is_replicated_and_memory_decides_how_much_is_recomputed():
    recipe, small = Recipe(model="1b", vocabulary=128256, seq=2048, micro_batch=8, accumulate=64), 27 << 30
    _, found = proposals(recipe, 8, H200, H200.memory)
    assert found[0].parallel == "ddp" and found[0].step.recompute in ("none", "cheap")
    _, tight = proposals(recipe, 8, H200, small)
    some = [p for p in tight if p.step.recompute.isdecimal() and p.fits]
    assert some and all(p.bytes <= small * (1 - FREE) for p in some)
    assert total(replace(some[0].step, recompute=str(some[0].step.recomputed - 1))) > small * (1 - FREE)


def test_shards_sum_once_a_step_where_full_gradients_fit():
    recipe = Recipe(model="1b", vocabulary=128256, seq=2048, micro_batch=4, accumulate=64)
    _, found = proposals(recipe, 8, H200, H200.memory)
    several = [p for p in found if p.step.sharded and p.step.accumulate > 1]
    assert several and all(p.step.sum_once for p in several) and not any(p.step.sum_once for p in found if p not in several)
    for p in several:
        each = replace(p.step, sum_once=False)
        assert total(p.step) - total(each) == 4 * p.step.parameters
        before, after = ({call.what: call.times for call in collectives(step)} for step in (each, p.step))
        n, layers = p.step.accumulate, p.step.config.layers
        assert (before["gradient of a block"], after["gradient of a block"]) == (n * layers, layers)
        assert p.step_s < sum(seconds(each, H200).values())
        least = total(p.step)
        assert [summed_once(each, limit).sum_once for limit in (least - 1, least)] == [False, True]


def test_muon_is_not_sharded():
    recipe = Recipe(model="350m", seq=1024, micro_batch=4, accumulate=16, optimizer="muon")
    _, found = proposals(recipe, 8, H200, H200.memory)
    assert found and {p.parallel for p in found} == {"ddp"}


def test_no_proposal_is_beyond_what_train_takes():
    """A micro-batch of one row a step of 2^32 rows would have 2^32 of them."""
    recipe = Recipe(model="1m", seq=1, micro_batch=1 << 16, accumulate=MOST_ACCUMULATE)
    _, found = proposals(recipe, 1, H200, H200.memory)
    assert found and all(p.step.accumulate <= MOST_ACCUMULATE for p in found)
    for p in found:
        replace(recipe, micro_batch=p.step.rows, accumulate=p.step.accumulate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with the config of 8b and no weights."""
    path = tmp_path_factory.mktemp("8b")
    (path / "config.json").write_text(json.dumps(hf_config(PRESETS["8b"], torch.bfloat16)))
    return path


def adapted(folder, **lora) -> Recipe:
    return Recipe(model=str(folder), data=("texts",), lora={"rank": 16} | lora, seq=4096, micro_batch=2, accumulate=512)


@pytest.mark.slow
def test_a_base_that_fits_no_gpu_is_sharded_and_a_quantised_one_is_replicated(folder):
    size = 20 << 30
    _, full = proposals(adapted(folder), 8, H200, size)
    _, quantised = proposals(adapted(folder, base="nf4"), 8, H200, size)
    assert {p.parallel for p in full if p.fits} == {"fsdp"}
    assert {p.parallel for p in quantised if p.fits} == {"fsdp", "ddp"}
    assert all(p.step.tokens_per_step == 4096 * 1024 for p in full)


@pytest.mark.parametrize(
    ("lora", "facts"),
    [
        ({"dora": True}, ("lora", "dora")),
        ({"dropout": 0.1}, ("lora", "dropout")),
        ({"targets": ["q_proj", "embed_tokens"]}, ("targets", "blocks")),
        ({"targets": r".*\.[01]\.self_attn\.q_proj"}, ("targets", "blocks")),
        ({"targets": ["nose"]}, ("'nose'", "q_proj")),
    ],
)
def test_adapters_that_are_not_counted_are_refused(folder, lora, facts):
    with pytest.raises(ValueError) as caught:
        step_of(adapted(folder, **lora))
    assert not [fact for fact in facts if fact not in str(caught.value)]
