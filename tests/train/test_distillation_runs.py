"""`objective: distillation` in a run: the teacher is a folder, stays out of checkpoints, and its tokens are compared first."""

import pytest
import torch

from gpubound.data import Corpus, train_tokenizer
from gpubound.errors import DataError
from gpubound.models.llama import checkpoint as llama
from gpubound.train.prepare import check_inputs, prepare

from .runs import assert_same, recipe, texts, train


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    """A folder like that of `base`, with other weights."""
    torch.manual_seed(1)
    model = llama.make("tiny", 320, 4096, torch.device("cpu"))
    for p in model.parameters():
        p.data.mul_(1.5)
    return llama.save(model, tmp_path_factory.mktemp("teacher") / "hf", Corpus.open(corpus).tokenizer())


def of(corpus, base, teacher, out, **changes):
    options = {"model": str(base), "objective": "distillation", "objective_options": {"teacher": str(teacher)}}
    return recipe(corpus, out, **options | {"steps": 6, "lr": 3e-3, "eval_every": 3} | changes)


@pytest.mark.slow
def test_a_run_learns_its_teacher_and_resumes_to_the_bit(corpus, base, teacher, tmp_path):
    whole, records = train(of(corpus, base, teacher, tmp_path / "whole"))
    first, last = (record for record in records if "held_out" in record)
    assert 0 < last["held_out"] == last["divergence"] < first["divergence"] and last["cross_entropy"] > 0
    names = whole.checkpoints.latest().tensors().keys()
    weights = {name for name in names if name.startswith("model.")}
    assert weights == {f"model.{name}" for name in whole.model.state_dict()}
    train(of(corpus, base, teacher, tmp_path / "cut"), until=3)
    resumed, _ = train(of(corpus, base, teacher, tmp_path / "cut"), resume=True)
    assert_same(whole, resumed)


def test_what_a_run_refuses_before_it_builds(corpus, base, tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*config\.json"):
        check_inputs(of(corpus, base, tmp_path / "nowhere", tmp_path))
    torch.manual_seed(1)
    foreign = llama.save(llama.make("tiny", 320, 4096, torch.device("cpu")), tmp_path / "other", train_tokenizer(texts(6), 300))
    with pytest.raises(ValueError, match="another tokenizer"):
        prepare(of(corpus, base, foreign, tmp_path / "run"), progress=False)
