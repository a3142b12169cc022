"""Activation checkpointing: the same gradients, less kept; found blocks; dropout dropped twice alike; what a budget needs."""

import doctest
from itertools import pairwise

import pytest
import torch
from torch import nn

from gpubound import trace
from gpubound.errors import DeviceError
from gpubound.train import TrainStep, recompute
from gpubound.train.recompute import blocks_of, drops_out, find_blocks, fit_blocks, parse, peak_bytes, recompute_blocks
from gpubound.words import readable
from tests.messages import message

from .objectives.test_causal_lm import batch, llama

pytestmark = pytest.mark.usefixtures("on_reference")


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


def test_less_is_kept_and_undone():
    model, x = stack(), torch.randn(100, 8)
    before = kept(model, x)
    undo = recompute_blocks(model)
    assert kept(model, x) < before / 4
    undo()
    assert kept(model, x) == before


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
    with pytest.raises(ValueError) as error:
        recompute_blocks(nn.Linear(2, 2))
    assert str(error.value) == message("train/recompute:what_is_found")


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


@pytest.mark.parametrize("kind", kinds())
def test_a_budget_takes_as_few_as_it_needs(kind, capsys, monkeypatch):
    """The peak is what autograd keeps, counted in a real forward; every budget between none and all is tried."""
    monkeypatch.setattr(trace, "_said", set())
    model, run = kinds()[kind]
    peaks, tried = [], []

    def measured(rehearse, device):
        tried.append(0)
        return kept(run, model)

    monkeypatch.setattr(recompute, "peak_bytes", measured)

    for count in range(len(blocks_of(model)) + 1):
        undo = recompute_blocks(model, count)
        peaks.append(kept(run, model))
        undo()
    for count, peak in enumerate(peaks):
        tried.clear()
        assert fit_blocks(model, lambda: None, peak, torch.device("cpu")) == count
        assert kept(run, model) == peaks[0] and len(tried) <= 3
    assert message("train/recompute:a_budget_takes_as_few_as", len(peaks) - 1).within(capsys.readouterr().err)
    with pytest.raises(DeviceError) as error:
        fit_blocks(model, lambda: None, peaks[-1] - 1, torch.device("cpu"))
    assert str(error.value) == message("train/recompute:a_budget_takes_as_few_as.2", len(peaks) - 1, readable(peaks[-1] - 1))


def test_out_of_memory_is_too_much(monkeypatch):
    model = stack()

    def peak(rehearse, device):
        if sum("forward" in block.__dict__ for block in model.blocks) < 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 1

    monkeypatch.setattr(recompute, "peak_bytes", peak)
    assert fit_blocks(model, lambda: None, 10, torch.device("cpu")) == 2


def test_what_is_asked_for():
    assert doctest.testmod(recompute).failed == 0
    assert [parse(word) for word in ("none", "blocks", "7", "1.5 GiB")] == [
        ("none", 0), ("blocks", 0), ("count", 7), ("budget", 3 * 2**29),
    ]  # fmt: skip
    with pytest.raises(ValueError) as error:
        peak_bytes(lambda: None, torch.device("cpu"))
    assert str(error.value) == message("train/recompute:what_is_asked_for")


@pytest.mark.gpu
def test_the_peak_of_a_gpu_keeps_to_the_budget(capsys, monkeypatch):
    """Three quarters of the way from all to none: some blocks recompute, not all, and the next rehearsal keeps to it."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(trace, "_said", set())
    model = stack().cuda()
    x = torch.randn(200_000, 8, device="cuda")
    cuda = torch.device("cuda", 0)

    def rehearse():
        model(x).square().sum().backward()
        model.zero_grad()

    rehearse()
    none = peak_bytes(rehearse, cuda)
    undo = recompute_blocks(model)
    every = peak_bytes(rehearse, cuda)
    undo()
    budget = every + (none - every) // 4 * 3
    count = fit_blocks(model, rehearse, budget, cuda)
    recompute_blocks(model, count)
    assert 0 < count < 3 and peak_bytes(rehearse, cuda) <= budget
