"""DeepSeek-V4's choice of experts: both mirrors beside the formula in fp64, and the shared expert that is made beside."""

import pytest
import torch

from gpubound.kernels.registry import load
from gpubound.models.deepseek_v4.kernels.products import Gated
from tests.kernels.cases import SOURCES, assert_inside, banded, draw


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("hashed", [False, True])
def test_the_choice_by_softplus_scores(source, hashed, device):
    """Beside the formula in fp64, for logits small, large and equal; a NaN spoils the shares of its row alone."""
    logits = draw(device, torch.float32, 5, 11) * torch.tensor([1.0, 30.0, 1.0, 1.0, 1.0], device=device)[:, None]
    logits[2], logits[3, :4], logits[4, 6] = 0.5, -17.0, float("nan")
    correction = None if hashed else draw(device, torch.float32, 11, seed=1).round(decimals=1)
    if correction is not None:
        correction[3:] = 0.0
    table = torch.stack([torch.arange(11).roll(n)[:3] for n in range(7)]).to(device) if hashed else None
    token = torch.tensor([2, 0, 5, 6, 4], device=device) if hashed else None
    ids = torch.zeros(5, 3, device=device, dtype=torch.int32)
    whole, shares = banded((5, 3), device)
    load(source, "choose_experts")(logits, correction, table, token, 1.5, ids, shares)
    scores = logits.double().exp().log1p().sqrt()
    for b in range(5):
        if table is not None:
            want = table[token[b]].tolist()
        else:
            ranked = (scores[b] + correction.double()).nan_to_num(nan=float("inf")).tolist()
            want = sorted(range(11), key=lambda e: (-round(ranked[e], 5), e))[:3]
        assert ids[b].tolist() == want
        share = scores[b, want] / scores[b, want].sum() * 1.5
        torch.testing.assert_close(shares[b].double(), share, rtol=1e-5, atol=0, equal_nan=True)
    assert shares[4].isnan().all() or hashed
    if not shares.isnan().any():
        assert_inside(whole, shares)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("width", [40, 1300])  # more than a program makes
def test_the_shared_expert_is_made_beside_the_choice(source, width, device):
    """Of rows that lie apart, as the product of both gives them; the choice is as it is alone."""
    logits, correction = draw(device, torch.float32, 3, 11), draw(device, torch.float32, 11, seed=1)
    both = draw(device, torch.float32, 3, 2 * width, seed=2) * 3
    both[1, 5] = float("nan")
    gate, up = both.split(width, 1)
    whole, out = banded((3, width), device)

    def chosen(*gated: Gated) -> tuple:
        ids, shares = torch.zeros(3, 4, device=device, dtype=torch.int32), torch.zeros(3, 4, device=device)
        return load(source, "choose_experts")(logits, correction, None, None, 1.5, ids, shares, *gated)

    *found, made = chosen(Gated(gate, up, 2.0, out))
    for one, other in zip(found, chosen()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    g, u = gate.double().clamp(max=2.0), up.double().clamp(-2.0, 2.0)
    torch.testing.assert_close(made.double(), g * g.sigmoid() * u, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert made.isnan().sum() == 1
    out.nan_to_num_()
    assert_inside(whole, out)
