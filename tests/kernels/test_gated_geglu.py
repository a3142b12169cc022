"""GeGLU, with the exact gelu and its tanh form: both mirrors agree, packed and apart; what is shared is in test_gated.py."""

import math

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.triton import gated as fast
from tests.messages import message

from .cases import ROW_SHAPES, TOLERANCE, assert_inside, banded, definitions, draw, pairwise, parity, same

reference = definitions("gated")

FP32, CPU = torch.float32, torch.device("cpu")
FORMS = pytest.mark.parametrize("approximate", ["tanh", "none"])


@pairwise
@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_packed_matches(shape, dtype, approximate, device):
    packed = draw(device, dtype, *shape[:-1], 2 * shape[-1])
    parity(fast.geglu, reference.geglu, (packed, None, approximate), TOLERANCE[dtype])


@FORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_apart_matches(dtype, approximate, device):
    gate, up = draw(device, dtype, 3, 2, 70), draw(device, dtype, 3, 2, 70, seed=1)
    parity(fast.geglu, reference.geglu, (gate, up, approximate), TOLERANCE[dtype])


def test_reference_is_the_formula():
    gate, up = draw(CPU, torch.float64, 40), draw(CPU, torch.float64, 40, seed=1)
    normal = torch.tensor([0.5 * (1 + math.erf(g / math.sqrt(2))) for g in gate.tolist()], dtype=torch.float64)
    same("none", reference.geglu(gate, up, "none"), gate * normal * up, 1e-15)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    same("tanh", reference.geglu(torch.cat([gate, up])), gate * (1 + tanh) / 2 * up, 1e-15)


@FORMS
def test_reference_gradients_in_fp64(approximate):
    gate, up = (draw(CPU, torch.float64, 3, 4, seed=i).requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(lambda g, u: reference.geglu(g, u, approximate), (gate, up))
    assert torch.autograd.gradcheck(lambda packed: reference.geglu(packed, None, approximate), gate)


@FORMS
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_stay_finite(approximate, device):
    """Cubes and exponentials overflow to infinity on the way; gelu must still be 0 on the left and the gate on the right."""
    gate = torch.tensor([-1e4, -100.0, -5.0, 0.0, 5.0, 100.0, 1e4], device=device)
    parity(fast.geglu, reference.geglu, (gate, torch.ones_like(gate), approximate), TOLERANCE[FP32])


@FORMS
def test_stores_stay_inside(approximate, device):
    packed, form = draw(device, FP32, 5, 2 * 63), "gelu_tanh" if approximate == "tanh" else "gelu_erf"
    whole, out = banded((5, 63), device)
    fast._gated_forward_kernel[(4,)](packed[:, :63], packed[:, 63:], out, 5, 126, 126, 63, 4, 32, "", form, None, 0)
    assert_inside(whole, out)
    same("out", out, reference.geglu(packed, None, approximate), TOLERANCE[FP32])


def test_door(device):
    packed = draw(device, FP32, 4, 10)
    same("packed", kernels.geglu(packed, approximate="none"), reference.geglu(packed, None, "none"), TOLERANCE[FP32])
    same("apart", kernels.geglu(packed, packed), reference.geglu(packed, packed), TOLERANCE[FP32])


def test_wrong_approximation():
    with pytest.raises(ValueError) as error:
        kernels.geglu(torch.ones(4), approximate="erf")
    assert str(error.value) == message("kernels/gated_geglu:wrong_approximation")
    with pytest.raises(ValueError) as error:
        kernels.geglu(torch.ones(3))
    assert str(error.value) == message("kernels/gated_geglu:wrong_approximation.2")
