"""Dynamic tanh, alone and with the residual add inside: both mirrors agree for small and large
arguments, stores stay inside, gradients of all that has one, errors read as written.
"""

import pytest
import torch
import triton
import triton.language as tl

from gpubound.kernels import plans
from gpubound.kernels.plans.types import RowPlan
from gpubound.models.richards import kernels
from gpubound.models.richards.kernels.triton import richards as fast
from tests.kernels.cases import ROW_SHAPES, TOLERANCE, definitions, draw, parity, same
from tests.messages import message

reference = definitions("richards")

FP32 = torch.float32


def _arguments(device, dtype, *shape, bias=True):
    cols = shape[-1]
    return (
        draw(device, dtype, *shape),
        torch.tensor([0.7], device=device, dtype=dtype),
        draw(device, dtype, cols, seed=1),
        draw(device, dtype, cols, seed=2) if bias else None,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_dynamic_tanh_matches(shape, dtype, device):
    parity(fast.dynamic_tanh, reference.dynamic_tanh, _arguments(device, dtype, *shape), TOLERANCE[dtype])


def test_without_bias(device):
    parity(fast.dynamic_tanh, reference.dynamic_tanh, _arguments(device, FP32, 5, 63, bias=False), TOLERANCE[FP32])


def test_scalar_alpha_of_another_dtype(device):
    x, _, weight, bias = _arguments(device, torch.bfloat16, 4, 100)
    arguments = (x, torch.tensor(0.7, device=device), weight.float(), bias.float())
    assert fast.dynamic_tanh(*arguments).dtype == torch.bfloat16
    parity(fast.dynamic_tanh, reference.dynamic_tanh, arguments, TOLERANCE[torch.bfloat16])


def test_non_contiguous_input(device):
    x, alpha, weight, bias = _arguments(device, FP32, 6, 64)
    parity(fast.dynamic_tanh, reference.dynamic_tanh, (x.t().contiguous().t(), alpha, weight, bias), TOLERANCE[FP32])


def test_programs_stride_over_the_rows(device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("dynamic_tanh", "backward", (64,)), RowPlan(rows=2, each=1, warps=1))
    # alpha's gradient is one sum over all 440 elements, of both signs: its error grows with their number, not with the sum.
    parity(fast.dynamic_tanh, reference.dynamic_tanh, _arguments(device, FP32, 11, 40), 5 * TOLERANCE[FP32])


@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 1)], ids=str)
def test_only_what_is_needed(needs, device, monkeypatch):
    monkeypatch.setitem(plans.TRIED, ("dynamic_tanh", "backward", (64,)), RowPlan(rows=2, each=1, warps=1))
    tensors = [t.requires_grad_(bool(n)) for t, n in zip(_arguments(device, FP32, 5, 40), needs)]
    leaves = [t for t in tensors if t.requires_grad]
    got, want = (torch.autograd.grad(op(*tensors).square().sum(), leaves) for op in (fast.dynamic_tanh, reference.dynamic_tanh))
    for i, (a, b) in enumerate(zip(got, want)):
        same(f"gradient {i}", a, b, 1e-5)


@triton.jit
def _tanh_kernel(z_ptr, t_ptr, slope_ptr, BLOCK: tl.constexpr, FP32: tl.constexpr):
    i = tl.arange(0, BLOCK)
    t, slope = fast._tanh(tl.load(z_ptr + i), 1.0, FP32)
    tl.store(t_ptr + i, t)
    tl.store(slope_ptr + i, slope)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("fp32", [True, False])
def test_tanh_and_its_slope_to_the_last_digits(fp32, device):
    """Each element by itself, from 1e-6 to 1e4 and both signs: for fp32 everywhere, also where 1 − e or 1 − t² would cancel.

    The slope falls as exp(−2|z|), whose argument reaches 87 before the result is 0: rounded, it is off by 87 · 2^-24 = 5e-6.
    The form for 16-bit inputs is off by 3e-7 in t, and keeps the slope's digits.
    """
    z = torch.logspace(-6, 4, 32, device=device).repeat(2)
    z[32:] *= -1
    t, slope = torch.empty_like(z), torch.empty_like(z)
    _tanh_kernel[(1,)](z, t, slope, 64, fp32)
    exact = z.double()
    torch.testing.assert_close(t.double(), exact.tanh(), rtol=2e-6 if fp32 else 0, atol=0 if fp32 else 6e-7)
    torch.testing.assert_close(slope.double(), exact.cosh().pow(-2), rtol=1e-5, atol=1e-37)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_large_arguments_stay_finite(device):
    x, alpha, weight, bias = _arguments(device, FP32, 4, 40)
    parity(fast.dynamic_tanh, reference.dynamic_tanh, (x * 1e4, alpha, weight, bias), TOLERANCE[FP32])


def test_reference_gradients_in_fp64():
    cpu = torch.device("cpu")
    x, a, w, b = (draw(cpu, torch.float64, *s, seed=i).requires_grad_() for i, s in enumerate([(3, 7), (1,), (7,), (7,)]))
    assert torch.autograd.gradcheck(reference.dynamic_tanh, (x, a, w, b))
    assert torch.autograd.gradcheck(reference.dynamic_tanh, (x, a, w))


def test_gradients_are_added_to_main_grad(device):
    x, *small = _arguments(device, torch.bfloat16, 3, 40)
    small = [torch.nn.Parameter(t) for t in small]
    for t in small:
        t.main_grad = torch.ones(t.shape, device=device)
    fast.dynamic_tanh(x, *small).sum().backward()
    wide = [t.detach().float().requires_grad_() for t in small]
    reference.dynamic_tanh(x.float(), *wide).sum().backward()
    for name, t, w in zip(("alpha", "weight", "bias"), small, wide):
        assert t.grad is None
        same(name, t.main_grad - 1, w.grad, 5e-6)


def test_wrong_alpha():
    with pytest.raises(ValueError) as error:
        kernels.dynamic_tanh(torch.ones(2, 4), torch.ones(4), torch.ones(4))
    assert str(error.value) == message("kernels/dynamic_tanh:wrong_alpha")
    with pytest.raises(ValueError) as error:
        kernels.dynamic_tanh(torch.ones(2, 4), torch.ones(1, device="meta"), torch.ones(4))
    assert str(error.value) == message("kernels/dynamic_tanh:wrong_alpha.2")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 63)], ids=str)
def test_the_add_forms_match(shape, dtype, device):
    residual = draw(device, dtype, *shape, seed=3)
    x, *rest = _arguments(device, dtype, *shape)
    parity(fast.add_dynamic_tanh, reference.add_dynamic_tanh, (x, residual, *rest), TOLERANCE[dtype])


def test_an_output_that_nobody_used(device):
    """Its gradient is None then: of the sum alone nothing is launched, of the norm alone ds is not read."""
    x, residual = draw(device, FP32, 3, 40), draw(device, FP32, 3, 40, seed=3)
    rest = _arguments(device, FP32, 3, 40)[1:]
    for used in (0, 1):
        found = []
        for mirror in (fast, reference):
            leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
            out = mirror.add_dynamic_tanh(*leaves, *rest)[used]
            found.append(torch.autograd.grad(out.square().sum(), leaves))
        for a, b in zip(*found):
            same(f"output {used}", a, b, 1e-5)


def test_the_sum_is_returned_beside_its_tanh(device):
    x, _, weight, bias = _arguments(device, torch.float64, 3, 20)
    y, s = reference.add_dynamic_tanh(x, 2 * x, torch.tensor([0.5]), weight, bias)
    same("s", s, 3 * x, 1e-15)
    same("y", y, torch.tanh(1.5 * x) * weight + bias, 1e-13)
