"""SwiGLU's backward with h again: both mirrors agree, both are autograd's, stores stay inside, errors read as written."""

import re

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels.triton import swiglu_backward as fast

from .cases import TOLERANCE, assert_inside, banded, definitions, draw, same

reference = definitions("swiglu_backward")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 5, 128), (3, 1500), (0, 64)], ids=str)
def test_matches(shape, dtype, device):
    dh, gate_up = draw(device, dtype, *shape), draw(device, dtype, *shape[:-1], 2 * shape[-1], seed=1)
    op = fast if dh.numel() else kernels
    for name, got, want in zip(("gradient", "h"), op.swiglu_backward(dh, gate_up), reference.swiglu_backward(dh, gate_up)):
        same(name, got, want, TOLERANCE[dtype])


def test_reference_is_autograds_in_fp64():
    dh, gate_up = draw("cpu", torch.float64, 3, 7), draw("cpu", torch.float64, 3, 14, seed=1).requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    h = F.silu(gate) * up
    gradient, again = reference.swiglu_backward(dh, gate_up.detach())
    same("gradient", gradient, torch.autograd.grad(h, gate_up, dh)[0], 1e-14)
    same("h", again, h.detach(), 1e-14)


def test_h_is_the_forwards_bit_for_bit(device):
    """So nothing changes for a product whose h is computed again instead of kept."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gate_up = draw(device, dtype, 5, 200)
        assert torch.equal(kernels.swiglu_backward(draw(device, dtype, 5, 100), gate_up)[1], kernels.swiglu(gate_up))


def test_rows_with_gaps(device):
    wide = draw(device, torch.float32, 6, 300)
    dh, gate_up = wide[:, 7:57], wide[:, 100:200]
    for got, want in zip(fast.swiglu_backward(dh, gate_up), reference.swiglu_backward(dh, gate_up)):
        same("result", got, want, 2e-6)


def test_stores_stay_inside(device, monkeypatch):
    made, plain = [], torch.empty

    def inside(*shape, **options):
        made.append(banded(tuple(shape[0]), device))
        return made[-1][1]

    dh, gate_up = draw(device, torch.float32, 5, 37), draw(device, torch.float32, 5, 74)
    monkeypatch.setattr(torch, "empty", inside)
    fast.swiglu_backward(dh, gate_up)
    monkeypatch.setattr(torch, "empty", plain)
    assert len(made) == 2
    for whole, own in made:
        assert_inside(whole, own)


def test_error_reads_exactly():
    sentence = (
        "swiglu_backward: dh must be half of gate_up, (2, 4) torch.float32 on cpu, got (2, 3) torch.float32 on cpu; "
        "pass the gradient of its SwiGLU."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        kernels.swiglu_backward(torch.ones(2, 3), torch.ones(2, 4))
