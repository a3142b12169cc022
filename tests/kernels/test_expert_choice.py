"""Experts chosen by sigmoid scores, by groups, and the gate of a shared expert: parity and definitions."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.experts import ExpertRouting
from gpubound.kernels.registry import load

from .cases import TOLERANCE, draw, same


def selected(source, logits, routing, slots):
    rows, experts = logits.shape
    spare, shares = logits.new_zeros(rows, 2, experts), logits.new_zeros(rows, slots)
    ids = torch.zeros(rows, slots, device=logits.device, dtype=torch.int32)
    return load(source, "select_experts")(logits, routing, spare, ids, shares)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("experts, groups, kept, slots", [(8, 1, 1, 3), (8, 4, 2, 4), (20, 5, 2, 4), (160, 8, 3, 6)])
def test_the_definition(device, experts, groups, kept, slots, normalise):
    """One expert after the other, in plain Python."""
    logits = draw(device, torch.float32, 3, experts)
    routing = ExpertRouting(draw(device, torch.float32, experts, seed=1) / 2, normalise, 1.5, groups, kept)
    results = {source: selected(source, logits, routing, slots) for source in ("triton", "reference")}
    size = experts // groups
    for row, line in enumerate(logits.double().sigmoid().tolist()):
        values = [score + correction for score, correction in zip(line, routing.correction.tolist())]
        totals = [sum(sorted(values[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -totals[g])[:kept]
        ids = sorted((i for g in best for i in range(g * size, (g + 1) * size)), key=lambda i: -values[i])[:slots]
        shares = torch.tensor([line[i] for i in ids], device=device) * 1.5
        shares = shares / sum(line[i] for i in ids) if normalise else shares
        for source, (found, got) in results.items():
            assert found[row].tolist() == ids, source
            same(source, got[row], shares.float(), 1e-6)


def test_a_softmax_over_those_that_are_chosen(device):
    logits = draw(device, torch.float32, 3, 20)
    want = logits.softmax(-1).topk(4)
    for source in ("triton", "reference"):
        ids, shares = selected(source, logits, ExpertRouting(None, True), 4)
        order = shares.sort(-1, descending=True)
        assert torch.equal(ids.gather(-1, order.indices).long(), want.indices), source
        same(source, order.values, want.values / want.values.sum(-1, keepdim=True), 1e-6)


@pytest.mark.parametrize("groups", [1, 2])
def test_ids_are_distinct_whatever_the_logits(device, groups):
    """Equal logits in the order of the experts; a NaN first, and its share is NaN."""
    logits = torch.zeros(2, 8, device=device)
    logits[1, 5] = float("nan")
    routing = ExpertRouting(torch.zeros(8, device=device), False, 1.0, groups, groups)
    for source in ("triton", "reference"):
        ids, shares = selected(source, logits, routing, 3)
        assert ids.tolist() == [[0, 1, 2], [5, 0, 1]], source
        assert shares[1, 0].isnan() and shares[:, 1:].eq(0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_a_shared_expert(device, dtype):
    x, norm = draw(device, torch.float32, 2, 40), kernels.Norm(draw(device, dtype, 40, seed=1), 1e-2)
    weight, h = draw(device, dtype, 1, 40, seed=2), draw(device, dtype, 2, 1500, seed=3)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight.float()
    want = h.float() / (1 + (-normed @ weight.float().t()).exp())
    for source in ("triton", "reference"):
        same(source, load(source, "gate_rows")(x, norm, weight, h.clone()).float(), want, max(1e-5, TOLERANCE[dtype]))


@pytest.mark.parametrize("groups, kept, slots", [(3, 1, 1), (4, 5, 1), (8, 1, 1), (4, 1, 3)])
def test_groups_that_do_not_fit_are_refused(device, groups, kept, slots):
    routing = ExpertRouting(torch.zeros(8, device=device), True, 1.0, groups, kept)
    ids = torch.zeros(1, slots, device=device, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be in groups of equal size"):
        kernels.select_experts(torch.zeros(1, 8, device=device), routing, torch.zeros(1, 2, 8, device=device), ids, ids.float())
