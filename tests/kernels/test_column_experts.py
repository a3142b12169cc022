"""Experts with biases and clamped units whose weights are stored by column: parity and definitions."""

import pytest
import torch

from gpubound.kernels import Norm
from gpubound.kernels.registry import load

from .cases import DTYPES, SOURCES, TOLERANCE, agree, draw, same

IDS = [[4, 0, 2], [2, 3, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, units", [(48, 40), (100, 72)])
def test_units(device, dtype, hidden, units):
    x, norm = draw(device, torch.float32, 2, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-2)
    weight, bias = draw(device, dtype, 5, hidden, 2 * units, seed=2) / 4, draw(device, dtype, 5, 2 * units, seed=3)
    ids = torch.tensor(IDS, device=device, dtype=torch.int32)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight.float()
    both = torch.einsum("bk,bskn->bsn", normed, weight.float()[ids.long()]) + bias.float()[ids.long()]
    gate, up = both[..., ::2].clamp(max=1.0), both[..., 1::2].clamp(-1.0, 1.0)
    assert (both[..., ::2] > 1).any() and (both[..., 1::2] < -1).any()
    out = torch.empty(2, 3, units, device=device, dtype=dtype)
    out = agree("column_gate_up", x, norm, weight, bias, ids, out, 1.7, 1.0)[5]
    same("units", out.float(), (up + 1) * gate / (1 + (-1.7 * gate).exp()), max(1e-5, TOLERANCE[dtype]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden, units", [(48, 40), (100, 72)])
def test_down(device, dtype, hidden, units):
    h, bias = draw(device, dtype, 2, 3, units), draw(device, dtype, 5, hidden, seed=1)
    weight, ids = draw(device, dtype, 5, units, hidden, seed=2), torch.tensor(IDS, device=device, dtype=torch.int32)
    want = torch.einsum("bsi,bsin->bsn", h.float(), weight.float()[ids.long()]) + bias.float()[ids.long()]
    *_, out = agree("column_down", h, weight, bias, ids, torch.empty(2, 3, hidden, device=device))
    same("products", out, want, 1e-5)


def test_slots_are_added_by_their_shares(device):
    y, shares, x = (draw(device, torch.float32, *shape, seed=len(shape)) for shape in ((2, 3, 700), (2, 3), (2, 700)))
    *_, added = agree("add_slots", y, shares, x, limit=1e-6)
    same("stream", added, x + torch.einsum("bs,bsn->bn", shares, y), 1e-6)


def test_an_expert_that_there_is_not_makes_its_slot_nan(device):
    ids = torch.tensor([[5, 0], [-1, 1]], device=device, dtype=torch.int32)
    x, norm = draw(device, torch.float32, 2, 48), Norm(torch.ones(48, device=device), 1e-5)
    weight, bias = draw(device, torch.float32, 5, 48, 16), draw(device, torch.float32, 5, 16)
    down = draw(device, torch.float32, 5, 8, 48), draw(device, torch.float32, 5, 48)
    for source in SOURCES:
        units = torch.zeros(2, 2, 8, device=device)
        load(source, "column_gate_up")(x, norm, weight, bias, ids, units, 1.7, 7.0)
        assert units[:, 0].isnan().all() and units[:, 1].isfinite().all(), source
        out = torch.zeros(2, 2, 48, device=device)
        load(source, "column_down")(torch.ones_like(units), *down, ids, out)
        assert out[:, 0].isnan().all() and out[:, 1].isfinite().all(), source
