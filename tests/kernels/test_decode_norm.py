"""Norms of a decoding step that ride in no product: parity with the reference, guard bands."""

import pytest
import torch

from gpubound.kernels.decode_product import Norm
from gpubound.kernels.registry import load

from .cases import TOLERANCE, assert_inside, banded, draw, pairwise, same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normed_rows_agree_with_the_reference(device, dtype):
    x, norm = draw(device, torch.float32, 3, 100), Norm(draw(device, dtype, 100, seed=1), 1e-5)
    results = []
    for source in ("triton", "reference"):
        whole, out = banded((3, 100), device, dtype)
        load(source, "norm_rows")(x, norm, out)
        assert_inside(whole, out)
        results.append(out)
    same("normed", *results, TOLERANCE[dtype])


@pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 40])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_before_the_residual_add(device, dtype, hidden, offset):
    """What was normed is zero afterwards, for the next product to be added to."""
    norm, results = Norm(draw(device, dtype, hidden, seed=1), 1e-5, offset), []
    for source in ("triton", "reference"):
        (whole, x), (beside, y) = banded((3, hidden), device), banded((3, hidden), device)
        x.copy_(draw(device, torch.float32, 3, hidden))
        y.copy_(draw(device, torch.float32, 3, hidden, seed=2) * 5)
        load(source, "add_norm")(y, norm, x)
        assert_inside(whole, x)
        assert_inside(beside, y)
        assert not y.any()
        results.append(x)
    same("stream", *results, 1e-5)
    y = draw(device, torch.float32, 3, hidden, seed=2) * 5
    normed = y * (y.square().mean(1, keepdim=True) + 1e-5).rsqrt() * (norm.weight.float() + offset)
    same("stream", results[1], draw(device, torch.float32, 3, hidden) + normed, 1e-5)
