"""Batches taken apart, put together, and padded to a few shapes: containers, key paths, rows, and what is refused."""

import math
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from gpubound.data import feed
from gpubound.data.leaves import Padding, bucket_size, flatten, name
from tests.messages import message, refusal, refusals

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
    refusals("data/leaves:an_object_with_hidden_te", lambda: flatten({"packed": pack_sequence([torch.ones(2)])}))


@pytest.mark.parametrize("array", [np.arange(3)[::-1], np.arange(3, dtype=">i4"), np.broadcast_to(np.arange(3), (2, 3))])
def test_arrays_that_no_tensor_can_share_are_copied(array):
    (leaf,) = flatten(array).leaves
    assert leaf.tolist() == array.tolist()


@pytest.mark.parametrize("kind", [set, deque])
def test_containers_that_cannot_be_rebuilt_are_refused(kind):
    with pytest.raises(ValueError, check=message("data/leaves:containers_that_cannot_b", kind.__name__)):
        flatten({"x": kind([torch.ones(1)])})
    assert flatten({"x": kind([1])}).leaves == [kind([1])]


@pytest.mark.parametrize(
    "size, bucket, want",
    [
        (1, "pow2", 1), (5, "pow2", 8), (8, "pow2", 8), (0, "pow2", 0),
        (65, 64, 128), (64, 64, 64), (3, [8, 4], 4), (9, [8, 4], None),
        (7, None, 7),
    ],
)  # fmt: skip
def test_bucket_size(size, bucket, want):
    assert bucket_size(size, bucket) == want


def padded(batch, **options):
    tree = flatten(batch)
    Padding(**options).apply(tree)
    return tree.rebuild(tree.leaves)


def test_only_named_leaves_with_their_own_values():
    batch = {"ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long), "other": torch.ones(2, 5)}
    new = padded(batch, values={"ids": 0, "labels": -100}, bucket="pow2")
    assert new["ids"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]] * 2
    assert new["labels"].tolist() == [[1, 1, 1, 1, 1, -100, -100, -100]] * 2
    assert new["other"] is batch["other"]


def test_a_named_dimension_and_rows():
    new = padded((torch.ones(3, 2, 4), torch.ones(3)), values={0: (7.0, 1), 1: -1.0}, bucket=[3], rows=5)
    assert new[0].shape == (5, 3, 4) and new[0][:3, :2].eq(1).all() and new[0][3:].eq(7).all() and new[0][:, 2].eq(7).all()
    assert new[1].tolist() == [1, 1, 1, -1, -1]


def test_a_padded_feed_has_one_shape_and_the_same_values():
    lengths = [3, 6, 7, 2]
    batches = [{"x": torch.full((2, n), float(n))} for n in lengths]
    for mode in ("resident", "ring", "direct"):
        got = [batch["x"] for batch in feed(batches, device="cpu", mode=mode, pad={"x": -1.0}, bucket=[8])]
        assert [x.shape for x in got] == [(2, 8)] * 4
        for n, x in zip(lengths, got):
            assert x[:, :n].eq(n).all() and x[:, n:].eq(-1).all()


def test_sentences():
    wrong = [
        {"bucket": "pow3", "values": {"x": 0}}, {"bucket": [], "values": {"x": 0}}, {"bucket": 2.5, "values": {"x": 0}},
        {"values": {"x": "a"}}, {"values": {"x": (0, 1, 2)}}, {"values": ["x"]}, {"rows": 0, "values": {"x": 0}},
        {"bucket": "pow2"}, {"values": {"y": 0}}, {"values": {"x": 0}, "bucket": [2, 4]},
        {"values": {"x": (0, 2)}, "bucket": "pow2"},
    ]  # fmt: skip
    refusals("data/padding:refused", *(partial(padded, {"x": torch.ones(2, 5)}, **options) for options in wrong))


@pytest.mark.parametrize("dtype, value", [(torch.int64, 0.5), (torch.uint8, -100), (torch.bool, 2), (torch.int32, math.nan)])
def test_a_value_that_the_leaf_cannot_hold_is_refused(dtype, value):
    """torch would pad whole numbers with 0 for 0.5, and flags with True for 2."""
    said = refusal(ValueError, lambda: padded({"x": torch.ones(2, 5, dtype=dtype)}, values={"x": value}, bucket="pow2"))
    assert said == message("data/padding:a_value_that_the_leaf_ca", dtype, repr(value))


def test_a_batch_with_more_rows_than_said_is_refused():
    """A graph that was captured for three rows would not see the other two."""
    batches = [{"x": torch.ones(5, 2)}]
    refusals("data/padding:a_batch_with_more_rows_t", lambda: list(feed(batches, device="cpu", rows=3, pad={"x": 0})))
    assert [b["x"].shape for b in feed([{"x": torch.ones(n, 2)} for n in (3, 1)], device="cpu", rows=3, pad={"x": 0})] == [
        (3, 2)
    ] * 2
