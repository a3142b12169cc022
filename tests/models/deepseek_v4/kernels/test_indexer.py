"""The indexer: scores are transformers', the choice is torch's with ties by place, whatever lies behind the limit."""

import pytest
import torch

from gpubound.kernels import plans
from gpubound.kernels.plans.types import TilePlan
from gpubound.kernels.registry import load
from gpubound.models.deepseek_v4 import kernels
from tests.kernels.cases import TOLERANCE, assert_inside, banded, draw, same

from .theirs import config, filled, theirs

FP32, NAN, INF = torch.float32, float("nan"), float("inf")
BOTH = ("triton", "reference")


def limits(device, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=device, dtype=torch.int32)


@pytest.mark.parametrize("source", BOTH)
def test_scores_are_transformers(source, device):
    """Beside DeepseekV4IndexerScorer; entries behind each token's limit are NaN, and give -inf."""
    c = config(index_n_heads=3, index_head_dim=24)
    scorer = filled(theirs().DeepseekV4IndexerScorer(c))
    q, k, x = (draw(torch.device("cpu"), FP32, *s, seed=i) for i, s in enumerate(((2, 2, 3, 24), (2, 70, 24), (2, 2, 24))))
    with torch.no_grad():
        want = scorer(q, k, x).flatten(0, 1)
        weights = (scorer.weights_proj(x) * scorer.weights_scaling).flatten(0, 1)
    seen = limits(device, 70, 9, 0, 66)
    k[1, 66:] = NAN
    whole, out = banded((4, 70), device)
    load(source, "index_scores")(q.flatten(0, 1).to(device), k.to(device), weights.to(device), seen, scorer.softmax_scale, out)
    hidden = torch.arange(70, device=device) >= seen[:, None]
    assert (out[hidden] == -INF).all()
    same("scores", out[~hidden], want.to(device)[~hidden], 1e-5)  # on a GPU, of three tf32 products
    assert_inside(whole, out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_scores_match(dtype, device):
    q, k = draw(device, dtype, 2, 5, 40), draw(device, dtype, 1, 130, 40, seed=1)
    w, seen = draw(device, FP32, 2, 5, seed=2), limits(device, 130, 64)
    got, want = (load(s, "index_scores")(q, k, w, seen, 0.2, torch.zeros(2, 130, device=device)) for s in BOTH)
    same("scores", got.clamp_min(-9), want.clamp_min(-9), 1e-5)


def test_scores_of_nothing_are_equal_and_not_negative(device):
    """No product above 0, and weights of both signs: sums of 0 and -0."""
    for source in BOTH:
        out = torch.zeros(1, 9, device=device)
        q, k = torch.ones(1, 2, 16, device=device), -torch.ones(1, 9, 16, device=device)
        load(source, "index_scores")(q, k, torch.tensor([[-1.0, -2.0]], device=device), limits(device, 9), 1.0, out)
        assert (out.view(torch.int32) == 0).all()


CHOICES = {
    "fewer than k": ([3.0, 1.0, 2.0, 9.0], 3, 5, [0, 1, 2, -1, -1]),
    "as many as k": ([3.0, 1.0, 2.0], 3, 3, [0, 1, 2]),
    "the largest": ([3.0, -1.0, 2.0, 5.0, -7.0], 5, 2, [0, 3]),
    "negative scores": ([-3.0, -1.0, -2.0, -5.0], 4, 2, [1, 2]),
    "of equal ones the lower": ([0.0, 1.0, 0.0, -0.0, 0.0, 1.0], 6, 4, [0, 1, 2, 5]),
    "all equal": ([0.0] * 9, 9, 4, [0, 1, 2, 3]),
    "behind the limit": ([1.0, 2.0, 3.0, 99.0, NAN], 3, 2, [1, 2]),
    "minus infinity is never taken": ([-INF, 1.0, -INF, 2.0, -INF], 5, 4, [1, 3, -1, -1]),
    "infinity and nan": ([5.0, NAN, INF, 6.0], 4, 2, [1, 2]),
    "neighbours in the last bit": ([1.0000001, 1.0, 1.0000002, 1.0], 4, 2, [0, 2]),
    "nothing seen": ([1.0, 2.0], 0, 2, [-1, -1]),
    "a limit that is none": ([1.0, 2.0], 99, 1, [1]),
}


@pytest.mark.parametrize("block", [2, 16384], ids=["in stretches", "at once"])
@pytest.mark.parametrize("source", BOTH)
def test_choices(source, block, device, monkeypatch):
    for what, (given, limit, k, want) in CHOICES.items():
        monkeypatch.setitem(plans.TRIED, ("index_topk", "", (plans.power_of_two(len(given)),)), TilePlan(block, 1))
        scores = torch.tensor([given], device=device)
        ids = torch.full((1, k), 77, device=device, dtype=torch.int32)
        load(source, "index_topk")(scores, limits(device, limit), ids)
        assert ids[0].tolist() == want, what


@pytest.mark.parametrize("block", [64, 128, 16384], ids=["the best in blocks", "in stretches", "at once"])
def test_many_choices_match(block, device, monkeypatch):
    """Ties in plenty, and a token for each way of seeing less than all; beside torch's own top-k where there is no tie.

    Of stretches of 64 the 60 best are left: eight times 60 are no block, so the second launch goes through them in blocks."""
    monkeypatch.setitem(plans.TRIED, ("index_topk", "", (512,)), TilePlan(block, 4))
    scores = draw(device, FP32, 6, 500)
    scores[:3] = (scores[:3] * 4).round() / 4
    seen = limits(device, 500, 61, 20, 500, 300, 101)
    got, want = (load(s, "index_topk")(scores, seen, torch.zeros(6, 60, device=device).int()) for s in BOTH)
    assert got.equal(want)
    for row in (3, 4, 5):
        best = scores[row, : int(seen[row])].topk(60).indices.sort().values
        assert got[row].equal(best.int())


def test_wrong_arguments():
    given = torch.ones(3, 2, 8), torch.ones(2, 4, 8), torch.ones(3, 2), limits("cpu", 1, 1, 1), 1.0, torch.ones(3, 4)
    with pytest.raises(ValueError, match="index_scores: q must have as many tokens for each of 2 rows of keys, got 3"):
        kernels.index_scores(*given)
    with pytest.raises(ValueError, match=r"index_topk: limit must be a contiguous torch.int32 \(2,\), got torch.int64"):
        kernels.index_topk(torch.ones(2, 4), torch.ones(2).long(), torch.ones(2, 3).int())
