"""The sum over programs that ends a backward: right for any number of them, delivered where the weight says, once."""

import pytest
import torch

from gpubound.kernels.accumulate import open_sums, opens
from gpubound.kernels.triton import _row_reduction
from gpubound.kernels.triton._row_reduction import deliver_parts

from .cases import assert_inside, banded, draw, same

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("programs, cols", [(1, 1), (3, 40), (64, 63), (130, 100)])
@pytest.mark.parametrize("sums", [1, 2])
def test_gradients_in_the_weights_dtypes(sums, programs, cols, device):
    parts = draw(device, FP32, programs, sums, cols)
    weights = [draw(device, dtype, cols) for dtype in (BF16, FP32)][:sums]
    for got, weight, want in zip(deliver_parts(parts, weights), weights, parts.sum(0)):
        same("gradient", got.float(), want, 4e-3 if weight.dtype == BF16 else 1e-6)
        assert got.dtype == weight.dtype


def test_a_number_beside_the_sums(device):
    parts, numbers = draw(device, FP32, 70, 2, 40), draw(device, FP32, 70, seed=1)
    weight, number = torch.ones(40, device=device), torch.ones((), device=device, dtype=BF16)
    first, second, total = deliver_parts(parts, [weight, weight], numbers, number)
    same("first", first, parts[:, 0].sum(0), 1e-6)
    same("second", second, parts[:, 1].sum(0), 1e-6)
    same("number", total, numbers.sum().to(BF16), 4e-3)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
def test_accumulators(dense, fresh, device):
    """A fresh accumulator is written over, NaN and all; another is added to; autograd gets nothing. Strided: torch sums."""
    parts, weights = draw(device, FP32, 5, 2, 40), [torch.ones(40, device=device, dtype=BF16) for _ in range(2)]
    mains = [torch.full((40, 1 if dense else 2), float("nan") if fresh else 3.0, device=device)[:, 0] for _ in weights]
    for weight, main in zip(weights, mains):
        weight.main_grad = main
    if fresh:
        open_sums(weights)
    assert deliver_parts(parts, weights) == (None, None)
    for main, want in zip(mains, parts.sum(0)):
        same("main_grad", main, want if fresh else want + 3.0, 1e-6)
    assert not opens(weights)


def test_stores_stay_inside(device):
    parts, numbers = draw(device, FP32, 3, 2, 63), draw(device, FP32, 3)
    bands = [banded(shape, device) for shape in ((63,), (63,), (1,))]
    first, second, number = (inside for _, inside in bands)
    _row_reduction._norm_sums_kernel[(2, 3)](parts, numbers, first, second, number, 3, 0, 0, 0, 63, 2, True, 32, 4)
    for whole, inside in bands:
        assert_inside(whole, inside)
