"""Sinkhorn's rounds: both mirrors agree, gradients are right, sums are 1, backward keeps the logits alone, sentences."""

import pytest
import torch
from torch import Tensor

from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels.triton import hyper_connections as fast
from tests.kernels.cases import TOLERANCE, definitions, draw, parity, same

reference = definitions("hyper_connections")

FP32, FP64 = torch.float32, torch.float64
# Gradients of a balanced matrix are differences of numbers that nearly cancel, over rounds whose errors add up.
TOLERANCES = TOLERANCE | {FP32: 2e-5}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape, rounds", [((1, 4, 4), 20), ((2, 19, 4, 4), 3), ((5, 3, 3), 2), ((7, 1, 1), 1)], ids=str)
def test_matches(shape, rounds, dtype, device):
    parity(fast.sinkhorn, reference.sinkhorn, (draw(device, dtype, *shape), rounds, 1e-6), TOLERANCES[dtype])


def test_the_rounds_are_those_of_the_formula_in_fp64():
    """A row's softmax plus eps; then columns, and 19 times rows and columns, each sum with its eps."""
    z = draw(torch.device("cpu"), FP64, 6, 4, 4)
    eps, wanted = 0.03, []  # large, so that it shows wherever it is missing
    for logits in z:
        m = logits.exp() / logits.exp().sum(1, keepdim=True) + eps
        for turn in range(39):
            m = m / ((m.sum(0) if turn % 2 == 0 else m.sum(1, keepdim=True)) + eps)
        wanted.append(m)
    same("matrices", reference.sinkhorn(z, 20, eps), torch.stack(wanted), 1e-14)


def test_sums_are_one(device):
    m = kernels.sinkhorn(draw(device, FP32, 50, 4, 4))
    for axis in (-1, -2):
        same(f"sums over {axis}", m.sum(axis), torch.ones(50, 4, device=device), 1e-4)
    assert (m > 0).all()


def test_reference_gradients_in_fp64():
    z = draw(torch.device("cpu"), FP64, 2, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: reference.sinkhorn(t, 5, 1e-3), z)


def test_logits_far_apart_stay_finite(device):
    """A row that one logit holds alone, beside another: shares underflow, eps keeps every sum above 0."""
    z = torch.tensor([[90.0, -90.0, 0.0, 5.0]] * 4, device=device)[None]
    parity(fast.sinkhorn, reference.sinkhorn, (z, 20, 1e-6), 1e-4)


def kept_bytes(op, z: Tensor) -> int:
    """What autograd keeps from forward to backward."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        op(z, 20, 1e-6).sum().backward()
    return sum(kept.values())


def test_backward_keeps_the_logits_alone(device):
    """Plain torch keeps 3.1 KB a matrix: 2.2 GB for 8,192 tokens of 86 sites. Here it is 64 bytes, 45 MB."""
    z = draw(device, FP32, 64, 4, 4).requires_grad_()
    assert kept_bytes(fast.sinkhorn, z) == 64 * 64
    assert kept_bytes(reference.sinkhorn, z) > 40 * 64 * 64


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"sinkhorn: logits must be .* square matrices .* got torch.float32 \(2, 3, 4\)"):
        kernels.sinkhorn(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="sinkhorn: iterations must be at least 1, got 0"):
        kernels.sinkhorn(torch.ones(4, 4), 0)
