"""Muon: torch's own Muon and AdamW beside each other, one clip over both; skipped whole; resumed; captured."""

import copy

import pytest
import torch
from torch import nn

from gpubound.train import AdamW, Muon, Schedule, TrainStep, adamw
from gpubound.train.adamw import orthogonal
from tests.messages import refusals

from .conftest import Small, check_captured_skipped_and_resumed, cut, draw, named, small, spoiled, summed, usual_step
from .objectives.test_causal_lm import llama


def deep() -> Small:
    """Matrices of three shapes, two of one of them."""
    model = small(tied=False)
    model.mix = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(24, 8))
    return model


CONFIG = Muon(lr=2e-2, weight_decay=0.1, rest=AdamW(lr=1e-2, weight_decay=0.05))


def of_mix(name, parameter):
    return name.startswith("mix") and parameter.dim() == 2


def test_torch_muon_and_adamw(monkeypatch):
    monkeypatch.setattr(adamw, "fast_bf16", lambda device: True)  # torch's own iterates in bf16 on any device
    model = deep()
    theirs, start = copy.deepcopy(model), named(model)
    taken = [p for name, p in theirs.named_parameters() if of_mix(name, p)]
    rest = [p for name, p in theirs.named_parameters() if not of_mix(name, p)]
    matrices = torch.optim.Muon(taken, lr=2e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [p for p in rest if p.dim() > 1]}, {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)
    config = Muon(lr=2e-2, takes=of_mix, rest=AdamW(lr=1e-2, weight_decay=0.05))
    step = TrainStep(model, summed, config, accumulate=2, clip=0.5, precision="fp32", graph="off")
    for i in range(5):
        usual_step(theirs, draw(8, seed=i), matrices, adam)
        step(cut(draw(8, seed=i), 2))
    for (name, got), want in zip(model.named_parameters(), theirs.parameters()):
        moved = (want - start[name]).norm()
        # The iterations in bf16 turn the last bit of a gradient into 2 % of an update: torch's own do, fed g and 0.37 g.
        assert (got - want).norm() <= (1e-1 if of_mix(name, got) else 1e-3) * moved, name


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (8, 8)])
def test_one_update_is_torch_muons_bit_for_bit(shape, monkeypatch):
    monkeypatch.setattr(adamw, "fast_bf16", lambda device: True)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = nn.Parameter(torch.zeros(shape))
    theirs.grad = gradient.clone()
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    want = theirs.detach() / (-0.2 * 24**0.5 if 24 in shape else -0.2 * 8**0.5)
    assert torch.allclose(orthogonal(gradient[None], 5)[0].float(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_fp32_where_16_bits_are_slow(shape, monkeypatch):
    monkeypatch.setattr(adamw, "fast_bf16", lambda device: False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = orthogonal(x, 5)
    u, values, v = torch.linalg.svd(x.double() / x.double().norm(dim=(1, 2), keepdim=True), full_matrices=False)
    for _ in range(5):
        a, b, c = adamw.COEFFICIENTS
        values = a * values + b * values**3 + c * values**5
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), u @ torch.diag_embed(values) @ v, rtol=0, atol=1e-4)


def test_what_it_takes():
    model = llama(tied=True)
    chosen = CONFIG.chooser(model)
    assert {name.split(".")[-2] for name, p in model.named_parameters() if chosen(name, p)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not CONFIG.chooser(llama(tied=False))("lm_head.weight", model.lm_head.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_skipped_and_resumed(precision):
    def fresh(graph):
        model = deep()
        schedule = Schedule("linear", steps=9, warmup=2)
        return model, TrainStep(model, spoiled, CONFIG, clip=0.5, precision=precision, graph=graph, schedule=schedule)

    saved = check_captured_skipped_and_resumed(fresh)
    assert "v.mix.0.weight" not in saved and "m.mix.0.weight" in saved


def test_a_rate_set_by_hand_moves_both():
    """From ten times the rate set back to the configured one: the same update as never having changed it."""
    moved = []
    for ten in (False, True):
        model = deep()
        config = Muon(lr=2e-1, rest=AdamW(lr=1e-1)) if ten else Muon(lr=2e-2, rest=AdamW(lr=1e-2))
        step = TrainStep(model, summed, config, precision="fp32", graph="require")
        if ten:
            step.lr = 1e-2
        step(draw(4))
        moved.append(named(model))
    for name in moved[0]:
        assert torch.allclose(moved[0][name], moved[1][name], rtol=1e-6, atol=1e-8), name


@pytest.mark.gpu
def test_captured_on_the_gpu():
    torch.use_deterministic_algorithms(False)
    models = [deep().cuda() for _ in range(2)]
    steps = [TrainStep(m, summed, CONFIG, clip=0.5, graph=graph) for m, graph in zip(models, ("require", "off"))]
    for i in range(10):
        got, want = (step(tuple(t.cuda() for t in draw(4, seed=i))).read() for step in steps)
        assert got == want
    assert all(a.equal(b) for a, b in zip(*(model.parameters() for model in models)))


def test_memory_is_one_moment_less():
    model = nn.Linear(64, 64)
    step = TrainStep(model, summed, "muon", precision="bf16", graph="off")
    assert step.memory["moments"] == 4 * (64 * 64 + 64) + 4 * 64


def test_errors():
    refusals(
        "train/muon:errors",
        lambda: Muon(momentum=1.0),
        lambda: Muon(rest=AdamW(lr=0.0)),
        lambda: TrainStep(small(), summed, "muon", precision="bf16-pure"),
        lambda: TrainStep(small(), summed, "muon", precision="bf16-split"),
        lambda: TrainStep(small(), summed, Muon(takes=lambda name, p: "norm" in name)),
    )
