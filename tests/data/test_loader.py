"""DataLoaders: order and workers resumed, what workers raise, what they cannot send, nothing left running."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from gpubound.data import feed
from gpubound.errors import DataError
from tests.messages import message, refusal

# Python 3.12 warns of every fork in a process that has threads, and torch always has some.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

DATA = TensorDataset(torch.arange(20))


class Noisy(Dataset):
    """Random transforms, drawn in the worker."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor([float(i), torch.rand(()).item()])


def flat(served):
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in served]


@pytest.mark.parametrize("mode", ["ring", "direct"])
def test_a_shuffled_loader_resumes_exactly(mode):
    def make():
        return feed(DataLoader(DATA, batch_size=3, shuffle=True), device="cpu", mode=mode)

    whole, first, second = make(), make(), make()
    expected = [flat([whole.take()])[0] for _ in range(17)]
    assert expected[:7] != expected[7:14] and sorted(n for batch in expected[:7] for n in batch) == list(range(20))
    for _ in range(10):
        first.take()
    second.load_state_dict(first.state_dict())
    assert [flat([second.take()])[0] for _ in range(7)] == expected[10:]


def test_workers_random_transforms_resume_too():
    before = set(multiprocessing.active_children())

    def make():
        return feed(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1), device="cpu", mode="ring", seed=5)

    whole, resumed = make(), make()
    expected = flat(whole)
    resumed.seek(0, 1)
    assert flat(resumed) == expected[1:]
    assert not set(multiprocessing.active_children()) - before


def test_the_loaders_own_seed_is_kept():
    def make(seed):
        return feed(DataLoader(DATA, batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(seed)), device="cpu")

    assert flat(make(1)) == flat(make(1)) != flat(make(2))
    assert make(7).state_dict()["seed"] == 7


def test_a_distributed_sampler_is_told_the_epoch():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    served = feed(DataLoader(DATA, batch_size=5, sampler=sampler), device="cpu")
    assert flat(served) != flat(served) and sampler.epoch == 1


def test_an_early_break_ends_the_workers():
    before = set(multiprocessing.active_children())
    for _ in feed(DataLoader(DATA, batch_size=2, num_workers=1), device="cpu", mode="ring"):
        break
    assert not set(multiprocessing.active_children()) - before


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 2:
            raise ArithmeticError("item two")
        return torch.tensor(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_an_item_raises_arrives(workers):
    served, got = feed(DataLoader(Broken(), num_workers=workers), device="cpu", mode="ring"), []
    with pytest.raises(ArithmeticError, match="item two"):
        for batch in served:
            got.append(batch.item())
    assert got == [0, 1]


def unpicklable(items):
    return {"x": torch.tensor(items), "more": [lambda: 0]}


def test_an_item_that_workers_cannot_send_is_an_error_and_not_a_hang():
    loader = DataLoader(list(range(4)), batch_size=2, num_workers=1, collate_fn=unpicklable)
    with pytest.raises(DataError) as error:
        list(feed(loader, device="cpu", mode="ring"))
    said = str(error.value)
    assert message("data/loader:an_item_that_workers_can").within(said)
    assert message("data/loader:an_item_that_workers_can.2").within(said)
    assert loader.collate_fn is unpicklable, "the user's loader is as it was"
    local = DataLoader(list(range(4)), batch_size=2, collate_fn=unpicklable)
    assert [batch["x"].tolist() for batch in feed(local, device="cpu", mode="ring")] == [[0, 1], [2, 3]]


class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


def test_an_iterable_dataset_and_one_loader_kept_resident():
    served = feed(DataLoader(Counting(), batch_size=2), device="cpu", mode="ring")
    assert flat(served) == [[0, 1], [2, 3], [4]]
    kept = feed(DataLoader(DATA, batch_size=8, shuffle=True), device="cpu", mode="resident")
    assert kept.mode == "resident" and flat(kept) == flat(kept)


def test_sentences():
    for options in ({"batch_size": 2}, {"shuffle": True}, {"drop_last": True}, {"collate": list}):
        said = refusal(ValueError, lambda o=options: feed(DataLoader(DATA), device="cpu", **o))
        assert said == message("data/loader:sentences", next(iter(options)))
    with pytest.raises(ValueError) as error:
        feed(DataLoader(TensorDataset(torch.ones(3)), batch_size=4, drop_last=True), device="cpu")
    assert str(error.value) == message("data/loader:sentences.2")


@pytest.mark.parametrize("own", [None, 7])
def test_a_second_feed_over_a_loader_has_the_seed_of_the_first(own):
    """The first leaves generators of its own in the loader. A position that it saved must fit the second."""
    generator = None if own is None else torch.Generator().manual_seed(own)
    loader = DataLoader(DATA, batch_size=3, shuffle=True, generator=generator)
    first = feed(loader, device="cpu")
    wanted = flat(first)
    again = feed(loader, device="cpu")
    again.load_state_dict({**first.state_dict(), "epoch": 0, "batch": 2})
    assert flat(again) == wanted[2:]
