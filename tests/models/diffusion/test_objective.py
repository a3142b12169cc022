"""masked_diffusion: which tokens are masked and what they weigh, the loss beside the formula, its mean beside all masks."""

import copy
import math
from itertools import combinations

import pytest
import torch
from torch import nn

from gpubound import Decoder, DecoderConfig, trace
from gpubound.models.diffusion.objective import MaskedDiffusion, spread_times
from gpubound.train import AdamW, TrainStep
from tests.train.both_ways import BothWays

MASK = 15
CPU = torch.device("cpu")


def batch(rows: int = 8, tokens: int = 32, prompt: int = 0, seed: int = 0) -> dict:
    ids = torch.randint(MASK, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "labels": labels}


def test_rates_are_uniform_and_spread_over_the_batch():
    torch.manual_seed(0)
    drawn = torch.stack([spread_times(8, 0.0, CPU) for _ in range(4000)])
    assert (drawn > 0).all() and (drawn <= 1).all()
    gaps = drawn.sort(1).values.diff(dim=1)
    assert torch.allclose(gaps, torch.full_like(gaps, 1 / 8), atol=1e-6), "one in each eighth"
    # The mean of 4,000 uniform numbers has a deviation of 0.0046, their mean square one of 0.0047.
    assert (drawn.mean(0) - 1 / 2).abs().max() < 0.03 and (drawn.square().mean(0) - 1 / 3).abs().max() < 0.03
    assert spread_times(1000, 0.25, CPU).min() > 0.25


def test_tokens_are_masked_on_their_own_and_prompts_never():
    torch.manual_seed(0)
    model, given = BothWays(), batch(rows=64, prompt=8)
    objective, shares = MaskedDiffusion(MASK), []
    for _ in range(50):
        _, count = objective(model, given)
        assert count == 64 * 24
        masked = model.seen[-1] != given["input_ids"]
        assert not masked[:, :8].any() and (model.seen[-1][masked] == MASK).all()
        shares.append(masked[:, 8:].float().mean(1))
    shares = torch.cat(shares)
    # A rate is uniform: its mean has a deviation of 0.29 / sqrt(50 · 64), smaller for being spread.
    assert abs(shares.mean().item() - 0.5) < 0.03
    assert abs(shares.var().item() - (1 / 12 + 1 / 6 / 24)) < 0.02, "of a rate's, and of 24 throws by it"


@pytest.mark.parametrize("whole", [False, True], ids=["head and loss as one", "whole logits"])
def test_the_loss_is_the_formula(monkeypatch, whole):
    model, given = BothWays().double(), batch(rows=4, tokens=12, prompt=3)
    objective = MaskedDiffusion(MASK)
    objective.prepare(model, given)
    monkeypatch.setattr(objective, "_why_all_logits", "for the test" if whole else None)
    torch.manual_seed(1)
    rate = spread_times(4, objective.least, CPU)
    torch.manual_seed(1)
    total, count = objective(model, given, scale=torch.tensor(0.5, dtype=torch.float64))
    total.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    seen = model.seen[-1]
    model.zero_grad()
    logits = model(seen)
    want = torch.zeros((), dtype=torch.float64)
    for row in range(4):
        for place in range(12):
            if seen[row, place] == MASK:
                want = want - logits[row, place].log_softmax(-1)[given["input_ids"][row, place]] / rate[row].double()
    (0.5 * want).backward()
    assert count == 4 * 9 and (seen == MASK).sum() > 4
    assert total.item() == pytest.approx(0.5 * want.item(), rel=1e-6)
    for got, p in zip(gradients, model.parameters()):
        assert (got - p.grad).norm() <= 1e-5 * p.grad.norm()


def enumerated(model: nn.Module, ids: torch.Tensor) -> float:
    """The bound of a row, by all its masks: a set S of masked places has the weight of its mean rate,
    ∫ t^(|S| - 1) (1 - t)^(n - |S|) dt = (|S| - 1)! (n - |S|)! / n!"""
    n, total = len(ids), 0.0
    for size in range(1, n + 1):
        weight = math.factorial(size - 1) * math.factorial(n - size) / math.factorial(n)
        for places in combinations(range(n), size):
            hidden = ids.clone()
            hidden[list(places)] = MASK
            logs = model(hidden[None])[0].log_softmax(-1)
            total -= weight * sum(logs[i, ids[i]].item() for i in places)
    return total / n


@pytest.mark.slow
@torch.no_grad()
def test_the_mean_is_the_bound_that_all_masks_give():
    model = BothWays(places=3).double()
    model.head.weight.mul_(6)  # so that what is seen matters
    ids = torch.tensor([3, 1, 4])
    want = enumerated(model, ids)
    given = {"input_ids": ids.repeat(4096, 1), "labels": ids.repeat(4096, 1)}
    objective, drawn = MaskedDiffusion(MASK), []
    for seed in range(4):
        torch.manual_seed(seed)
        total, count = objective(model, given)
        drawn.append((total / count).item())
    spread = torch.tensor(drawn).std().item() / 2
    assert spread < 0.02 * want and abs(sum(drawn) / 4 - want) < 0.04 * want
    # By exact counts of masked tokens: each third of the range masks one token more.
    measured = objective.validate(model, [given])
    assert measured["held_out"] == pytest.approx(want, rel=0.01)
    assert measured["perplexity"] == pytest.approx(math.exp(measured["held_out"]))
    torch.manual_seed(9)
    assert objective.validate(model, [given]) == measured, "the same masks whatever was drawn before"


def test_the_bound_falls_and_no_two_micro_batches_are_masked_alike():
    model, given = BothWays(), batch(rows=8, tokens=12)
    objective = MaskedDiffusion(MASK)
    before = objective.validate(model, [given])["held_out"]
    torch.manual_seed(0)
    with trace.strict():
        step = TrainStep(model, objective, AdamW(lr=1e-2), accumulate=2, precision="fp32", graph="off")
        model.seen.clear()
        for _ in range(30):
            values = step([given, given]).read()
    assert values.tokens == 2 * 8 * 12
    seen = [ids.tolist() for ids in model.seen]
    assert all(one not in seen[:at] for at, one in enumerate(seen))
    assert objective.validate(model, [given])["held_out"] < before - 0.5


def test_captured_is_eager():
    """The capture's certificate replays with other inputs; here, that it leaves the order of the random numbers alone."""
    models = [BothWays(seed=1)]
    models.append(copy.deepcopy(models[0]))
    reports = []
    for model, graph in zip(models, ("require", "off")):
        step = TrainStep(model, MaskedDiffusion(MASK), AdamW(lr=1e-2), precision="fp32", graph=graph)
        torch.manual_seed(3)
        reports.append([step(batch(seed=i)).read() for i in range(3)])
    for one, other in zip(*reports):
        assert (one.loss, one.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters()):
        assert (p - q).norm() <= 1e-5 * q.norm(), name


def shifted() -> dict:
    given = batch()
    return given | {"labels": given["labels"].roll(-1, 1)}


@pytest.mark.parametrize(
    "objective, model, given, named",
    [
        (MaskedDiffusion(15), Decoder(DecoderConfig(16, 32, 1, 2, 1, 16)), batch(), "Decoder is causal"),
        (MaskedDiffusion(), BothWays(), batch(), "mask_token: got None"),
        (MaskedDiffusion(16), BothWays(), batch(), "mask_token: got 16, but BothWays has the ids 0 to 15"),
        (MaskedDiffusion(15), BothWays(), shifted(), "labels must be the tokens in their own places"),
    ],
)
def test_refusals(objective, model, given, named):
    with pytest.raises(ValueError, match=f"^masked_diffusion: {named}"):
        objective(model, given)


@pytest.mark.parametrize("options, named", [({"least": 1.0}, "least: got 1.0"), ({"levels": 0}, "levels: got 0")])
def test_wrong_options(options, named):
    with pytest.raises(ValueError, match=f"^masked_diffusion: {named}"):
        MaskedDiffusion(**options)
