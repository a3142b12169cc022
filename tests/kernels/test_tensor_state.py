"""The record of a tensor: declared fields, gone with their last entry, and no passenger of copies and files."""

import copy
import copyreg
import io

import pytest
import torch
from torch import nn

from gpubound.kernels.accumulate import Record, drop_record, ensure_record, main_gradient, record_of, seen, share_record
from gpubound.layers.linear_product import linear


def test_it_is_dropped_with_its_last_entry_and_not_before():
    weight = nn.Parameter(torch.ones(2))
    assert record_of(weight) is None
    drop_record(weight)
    record = ensure_record(weight)
    assert ensure_record(weight) is record and record.empty
    for field, value in {"format": 1, "opening": 1, "side": 1, "recipe": 1, "numbers": 1}.items():
        empty = getattr(record, field)
        setattr(record, field, value)
        assert not record.empty, field
        drop_record(weight)
        assert record_of(weight) is record, field
        setattr(record, field, empty)
    drop_record(weight)
    assert record_of(weight) is None


def test_no_field_that_is_not_declared():
    with pytest.raises(AttributeError):
        Record().fresh = True


def saved(value):
    """The value from a file that torch.load reads without being asked for more than tensors."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def test_importing_the_kernels_changes_no_pickling():
    assert not any(isinstance(kind, type) and issubclass(kind, torch.Tensor) for kind in copyreg.dispatch_table)


@pytest.mark.parametrize("again", [copy.deepcopy, saved])
@pytest.mark.parametrize("make", [nn.Parameter, torch.clone], ids=["parameter", "tensor"])
def test_neither_copies_nor_files_have_one(make, again):
    weight = make(torch.ones(2))
    ensure_record(weight).format = lambda: "no file can hold a function"
    back = again(weight)
    assert torch.equal(back, weight) and record_of(back) is None and not vars(back)
    assert record_of(weight.detach()) is None


def test_a_file_of_parameters_holds_what_others_put_on_them_and_nothing_of_ours():
    """An accumulator in a file would collect gradients that no optimizer reads."""
    weight, plain = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    ensure_record(weight).numbers = 1
    weight.main_grad, weight.note, plain.note = torch.zeros(2), "theirs", "theirs"
    for back, first in zip(saved([weight, plain]), (weight, plain)):
        assert main_gradient(back) is None and vars(back) == {"note": "theirs"}
        assert type(back) is nn.Parameter and back.requires_grad == first.requires_grad and torch.equal(back, first)


def test_a_linear_layer_read_from_a_file_gives_its_own_gradient():
    layer = nn.Linear(3, 2, bias=False)
    ensure_record(layer.weight).opening = False
    layer.weight.main_grad = torch.zeros(2, 3)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    linear(torch.ones(1, 3), back.weight).sum().backward()
    assert torch.equal(back.weight.grad, torch.ones(2, 3)) and not hasattr(back.weight, "main_grad")


def test_a_weight_in_rows_and_the_gathered_one_have_one_record_for_good():
    rows, gathered = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    assert seen(rows) is rows
    ensure_record(rows).numbers = 1
    share_record(rows, gathered)
    assert seen(rows) is gathered and record_of(gathered) is record_of(rows)
    for one, other in ((rows, gathered), (gathered, rows)):  # taken off here, put on there
        record_of(one).numbers = None
        assert record_of(one).empty
        drop_record(one)
        ensure_record(one).numbers = 2
        assert record_of(other).numbers == 2
