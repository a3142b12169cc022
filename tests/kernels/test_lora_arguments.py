"""Dropout by a hash: kernels and definition drop the same elements, and as if by chance."""

import pytest
import torch

from gpubound.kernels.lora import Drop, drawn, kept
from gpubound.kernels.triton import lora as fast

from .lora_cases import dropout


@pytest.mark.parametrize("seed, site, p", [(0, 0, 0.1), (-(2**63) + 5, 7, 0.5), (2**40 + 1, 2**31 - 1, 0.93)])
def test_kernels_and_definition_drop_the_same_elements(seed, site, p, device):
    rows, columns = 37, 50
    drop = dropout(device, p, seed, site)
    want = kept(drop, rows, columns)
    ones = torch.ones(rows, columns, device=device)
    got = fast.lora_down(ones, torch.eye(columns, device=device), drop=drop)
    assert torch.equal(got != 0, want)
    got = fast.lora_up(torch.zeros_like(ones), ones[:, :1], ones[:1].t()[:, :1], drop)
    assert torch.equal(got != 0, want)
    da = torch.empty_like(ones)
    fast.lora_gradients(ones, torch.eye(rows, device=device), ones, torch.eye(rows, device=device), da, None, drop)
    assert torch.equal(da != 0, want)


def test_the_mask_is_fair():
    """Of many elements, in whole, by row and by column; between neighbours, seeds and sites as if by chance."""
    p, size = 0.25, 400
    masks = [kept(Drop(p, torch.tensor([seed]), site), size, size).double() for seed, site in ((1, 0), (2, 0), (1, 1))]
    error = (p * (1 - p)) ** 0.5
    assert abs(masks[0].mean() - (1 - p)) < 5 * error / size
    for along in (0, 1):
        assert 0.9 < masks[0].mean(along).std() * size**0.5 / error < 1.1
    alike = p**2 + (1 - p) ** 2
    for other in (masks[1], masks[2], masks[0].roll(1, 0), masks[0].roll(1, 1)):
        assert abs((masks[0] == other).double().mean() - alike) < 5 * 0.5 / size


def test_a_seed_is_drawn_for_each_call(device):
    torch.manual_seed(0)
    first, second = drawn(0.5, device), drawn(0.5, device)
    assert drawn(0, device) is None
    assert first.seed.device == torch.zeros(1, device=device).device and not torch.equal(first.seed, second.seed)
