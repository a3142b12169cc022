"""LayerNorm: both mirrors agree, the reference is right in fp64 and against torch's own, stores stay inside, errors read as
written.
"""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.plans.types import RowPlan
from gpubound.kernels.triton import norms as fast
from tests.messages import message

from .cases import ROW_SHAPES, TOLERANCE, assert_inside, banded, definitions, draw, parity, same

reference = definitions("norms")

FP32 = torch.float32


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_layer_norm_matches(shape, dtype, device):
    weight, bias = (draw(device, dtype, shape[-1], seed=s) for s in (1, 2))
    # A row of one value has variance 0: its rstd of 1 / sqrt(1e-5) = 316 multiplies the roundings of a gradient that is 0.
    tolerance = TOLERANCE[dtype] * (316 if shape[-1] == 1 else 1)
    parity(fast.layer_norm, reference.layer_norm, (draw(device, dtype, *shape), weight, bias, 1e-5), tolerance)


@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True)])
def test_optional_arguments(weight, bias, device):
    arguments = (
        draw(device, FP32, 5, 63),
        draw(device, FP32, 63, seed=1) if weight else None,
        draw(device, FP32, 63, seed=2) if bias else None,
        1e-5,
    )
    parity(fast.layer_norm, reference.layer_norm, arguments, TOLERANCE[FP32])


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)], ids=str)
def test_only_what_is_needed(needs, device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("layer_norm", "backward", (64,)), RowPlan(rows=2, each=1, warps=1))
    tensors = [
        draw(device, FP32, *s, seed=i).requires_grad_(bool(n)) for i, (s, n) in enumerate(zip([(5, 40), (40,), (40,)], needs))
    ]
    leaves = [t for t in tensors if t.requires_grad]
    got, want = (torch.autograd.grad(op(*tensors).square().sum(), leaves) for op in (fast.layer_norm, reference.layer_norm))
    for i, (a, b) in enumerate(zip(got, want)):
        same(f"gradient {i}", a, b, 1e-5)


@pytest.mark.parametrize("x_dtype, weight_dtype", [(torch.bfloat16, FP32), (FP32, torch.float16)], ids=str)
def test_weight_of_another_dtype(x_dtype, weight_dtype, device):
    x, weight, bias = draw(device, x_dtype, 4, 100), *(draw(device, weight_dtype, 100, seed=s) for s in (1, 2))
    assert fast.layer_norm(x, weight, bias).dtype == x_dtype
    parity(fast.layer_norm, reference.layer_norm, (x, weight, bias, 1e-5), TOLERANCE[torch.bfloat16])


def test_non_contiguous_input(device):
    x, weight, bias = draw(device, FP32, 64, 6).t(), draw(device, FP32, 64, seed=1), draw(device, FP32, 64, seed=2)
    parity(fast.layer_norm, reference.layer_norm, (x, weight, bias, 1e-5), TOLERANCE[FP32])


def test_a_mean_far_above_the_spread(device):
    """Values near 1000 ± 1, where fp32 has 6e-5 between neighbours. E[x²] is near a million, where it has 0.06."""
    x = draw(device, FP32, 4, 1000) + 1000
    want = torch.nn.functional.layer_norm(x.double(), (1000,)).float()
    same("y", fast.layer_norm(x), want, 2e-4)
    same("reference", reference.layer_norm(x), want, 2e-4)


def test_programs_stride_over_the_rows(device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("layer_norm", "backward", (64,)), RowPlan(rows=2, each=1, warps=1))
    arguments = (draw(device, FP32, 11, 40), draw(device, FP32, 40, seed=1), draw(device, FP32, 40, seed=2), 1e-5)
    parity(fast.layer_norm, reference.layer_norm, arguments, TOLERANCE[FP32])


def test_reference_against_torch_and_its_gradients_in_fp64():
    x, w, b = (
        draw(torch.device("cpu"), torch.float64, *s, seed=i).requires_grad_() for i, s in enumerate([(3, 7), (7,), (7,)])
    )
    torch.testing.assert_close(reference.layer_norm(x, w, b, 1e-3), torch.nn.functional.layer_norm(x, (7,), w, b, 1e-3))
    assert torch.autograd.gradcheck(reference.layer_norm, (x, w, b))
    assert torch.autograd.gradcheck(reference.layer_norm, (x,))


def test_forward_stores_stay_inside(device):
    x, w = draw(device, FP32, 3, 63), draw(device, FP32, 63)
    (whole_y, y), (whole_mean, mean), (whole_rstd, rstd) = (banded(shape, device) for shape in ((3, 63), (3,), (3,)))
    fast._norm_forward_kernel[(2,)](x, x, w, w, x, y, mean, rstd, 3, 1e-5, 63, 64, 2, 1, "", False, True, True, True)
    for whole, inside in ((whole_y, y), (whole_mean, mean), (whole_rstd, rstd)):
        assert_inside(whole, inside)


def test_backward_stores_stay_inside(device):
    dy, x, w = draw(device, FP32, 3, 63), draw(device, FP32, 3, 63), draw(device, FP32, 63)
    mean, rstd = torch.zeros(3, device=device), torch.ones(3, device=device)
    (whole_dx, dx), (whole_sums, sums) = banded((3, 63), device), banded((2, 2, 63), device)
    flags = False, True, True, True, True, True  # ADD, CENTRE, WEIGHT, DX, DW, DB
    fast._norm_backward_kernel[(2,)](dy, dy, x, w, mean, rstd, dx, sums, 3, 63, 64, 2, 1, "", *flags)
    assert_inside(whole_dx, dx)
    assert_inside(whole_sums, sums)


def test_gradients_are_added_to_main_grad(device):
    x = draw(device, torch.bfloat16, 3, 40)
    weight, bias = (torch.nn.Parameter(draw(device, torch.bfloat16, 40, seed=s)) for s in (1, 2))
    weight.main_grad, bias.main_grad = torch.ones(40, device=device), torch.ones(40, device=device)
    fast.layer_norm(x, weight, bias).sum().backward()
    assert weight.grad is None and bias.grad is None
    wide = [t.detach().float().requires_grad_() for t in (weight, bias)]
    reference.layer_norm(x.float(), *wide).sum().backward()
    same("weight.main_grad", weight.main_grad - 1, wide[0].grad, 2e-6)
    same("bias.main_grad", bias.main_grad - 1, wide[1].grad, 2e-6)


def test_wrong_bias_shape():
    with pytest.raises(ValueError) as error:
        kernels.layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(1, 4))
    assert str(error.value) == message("kernels/norms_layer:wrong_bias_shape")


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [8192, 16384, 65536])
def test_wide_rows_on_the_gpu(cols, device):
    for dtype in TOLERANCE:
        x, weight, bias = (draw(device, dtype, *s, seed=i) for i, s in enumerate([(300, cols), (cols,), (cols,)]))
        parity(fast.layer_norm, reference.layer_norm, (x, weight, bias, 1e-5), 3 * TOLERANCE[dtype])
