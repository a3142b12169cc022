"""RMSNorm: both mirrors agree, the reference is right in fp64, stores stay inside, errors read as written."""

import pytest
import torch
import triton

from gpubound import kernels
from gpubound.kernels.reference import rms_norm as reference
from gpubound.kernels.triton import rms_norm as fast

from .cases import ROW_SHAPES, TOLERANCE, assert_inside, banded, draw, parity


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_rms_norm_matches(shape, dtype, device):
    arguments = (draw(device, dtype, *shape), draw(device, dtype, shape[-1], seed=1), 1e-6)
    parity(fast.rms_norm, reference.rms_norm, arguments, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_add_rms_norm_matches(shape, dtype, device):
    x, residual, weight = (
        draw(device, dtype, *shape),
        draw(device, dtype, *shape, seed=1),
        draw(device, dtype, shape[-1], seed=2),
    )
    parity(fast.add_rms_norm, reference.add_rms_norm, (x, residual, weight, 1e-6), TOLERANCE[dtype])


def test_non_contiguous_input(device):
    x = draw(device, torch.float32, 64, 6).t()
    parity(fast.rms_norm, reference.rms_norm, (x, draw(device, torch.float32, 64), 1e-5), TOLERANCE[torch.float32])


def test_reference_gradients_in_fp64():
    x, r, w = (
        draw(torch.device("cpu"), torch.float64, *s, seed=i).requires_grad_() for i, s in enumerate([(3, 7), (3, 7), (7,)])
    )
    assert torch.autograd.gradcheck(reference.rms_norm, (x, w))
    assert torch.autograd.gradcheck(reference.add_rms_norm, (x, r, w))


def test_stores_stay_inside(device):
    x, w = draw(device, torch.float32, 3, 63), draw(device, torch.float32, 63)
    whole, y = banded((3, 63), device)
    rstd = torch.empty(3, device=device)
    fast._forward_kernel[(triton.cdiv(3, 2),)](x, x, w, x, y, rstd, 3, 1e-6, 63, 64, 2, False)
    assert_inside(whole, y)


def test_wrong_weight_shape():
    with pytest.raises(ValueError) as error:
        kernels.rms_norm(torch.ones(2, 4), torch.ones(3))
    assert str(error.value) == (
        "rms_norm: weight must have shape (4,) to match x, got (3,); it needs one value for each of x's last dimension."
    )


def test_wrong_residual():
    with pytest.raises(ValueError) as error:
        kernels.add_rms_norm(torch.ones(2, 4), torch.ones(2, 5), torch.ones(4))
    assert str(error.value) == (
        "add_rms_norm: residual must match x, (2, 4) torch.float32, got (2, 5) torch.float32; cast or reshape it before the call."
    )
