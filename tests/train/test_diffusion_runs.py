"""Runs of masked diffusion: by the alias of the command line, stopped and resumed bit for bit, on chats whose prompts stay."""

from dataclasses import replace

import pytest
import torch

from gpubound.data import Tokenizer
from gpubound.models import RichardsConfig, RichardsDecoder
from gpubound.models.diffusion.objective import MaskedDiffusion
from gpubound.models.richards.checkpoint import sizes
from gpubound.train.records import flops_of

from .runs import assert_same, losses, recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")

DIFFUSION = {"model": "diffusion-tiny", "objective": "diffusion", "steps": 6, "seq": 16}


@pytest.mark.slow
def test_stopped_and_resumed_it_is_the_same_run(corpus, tmp_path):
    """The masks, too: they come from torch's generator, whose state a checkpoint holds. Validation draws from its own."""
    changes = DIFFUSION | {"eval_every": 3, "save_every": 2}
    whole, records = train(recipe(corpus, tmp_path / "whole", **changes))
    _, before = train(recipe(corpus, tmp_path / "parts", **changes), until=3)
    spelled = changes | {"objective": "masked_diffusion", "objective_options": {"levels": 8}}  # the same run in more words
    parts, after = train(recipe(corpus, tmp_path / "parts", **spelled), resume=True)
    assert_same(parts, whole)
    assert losses(before) | losses(after) == losses(records) and len(set(losses(records).values())) == 6
    assert records[0]["tokens"] == 2 * 4 * 16, "every token counts, masked or not"
    assert records[-1]["held_out"] == whole.evaluations[6] and records[-1]["perplexity"] > 1


@pytest.mark.slow
def test_an_export_holds_the_mask_token(corpus, tmp_path):
    run, _ = train(recipe(corpus, tmp_path / "run", **DIFFUSION | {"steps": 1}))
    built = run.stages[0].training.tokenizer()
    exported = Tokenizer.load(run.export(tmp_path / "hf"))
    assert built.mask is None and exported.mask == run.objective.mask_token == built.vocab_size
    assert run.model.config.vocabulary % 64 == 0 and run.model.config.vocabulary > exported.mask
    assert exported.difference(built) is None


def test_the_work_of_a_token_that_sees_both_sides():
    """Attention fills its whole square: 12 · seq · width a layer, forward and backward."""
    small = RichardsConfig(32, 48, 3, 4, 2, 64, head_width=8)
    models = [RichardsDecoder(replace(small, causal=causal)) for causal in (True, False)]
    causal, both = (flops_of(model, sizes(model)).flops_per_token(100) for model in models)
    assert both - causal == 6 * 3 * 32 * 100


@pytest.mark.slow
def test_prompts_of_chats_are_never_masked(two_phases, tmp_path, monkeypatch):
    seen, loss = [], MaskedDiffusion._masked_loss

    def heard(self, model, inputs, labels, masked, *rest):
        seen.append((inputs["input_ids"], labels, masked))
        return loss(self, model, inputs, labels, masked, *rest)

    monkeypatch.setattr(MaskedDiffusion, "_masked_loss", heard)
    run, records = train(recipe("", tmp_path, **DIFFUSION, **two_phases))
    assert run.finished and {record["phase"] for record in records} == {"pretrain", "instruct"}
    counts = [(labels != -100).float().mean().item() for _, labels, _ in seen]
    assert counts[0] == 1 and 0.1 < counts[-1] < 0.9, "all of a book, a part of a chat"
    for ids, labels, masked in seen:
        assert not (masked & (labels == -100)).any() and torch.equal(labels[labels != -100], ids[labels != -100])
