"""The comparison of kernels with their definitions sees what a kernel does wrong."""

import pytest
import torch

from gpubound.kernels.triton import experts as fast

from .cases import agree, draw

right = fast.add_slots


def beyond(y, shares, x, dependent=0):
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
    return right(y, shares, x)


def into_an_input(y, shares, x, dependent=0):
    result = right(y, shares, x)
    shares[0, 0] += 1e-6
    return result


def inexact(y, shares, x, dependent=0):
    return right(y, shares, x).mul_(1 + 1e-4)


def another_tensor(y, shares, x, dependent=0):
    return right(y, shares, x.clone())


FAULTS = {beyond: "outside of a tensor", into_an_input: r"argument \[1\]", inexact: "relative error", another_tensor: r"\[2\]"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, device, monkeypatch):
    arguments = [draw(device, torch.float32, *shape) for shape in ((2, 3, 40), (2, 3), (2, 40))]
    agree("add_slots", *arguments)
    monkeypatch.setattr(fast, "add_slots", fault)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        agree("add_slots", *arguments)
