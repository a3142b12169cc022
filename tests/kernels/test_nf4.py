"""NF4: bytes and numbers are those of the published code, and bitsandbytes' own where it is installed; both mirrors agree."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.quantize import Nf4, dynamic_code, to_nf4
from gpubound.kernels.triton import quantize as fast
from tests.messages import refusals

from .cases import definitions, draw, module, pairwise

reference = definitions("quantize")

# QLoRA, arXiv 2305.14314, appendix E
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
SHAPES = [(1, 64), (3, 320), (70, 64), (9, 64 * 31)]  # a block; blocks over rows; beyond a program; beyond a group of absmax
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def weight_of(*shape, device="cpu", dtype=torch.float32):
    """Rows of very different sizes."""
    return (draw(torch.device(device), torch.float32, *shape) * torch.logspace(-3, 1, shape[0], device=device)[:, None]).to(
        dtype
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_are_the_nearest_numbers_of_the_published_code(shape):
    weight = weight_of(*shape)
    codes, absmax, scale, offset = to_nf4(weight)
    table = torch.tensor(PUBLISHED, dtype=torch.float64)
    blocks = weight.double().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    places = torch.stack((codes >> 4, codes & 15), 2).view(-1, 64).long()
    distance = (table[places] * largest - blocks).abs()
    nearest = (table * largest[..., None] - blocks[..., None]).abs().amin(2)
    assert (distance <= nearest + 1e-6 * largest).all()
    largest = largest[:, 0]
    assert torch.allclose(offset.double(), largest.mean())
    table = dynamic_code(weight.device).double()
    for i, group in enumerate((largest - offset).split(256)):
        assert torch.allclose(scale[i].double(), group.abs().max())
        there = table[absmax[256 * i : 256 * i + len(group)].long()] * scale[i]
        nearest = (table * scale[i] - group[:, None]).abs().amin(1)
        assert ((there - group).abs() <= nearest + 1e-6 * scale[i]).all()


@pairwise
@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_are_the_formulas(shape, dtype, by, device):
    packed = to_nf4(weight_of(*shape, device=device))
    codes, absmax, scale, offset = (t.cpu() for t in packed)
    table, dynamic = torch.tensor(PUBLISHED, dtype=torch.float64), dynamic_code(torch.device("cpu")).double()
    want = torch.empty(shape, dtype=torch.float64)
    for at, number in enumerate(want.view(-1, 64)):
        largest = dynamic[absmax[at].long()] * scale[at // 256].double() + offset.double()
        two = codes.view(-1, 32)[at].long()
        number.copy_(table[torch.stack((two >> 4, two & 15), 1).flatten()] * largest)
    got = by.dequantize_nf4(packed, torch.empty(shape, device=device, dtype=dtype))
    # a block of small numbers is a difference of large ones, absmax and offset: its last bits are theirs
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=1e-6 + torch.finfo(dtype).eps, atol=2e-7 * want.abs().max().item()
    )


def test_zeros_stay_zeros():
    packed = to_nf4(torch.zeros(2, 128))
    assert not kernels.dequantize_nf4(packed, torch.ones(2, 128)).any()


def test_rounding_takes_what_is_known_of_normal_numbers():
    """9.2 % of their spread in blocks of 64: of int4 in groups of 128 it is 9.7 % (packed.py)."""
    weight = draw(torch.device("cpu"), torch.float32, 64, 1024)
    error = kernels.dequantize_nf4(to_nf4(weight), torch.empty_like(weight)) - weight
    assert 0.085 < error.norm() / weight.norm() < 0.10


def test_long_rows_are_rounded_part_by_part(monkeypatch):
    weight = weight_of(9, 640)
    whole = to_nf4(weight)
    monkeypatch.setattr(module("quantize"), "CHUNK", 1300)
    assert all(torch.equal(a, b) for a, b in zip(to_nf4(weight), whole))


@pytest.mark.parametrize("shape", [(128, 256), (3, 64)], ids=str)
def test_the_layout_is_bitsandbytes(shape):
    """A number half-way between two of a code may go either way: bitsandbytes divides on the CPU, and multiplies on a GPU."""
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(*shape)
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    theirs = Nf4(codes.view(shape[0], -1), state.absmax, state.state2.absmax, state.offset.view(1))
    assert torch.equal(dynamic_code(weight.device), state.state2.code)
    assert torch.equal(reference.dequantize_nf4(theirs, torch.empty(shape)), bnb.dequantize_4bit(codes, state))
    ours = to_nf4(weight)
    halves = {"upper": (ours.codes >> 4, theirs.codes >> 4), "lower": (ours.codes & 15, theirs.codes & 15)}
    for name, (a, b) in (halves | {"absmax": (ours.absmax, theirs.absmax)}).items():
        other = a != b
        assert other.float().mean() < 0.01 and ((a[other].int() - b[other].int()).abs() <= 1).all(), name
    torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-6, atol=0)


def test_wrong_arguments():
    refusals(
        "kernels/nf4:wrong",
        lambda: to_nf4(torch.ones(2, 65)),
        lambda: kernels.dequantize_nf4(to_nf4(torch.ones(2, 64)), torch.empty(64, 2)),
    )
