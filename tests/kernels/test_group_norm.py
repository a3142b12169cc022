"""GroupNorm: both mirrors agree for groups held whole and read twice, stores stay inside, errors read as written."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.plans.types import TilePlan
from gpubound.kernels.triton import norms as fast
from tests.messages import refusals

from .cases import TOLERANCE, definitions, draw, parity, same

reference = definitions("norms")

FP32 = torch.float32
# (x's shape, groups): one element a group; no places; two and one group; a prime number of places; three dimensions of places;
# no sample
SHAPES = [((1, 1, 1), 1), ((2, 4, 1), 4), ((3, 6), 3), ((2, 6, 5, 7), 2), ((2, 5, 3), 1), ((2, 4, 3, 2, 11), 4), ((0, 4, 3), 2)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_group_norm_matches(shape, groups, dtype, device):
    weight, bias = (draw(device, dtype, shape[1], seed=s) for s in (1, 2))
    arguments = (draw(device, dtype, *shape), groups, weight, bias, 1e-2)
    parity(fast.group_norm, reference.group_norm, arguments, TOLERANCE[dtype])


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 64 elements: groups and channels span several tiles at sizes the interpreter can run."""
    for way in ("forward", "backward"):
        monkeypatch.setitem(plans.TRIED, ("group_norm", way, ()), TilePlan(64, 1))


def test_tilings():
    """Groups, channels and places of a tile; tiles along the places, of a group, and programs."""
    cases = {
        (256, 128, 2048, 8192): ((1, 4, 2048), 1, 32, 8192),  # a group of 32 tiles
        (32, 1, 90000, 16384): ((1, 1, 16384), 6, 6, 192),  # channels wider than a tile
        (64, 10, 49, 4096): ((4, 16, 64), 1, 1, 16),  # four groups in a tile, each side rounded up
        (3, 6, 1, 4096): ((4, 8, 1), 1, 1, 1),  # no places
    }
    for arguments, wanted in cases.items():
        assert fast._tiling(*arguments) == wanted, arguments


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape, groups", [((2, 4, 5, 7), 2), ((1, 4, 200), 2), ((2, 6, 20), 2)], ids=str)
def test_groups_larger_than_a_tile(shape, groups, dtype, device, small_tiles):
    weight, bias = (draw(device, dtype, shape[1], seed=s) for s in (1, 2))
    parity(fast.group_norm, reference.group_norm, (draw(device, dtype, *shape), groups, weight, bias, 1e-5), TOLERANCE[dtype])


def test_optional_arguments_of_large_groups(device, small_tiles):
    parity(fast.group_norm, reference.group_norm, (draw(device, FP32, 2, 2, 70), 2, None, None, 1e-5), TOLERANCE[FP32])


def test_channels_last_input(device):
    x = draw(device, FP32, 2, 6, 5, 7).to(memory_format=torch.channels_last)
    arguments = (x, 3, draw(device, FP32, 6, seed=1), draw(device, FP32, 6, seed=2), 1e-5)
    parity(fast.group_norm, reference.group_norm, arguments, TOLERANCE[FP32])


def test_a_mean_far_above_the_spread(device, small_tiles):
    """Blocks merged one by one keep the variance of 1000 ± 1, where fp32 has 6e-5 between neighbours and each merge rounds."""
    x = draw(device, FP32, 1, 2, 500) + 1000
    want = torch.nn.functional.group_norm(x.double(), 1).float()
    same("y", fast.group_norm(x, 1), want, 5e-4)


def test_no_places_take_the_reference(device):
    x = torch.empty(2, 4, 0, device=device, requires_grad=True)
    weight = torch.ones(4, device=device, requires_grad=True)
    y = kernels.group_norm(x, 2, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 4, 0) and not weight.grad.any()


def test_reference_against_torch_and_its_gradients_in_fp64():
    x, w, b = (
        draw(torch.device("cpu"), torch.float64, *s, seed=i).requires_grad_() for i, s in enumerate([(2, 4, 3), (4,), (4,)])
    )
    torch.testing.assert_close(reference.group_norm(x, 2, w, b, 1e-3), torch.nn.functional.group_norm(x, 2, w, b, 1e-3))
    assert torch.autograd.gradcheck(lambda x, w, b: reference.group_norm(x, 2, w, b), (x, w, b))
    assert torch.autograd.gradcheck(lambda x: reference.group_norm(x, 4), (x,))


def test_wrong_arguments():
    x = torch.ones(2, 6, 3)
    refusals(
        "kernels/group_norm:wrong_arguments",
        lambda: kernels.group_norm(torch.ones(4), 2),
        lambda: kernels.group_norm(x, 4),
        lambda: kernels.group_norm(x, 0),
        lambda: kernels.group_norm(x, 2, torch.ones(3)),
    )


IMAGES = [((4, 320, 64, 64), 32), ((2, 512, 8, 8), 32), ((1, 64, 300, 300), 1), ((8, 4096, 2048), 32), ((3, 6, 49), 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, groups", IMAGES, ids=str)
def test_image_sizes_on_the_gpu(shape, groups, device):
    for dtype in TOLERANCE:
        weight, bias = (draw(device, dtype, shape[1], seed=s) for s in (1, 2))
        arguments = (draw(device, dtype, *shape), groups, weight, bias, 1e-5)
        parity(fast.group_norm, reference.group_norm, arguments, 3 * TOLERANCE[dtype])


def _gradients(x: torch.Tensor, weight: torch.Tensor, groups: int) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = fast.group_norm(leaves[0], groups, leaves[1], leaves[1])
    return [y.detach(), *torch.autograd.grad(y, leaves, x)]


@pytest.mark.gpu
def test_the_same_bits_in_every_run(device):
    """32 tiles a group, ten times, on two streams at once."""
    x, weight = draw(device, torch.bfloat16, 4, 4096, 2048), draw(device, torch.bfloat16, 4096, seed=1)
    want = _gradients(x, weight, 32)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found += _gradients(x, weight, 32)
        torch.cuda.synchronize()
        assert all(a.equal(b) for a, b in zip(found, 2 * want))
