"""Activation checkpointing: the same gradients, less kept; found blocks; dropout dropped twice alike; what a budget needs."""

import doctest
from itertools import pairwise

import pytest
import torch
from torch import nn

from gpubound.train import TrainStep, offload
from gpubound.train.offload import blocks_of, drops_out, find_blocks, parse, recompute_blocks
from tests.messages import message, refusal

from .objectives.test_causal_lm import batch, llama


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def stack(**options) -> Stack:
    torch.manual_seed(0)
    return Stack(**options)


def squares(model, x):
    return model(x).square().sum(), x.numel()


def kept(model, x) -> int:
    """Elements that autograd saved for backward in a forward."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        model(x)
    return sum(sizes)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_same_steps(dropout):
    results = []
    for way in ("none", "blocks"):
        model = stack(dropout=dropout)
        step = TrainStep(model, squares, precision="fp32", graph="off", recompute=way)
        torch.manual_seed(1)
        results.append(([step(torch.randn(4, 8)).read() for _ in range(3)], [p.detach().clone() for p in model.parameters()]))
    (values, weights), (again, weights_again) = results
    assert values == again
    assert all(a.equal(b) for a, b in zip(weights, weights_again))


def test_hugging_face_blocks():
    plain, lean = llama(), llama()
    step = TrainStep(lean, "causal_lm", precision="fp32", graph="off", recompute="blocks")
    assert kept(lean.model, batch(0)["input_ids"]) < kept(plain.model, batch(0)["input_ids"]) / 2
    want = TrainStep(plain, "causal_lm", precision="fp32", graph="off")(batch(0)).read()
    assert step(batch(0)).read() == want
    step.close()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in lean.modules())


def test_what_is_found():
    model = stack()
    assert find_blocks(model) == list(model.blocks)
    assert drops_out(stack(dropout=0.1)) and not drops_out(stack())
    assert drops_out(llama(attention_dropout=0.1)) and not drops_out(llama())
    assert refusal(ValueError, lambda: recompute_blocks(nn.Linear(2, 2))) == message("train/recompute:what_is_found")


def kinds():
    """(model, what runs it) by name: blocks that wrap themselves, and Hugging Face's protocol."""
    return {
        "plain": (stack(), lambda model: model(torch.ones(100, 8))),
        "hugging face": (llama(), lambda model: model.model(batch(0)["input_ids"])),
    }


@pytest.mark.parametrize("kind", kinds())
def test_the_first_so_many(kind):
    """Each more keeps less, the last as little as all of them; and undone, as much as before."""
    model, run = kinds()[kind]
    by_count = []
    for count in range(len(blocks_of(model)) + 1):
        undo = recompute_blocks(model, count)
        by_count.append(kept(run, model))
        undo()
    assert len(blocks_of(model)) == len(by_count) - 1 == {"plain": 3, "hugging face": 2}[kind]
    assert all(more > less for more, less in pairwise(by_count)) and kept(run, model) == by_count[0]
    undo = recompute_blocks(model)
    assert kept(run, model) == by_count[-1]
    undo()
    with pytest.raises(ValueError) as error:
        recompute_blocks(model, 9)
    assert str(error.value) == message("train/recompute:the_first_so_many", len(by_count) - 1)


def test_the_first_are_those_that_recompute():
    model = stack()
    recompute_blocks(model, 2)
    assert ["forward" in block.__dict__ for block in model.blocks] == [True, True, False]


def test_what_is_asked_for():
    assert doctest.testmod(offload).failed == 0
    assert [parse(word) for word in ("none", "blocks", "7", 7)] == [("none", 0), ("blocks", 0), ("count", 7), ("count", 7)]
    with pytest.raises(ValueError, match="40 GB"):
        parse("40 GB")
