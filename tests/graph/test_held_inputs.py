"""Inputs that are not as captured: the exact sentence for each."""

import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch

from gpubound.graph import capture

from .cases import said


@pytest.fixture
def captured():
    return capture(
        lambda x, options: x * options["scale"] + options["bias"], torch.ones(3), {"scale": 2, "bias": torch.ones(3)}
    )


def given(x=None, scale=2, bias=None):
    return (
        torch.ones(3) if x is None else x,
        {"scale": scale, "bias": torch.ones(3) if bias is None else bias},
    )


def test_as_captured(captured):
    assert captured(*given()).tolist() == [3, 3, 3]


def test_shape(captured):
    assert said(captured, *given(torch.ones(4))) == (
        "input 0: got shape (4,), wanted (3,) as captured; pad it to the captured shape, or capture once for each shape."
    )


def test_dtype(captured):
    assert said(captured, *given(bias=torch.ones(3).double())) == (
        "input 1['bias']: got torch.float64, wanted torch.float32 as captured; cast it before the call."
    )


def test_device(captured):
    assert said(captured, *given(torch.ones(3, device="meta"))) == (
        "input 0: got a tensor on meta, wanted cpu as captured; move it before the call."
    )


def test_dead_input(captured):
    dead = torch.ones(3)
    dead.untyped_storage().resize_(0)
    assert said(captured, *given(dead)) == (
        "input 0: got a dead tensor, its memory has been freed; wanted 3 elements; pass a live one."
    )


def test_constant(captured):
    assert said(captured, *given(scale=3)) == (
        "input 1['scale']: got the constant 3, wanted 2 as captured: constants are baked into the graph; "
        "pass it as a tensor, or capture again."
    )


def test_constant_of_another_type(captured):
    assert said(captured, *given(scale=2.0)) == (
        "input 1['scale']: got the constant 2.0, wanted 2 as captured: constants are baked into the graph; "
        "pass it as a tensor, or capture again."
    )


def test_tensor_for_a_constant(captured):
    assert said(captured, *given(scale=torch.tensor(2))) == (
        "input 1['scale']: got a tensor, wanted the constant 2 as captured; pass the constant, or capture again with a tensor."
    )


def test_constant_for_a_tensor(captured):
    assert said(captured, *given(x=1.5)) == ("input 0: got 1.5, wanted a tensor as captured; pass a tensor, or capture again.")


def test_structure(captured):
    assert said(captured, torch.ones(3), (2, torch.ones(3))) == (
        "inputs: got (tensor, (int, tensor)), wanted (tensor, {'scale': int, 'bias': tensor}) as captured; "
        "pass the same nesting, or capture again."
    )
    assert said(captured, torch.ones(3)) == (
        "inputs: got (tensor), wanted (tensor, {'scale': int, 'bias': tensor}) as captured; "
        "pass the same nesting, or capture again."
    )


def test_static_buffer_freed(captured):
    buffer = captured.inputs[0]
    buffer.untyped_storage().resize_(0)
    assert said(captured, *given()) == (
        "input 0: got freed memory, wanted the tensor that was captured: the graph would read whatever lies there now; "
        "load it again, then call captured.recapture()."
    )


def test_a_sparse_tensor(captured):
    assert said(captured, *given(torch.ones(3).to_sparse())) == (
        "input 0: got the layout torch.sparse_coo, wanted dense as captured; pass its dense form."
    )


def test_a_dict_or_tuple_of_another_class_is_named():
    captured = capture(lambda given: given["a"] * 2, OrderedDict(a=torch.ones(3)))
    assert said(captured, {"a": torch.ones(3)}) == (
        "inputs: got ({'a': tensor}), wanted (OrderedDict{'a': tensor}) as captured; pass the same nesting, or capture again."
    )


def test_strides_are_kept_and_others_copied(captured):
    matrix = torch.arange(6.0).reshape(2, 3).t()
    captured = capture(lambda x: x + 1, matrix)
    assert captured.inputs[0].stride() == (1, 3)
    assert torch.equal(captured(matrix.contiguous()), matrix + 1)


def test_nan_is_the_constant_that_was_captured():
    captured = capture(lambda x, fill: torch.where(x > 0, x, fill), torch.ones(3), math.nan)
    assert captured(torch.ones(3), float("nan")).tolist() == [1, 1, 1]
    assert "got the constant 2.0, wanted nan as captured" in said(captured, torch.ones(3), 2.0)


@dataclass
class Holder:
    y: torch.Tensor


def test_a_dataclass_with_tensors_is_refused():
    with pytest.raises(ValueError, match=r"input 0: got a Holder that holds tensors, wanted them in dicts, lists or tuples\."):
        capture(lambda holder: holder.y * 2, Holder(torch.ones(3)))
    with pytest.raises(ValueError, match=r"output 1: got a Holder that holds tensors, wanted them in dicts, lists or tuples\."):
        capture(lambda x: (x, Holder(x * 2)), torch.ones(3))


def test_a_mapping_with_tensors_is_refused():
    """Hugging Face's BatchEncoding is one: the graph would keep its first tensors."""
    with pytest.raises(ValueError, match="input 0: got a UserDict that holds tensors, wanted them in dicts"):
        capture(lambda batch: batch["x"] * 2, UserDict(x=torch.ones(3)))
