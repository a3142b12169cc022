"""Experts with biases and clamped units whose weights are stored by column, or packed by row: parity and definitions."""

import pytest
import torch

from gpubound.kernels import Norm, column_down, column_gate_up
from gpubound.kernels.packed_weights import Packed, pack_fp4
from gpubound.kernels.registry import load
from tests.messages import refusals

from .cases import DTYPES, SOURCES, TOLERANCE, agree, draw, same

IDS = [[4, 0, 2], [2, 3, 1]]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SIZES = pytest.mark.parametrize("inputs, columns", [(32, 40), (160, 24), (352, 38)])  # cut short, whole and half groups


def mxfp4(device, experts: int, columns: int, inputs: int) -> tuple[Packed, torch.Tensor]:
    """Draw experts in MXFP4 as gpt-oss publishes them. Return them packed, and their numbers (E, columns, inputs) in fp64."""
    g = torch.Generator().manual_seed(experts * columns + inputs)
    codes = torch.randint(256, (experts * columns, inputs // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(123, 127, (experts * columns, inputs // 32), generator=g, dtype=torch.uint8)
    numbers = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    numbers = numbers * (scales.double() - 127).exp2().repeat_interleave(32, 1)
    return pack_fp4(codes.to(device), scales.to(device)), numbers.view(experts, columns, inputs).to(device)


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


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_of_packed_experts(device, dtype, inputs, columns):
    x, norm = draw(device, torch.float32, 2, inputs), Norm(draw(device, dtype, inputs, seed=1), 1e-2)
    (packed, weight), bias = mxfp4(device, 5, columns, inputs), draw(device, dtype, 5, columns, seed=3)
    ids = torch.tensor(IDS, device=device, dtype=torch.int32)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight.double()
    both = torch.einsum("bk,bsnk->bsn", normed, weight[ids.long()]) + bias.double()[ids.long()]
    gate, up = both[..., ::2].clamp(max=1.0), both[..., 1::2].clamp(-1.0, 1.0)
    assert (both[..., ::2] > 1).any() and (both[..., 1::2] < -1).any()
    out = torch.empty(2, 3, columns // 2, device=device, dtype=dtype)
    out = agree("quantized_column_gate_up", x, norm, packed, bias, ids, out, 1.7, 1.0)[5]
    same("units", out.double(), (up + 1) * gate / (1 + (-1.7 * gate).exp()), max(1e-5, TOLERANCE[dtype]))


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_down_of_packed_experts(device, dtype, inputs, columns):
    h, bias = draw(device, dtype, 2, 3, inputs), draw(device, dtype, 5, columns, seed=1)
    (packed, weight), ids = mxfp4(device, 5, columns, inputs), torch.tensor(IDS, device=device, dtype=torch.int32)
    want = torch.einsum("bsi,bsni->bsn", h.double(), weight[ids.long()]) + bias.double()[ids.long()]
    *_, out = agree("quantized_column_down", h, packed, bias, ids, torch.empty(2, 3, columns, device=device))
    same("products", out.double(), want, 1e-5)


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


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_packed_expert_that_there_is_not_makes_its_slot_nan(device):
    ids = torch.tensor([[5, 0], [-1, 1]], device=device, dtype=torch.int32)
    x, norm = draw(device, torch.float32, 2, 64), Norm(torch.ones(64, device=device), 1e-5)
    gate_up, down = mxfp4(device, 5, 64, 64)[0], mxfp4(device, 5, 48, 32)[0]
    biases = draw(device, torch.float32, 5, 64), draw(device, torch.float32, 5, 48)
    for source in SOURCES:
        units, out = torch.zeros(2, 2, 32, device=device), torch.zeros(2, 2, 48, device=device)
        load(source, "quantized_column_gate_up")(x, norm, gate_up, biases[0], ids, units, 1.7, 7.0)
        assert units[:, 0].isnan().all() and units[:, 1].isfinite().all(), source
        load(source, "quantized_column_down")(torch.ones_like(units), down, biases[1], ids, out)
        assert out[:, 0].isnan().all() and out[:, 1].isfinite().all(), source


def test_a_row_gets_the_same_bits_of_packed_experts_in_any_batch(device):
    gate_up, down = mxfp4(device, 5, 64, 160)[0], mxfp4(device, 5, 160, 32)[0]
    biases = draw(device, torch.float32, 5, 64), draw(device, torch.float32, 5, 160)
    x, norm = draw(device, torch.float32, 3, 160), Norm(draw(device, torch.float32, 160, seed=2), 1e-5)
    ids = torch.tensor([*IDS, [1, 1, 4]], device=device, dtype=torch.int32)

    def mlp(of: slice) -> torch.Tensor:
        units, out = (torch.zeros(len(x[of]), 3, width, device=device) for width in (32, 160))
        load("triton", "quantized_column_gate_up")(x[of], norm, gate_up, biases[0], ids[of], units, 1.7, 7.0)
        return load("triton", "quantized_column_down")(units, down, biases[1], ids[of], out)

    together = mlp(slice(None))
    assert all(torch.equal(mlp(slice(row, row + 1))[0], together[row]) for row in range(3))


def test_wrong_packed_arguments_are_named(device):
    x, norm, ids = draw(device, torch.float32, 2, 64), Norm(torch.ones(64, device=device), 1e-5), torch.zeros(2, 3).int()
    packed, bias, ids = mxfp4(device, 5, 64, 64)[0], torch.zeros(5, 64, device=device), ids.to(device)
    units, out = torch.zeros(2, 3, 32, device=device), torch.zeros(2, 3, 64, device=device)
    refusals(
        "kernels/column_experts:wrong_packed_arguments_are_named",
        lambda: column_gate_up(x, norm, packed, bias[:4], ids, units, 1.7, 7.0),
        lambda: column_gate_up(x, norm, packed, bias, ids, units[..., :15].contiguous(), 1.7, 7.0),
        lambda: column_gate_up(x[:, :32].contiguous(), norm, packed, bias, ids, units, 1.7, 7.0),
        lambda: column_down(units, packed, bias, ids, out),
    )
