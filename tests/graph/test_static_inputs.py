"""Inputs that are not as captured: the exact sentence for each."""

import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch

from gpubound.graph import capture
from tests.messages import message

from .cases import said


@pytest.fixture
def captured():
    return capture(
        lambda x, options: x * options["scale"] + options["bias"], torch.ones(3), {"scale": 2, "bias": torch.ones(3)}
    )


def given(x=None, scale=2, bias=None):
    return (torch.ones(3) if x is None else x, {"scale": scale, "bias": torch.ones(3) if bias is None else bias})


def test_as_captured(captured):
    assert captured(*given()).tolist() == [3, 3, 3]


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.ones(4)}, message("graph/held_inputs:shape")),
        ({"bias": torch.ones(3).double()}, message("graph/held_inputs:dtype")),
        ({"x": torch.ones(3, device="meta")}, message("graph/held_inputs:device")),
        ({"x": freed()}, message("graph/held_inputs:dead_input")),
        ({"scale": 3}, message("graph/held_inputs:constant")),
        ({"scale": 2.0}, message("graph/held_inputs:constant_of_another_type")),
        ({"scale": torch.tensor(2)}, message("graph/held_inputs:tensor_for_a_constant")),
        ({"x": 1.5}, message("graph/held_inputs:constant_for_a_tensor")),
        ({"x": torch.ones(3).to_sparse()}, message("graph/held_inputs:a_sparse_tensor")),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_an_input_unlike_the_captured_one(captured, changed, text):
    assert said(captured, *given(**changed)) == text


def test_structure(captured):
    assert said(captured, torch.ones(3), (2, torch.ones(3))) == message("graph/held_inputs:structure")
    assert said(captured, torch.ones(3)) == message("graph/held_inputs:structure.2")


def test_static_buffer_freed(captured):
    buffer = captured.inputs[0]
    buffer.untyped_storage().resize_(0)
    assert said(captured, *given()) == message("graph/held_inputs:static_buffer_freed")


def test_a_dict_or_tuple_of_another_class_is_named():
    captured = capture(lambda given: given["a"] * 2, OrderedDict(a=torch.ones(3)))
    assert said(captured, {"a": torch.ones(3)}) == message("graph/held_inputs:a_dict_or_tuple_of_anoth")


def test_strides_are_kept_and_others_copied(captured):
    matrix = torch.arange(6.0).reshape(2, 3).t()
    captured = capture(lambda x: x + 1, matrix)
    assert captured.inputs[0].stride() == (1, 3)
    assert torch.equal(captured(matrix.contiguous()), matrix + 1)


def test_nan_is_the_constant_that_was_captured():
    captured = capture(lambda x, fill: torch.where(x > 0, x, fill), torch.ones(3), math.nan)
    assert captured(torch.ones(3), float("nan")).tolist() == [1, 1, 1]
    assert message("graph/held_inputs:nan_is_the_constant_that").within(said(captured, torch.ones(3), 2.0))


@dataclass
class Holder:
    y: torch.Tensor


def test_a_dataclass_with_tensors_is_refused():
    with pytest.raises(ValueError, check=message("graph/held_inputs:a_dataclass_with_tensors")):
        capture(lambda holder: holder.y * 2, Holder(torch.ones(3)))
    with pytest.raises(ValueError, check=message("graph/held_inputs:a_dataclass_with_tensors.2")):
        capture(lambda x: (x, Holder(x * 2)), torch.ones(3))


def test_a_mapping_with_tensors_is_refused():
    """Hugging Face's BatchEncoding is one: the graph would keep its first tensors."""
    with pytest.raises(ValueError, check=message("graph/held_inputs:a_mapping_with_tensors_i")):
        capture(lambda batch: batch["x"] * 2, UserDict(x=torch.ones(3)))
