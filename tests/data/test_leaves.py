"""Batches taken apart and put together: every kind of container, key paths, what is refused."""

from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from gpubound.data.leaves import flatten, name
from tests.messages import message

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int


def test_round_trip_keeps_kinds_and_leaves():
    x, y = torch.ones(2), torch.zeros(3)
    batch = {"a": [x, (y, "text")], "pair": Pair(x, None), "sample": Sample(y, 3), "more": OrderedDict(z=x)}
    tree = flatten(batch)
    new = tree.rebuild([leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in tree.leaves])
    assert torch.equal(new["a"][0], x + 1) and torch.equal(new["a"][1][0], y + 1) and new["a"][1][1] == "text"
    assert type(new["pair"]) is Pair and torch.equal(new["pair"].left, x + 1) and new["pair"].right is None
    assert type(new["sample"]) is Sample and torch.equal(new["sample"].image, y + 1) and new["sample"].label == 3
    assert type(new["more"]) is OrderedDict and torch.equal(new["more"]["z"], x + 1)
    assert torch.equal(batch["a"][0], torch.ones(2)), "the source's own batch was changed"


def test_mapping_with_a_shell_of_its_own():
    class Encoding(UserDict):
        note = None

    batch = Encoding({"x": torch.ones(1)})
    batch.note = "kept"
    new = flatten(batch).rebuild([torch.zeros(1)])
    assert type(new) is Encoding and new.note == "kept" and new["x"].item() == 0 and batch["x"].item() == 1


def test_paths_are_named_as_written_in_python():
    tree = flatten({"image": [torch.ones(1), {"deep": torch.ones(1)}], 3: torch.ones(1)})
    assert [name(path) for path in tree.paths] == ["batch['image'][0]", "batch['image'][1]['deep']", "batch[3]"]
    assert name(flatten(torch.ones(1)).paths[0]) == "batch"


def test_numpy_arrays_of_numbers_become_tensors():
    frozen = np.arange(3)
    frozen.flags.writeable = False
    leaves = flatten([np.ones(2, np.float32), frozen, np.array(["a", "b"])]).leaves
    assert torch.equal(leaves[0], torch.ones(2)) and torch.equal(leaves[1], torch.arange(3))
    assert isinstance(leaves[2], np.ndarray)


def test_an_object_with_hidden_tensors_is_refused():
    with pytest.raises(ValueError) as error:
        flatten({"packed": pack_sequence([torch.ones(2)])})
    assert str(error.value) == message("data/leaves:an_object_with_hidden_te")


@pytest.mark.parametrize("array", [np.arange(3)[::-1], np.arange(3, dtype=">i4"), np.broadcast_to(np.arange(3), (2, 3))])
def test_arrays_that_no_tensor_can_share_are_copied(array):
    (leaf,) = flatten(array).leaves
    assert leaf.tolist() == array.tolist()


@pytest.mark.parametrize("kind", [set, deque])
def test_containers_that_cannot_be_rebuilt_are_refused(kind):
    with pytest.raises(ValueError, check=message("data/leaves:containers_that_cannot_b", kind.__name__)):
        flatten({"x": kind([torch.ones(1)])})
    assert flatten({"x": kind([1])}).leaves == [kind([1])]
