"""Sources on the CPU: generators, functions, single items, datasets; and every sentence with which one is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from gpubound.data import feed
from gpubound.errors import DataError
from tests.messages import message, refusal, refusals

from .conftest import batches, seen


@pytest.mark.parametrize("mode", ["ring", "direct"])
def test_a_source_that_raises_half_way(mode):
    def broken():
        yield from batches(3)
        raise OSError("disk gone")

    served, got = feed(broken, device="cpu", mode=mode), []
    loop = iter(served)
    with pytest.raises(OSError, match="disk gone") as error:
        for batch in loop:
            got.append(batch)
    assert seen(got) == [0, 1, 2] and "broken" in [entry.name for entry in error.traceback]
    assert served.state_dict()["batch"] == 3
    with pytest.raises(DataError, match="this loop was ended"):  # and not the end of its epoch
        next(loop)


@pytest.mark.parametrize("mode", ["ring", "direct"])
def test_a_generator_is_read_once_and_a_function_again(mode):
    once = feed(iter(batches(3)), device="cpu", mode=mode)
    assert seen(once) == [0, 1, 2]
    assert refusal(ValueError, lambda: list(once)) == message("data/sources:a_generator_is_read_once")
    again = feed(lambda: iter(batches(3)), device="cpu", mode=mode)
    assert seen(again) == seen(again) == [0, 1, 2]
    with pytest.raises(TypeError, match="does not say how many"):
        len(again)
    kept = feed(iter(batches(3)), device="cpu", mode="resident")
    assert seen(kept) == seen(kept) == [0, 1, 2] and len(kept) == 3


def test_a_stream_resumes_by_reading_over_what_was_served():
    first, second = (feed(lambda: iter(batches(5)), device="cpu", mode="ring") for _ in range(2))
    first.take(), first.take()
    second.load_state_dict(first.state_dict())
    assert seen(second) == [2, 3, 4]


# Single items, collated here


@pytest.mark.parametrize("mode", ["auto", "ring", "direct"])
def test_items_are_collated_and_the_last_batch_is_uneven(mode):
    items = [{"x": torch.full((3,), float(i)), "n": i} for i in range(10)]
    served = list(feed(items, device="cpu", mode=mode, batch_size=4))
    assert [batch["n"].tolist() for batch in served] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.equal(served[2]["x"], torch.tensor([[8.0] * 3, [9.0] * 3]))
    assert len(list(feed(items, device="cpu", mode=mode, batch_size=4, drop_last=True))) == 2


def test_resident_items_go_on_in_the_middle_of_an_epoch():
    served = feed(TensorDataset(torch.arange(23).float()), "cpu", mode="resident", batch_size=4, shuffle=True, seed=5)
    whole = [batch[0].tolist() for batch in served]
    served.seek(0, 2)
    assert [batch[0].tolist() for batch in served] == whole[2:]


def test_resident_items_are_shuffled_as_streamed_ones_are():
    data = TensorDataset(torch.arange(23).float(), torch.arange(46).reshape(23, 2))
    for source in (data, Subset(data, list(range(4, 20))), [data[i] for i in range(9)]):
        resident = feed(source, device="cpu", batch_size=5, shuffle=True, seed=4)
        streamed = feed(source, device="cpu", batch_size=5, shuffle=True, seed=4, mode="ring")
        assert resident.mode == "resident"
        for _ in range(2):
            for a, b in zip(resident, streamed, strict=True):
                assert type(a) is type(b) and torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert resident.stats().hit_rate == 1.0


def test_items_of_unknown_behaviour_are_not_frozen():
    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.rand(2)

    served = feed(Noise(), device="cpu", batch_size=2)
    assert served.mode == "direct" and not torch.equal(next(iter(served)), next(iter(served)))
    frozen = feed(Noise(), device="cpu", batch_size=2, mode="resident")
    assert torch.equal(next(iter(frozen)), next(iter(frozen)))


def test_items_that_cannot_be_stacked_stream_and_say_why(said):
    items = [torch.ones(n) for n in (1, 2)]

    def pad_together(items):
        return torch.nn.utils.rnn.pad_sequence(items)

    with pytest.raises(ValueError, check=message("data/sources:items_that_cannot_be_sta")):
        feed(items, device="cpu", batch_size=2, mode="resident")
    assert feed([("a", 1), ("b", 2)], device="cpu", batch_size=2).mode == "direct"
    assert said() == message("data/sources:items_that_cannot_be_sta.2")
    assert [b.shape for b in feed(items, device="cpu", batch_size=2, collate=pad_together)] == [(2, 2)]
    with pytest.raises(ValueError) as error:
        feed(items, device="cpu", batch_size=2, collate=pad_together, shuffle=True, mode="resident")
    assert str(error.value) == message("data/sources:items_that_cannot_be_sta.3")


def test_a_dataset_that_fetches_many_items_at_once_is_asked_so():
    class Many(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            return [torch.tensor(i) for i in indices]

    assert [b.tolist() for b in feed(Many(), device="cpu", batch_size=3)] == [[0, 1, 2], [3, 4]]


# Refusals


def test_sentences():
    wrong = [
        ([], {}), ([], {"batch_size": 2}), ([1], {"batch_size": 0}), ([1], {"mode": "fast"}), ([1], {"slots": 2}),
        (torch.ones(2), {}), (np.ones((2, 3)), {}), (3, {}), (TensorDataset(torch.ones(2)), {}), (iter([1]), {"batch_size": 2}),
        (iter([1]), {"shuffle": True}), ([1], {"drop_last": True}), ([1], {"seq": 8}),
    ]  # fmt: skip
    refusals("data/sources:refused", *(partial(feed, source, device="cpu", **options) for source, options in wrong))


def test_a_function_that_returns_no_batches_is_refused():
    assert refusal(ValueError, lambda: feed(lambda: 5, device="cpu").take()) == message("data/sources:a_function_that_returns")


def test_an_iterable_without_batches_is_an_error_when_it_is_read():
    said = refusal(DataError, lambda: list(feed(lambda: iter([]), device="cpu", mode="ring")))
    assert said == message("data/sources:an_iterable_without_batc")


@pytest.mark.parametrize("source", [{"x": torch.ones(2)}, "text"])
def test_what_is_no_list_of_items_is_refused(source):
    with pytest.raises(ValueError, check=message("data/sources:what_is_no_list_of_items", type(source).__name__)):
        feed(source, device="cpu", batch_size=2)


def test_a_hugging_face_dataset_needs_a_batch_size():
    """It iterates over single rows, whose lists of numbers would pass as they are."""
    rows = pytest.importorskip("datasets").Dataset.from_dict({"x": [[1, 2], [3, 4]]}).with_format("torch")
    with pytest.raises(ValueError, check=message("data/sources:a_hugging_face_dataset_n")):
        feed(rows, device="cpu")
    assert [batch["x"].tolist() for batch in feed(rows, device="cpu", batch_size=2)] == [[[1, 2], [3, 4]]]


def test_a_seed_is_any_whole_number():
    assert seen(feed(batches(), device="cpu", shuffle=True, seed=np.int64(3))) == seen(
        feed(batches(), device="cpu", shuffle=True, seed=3)
    )
    with pytest.raises(ValueError, check=message("data/sources:a_seed_is_any_whole_numb")):
        feed(batches(), device="cpu", shuffle=True, seed=1.5)
