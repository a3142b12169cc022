"""On a pretend GPU, where torch itself tells host from device: what is copied, what waits, what passes."""

import pytest
import torch

from gpubound.data import feed
from gpubound.watch import watch
from gpubound.watch.pretend import simgpu
from tests.messages import message


@pytest.fixture
def sim():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one; test_gpu.py has the real one's tests")
    return simgpu()


@pytest.mark.parametrize("pack, options", [("stream", {}), ("examples", {}), ("pairs", {}), ("none", {"buckets": 2})])
def test_a_resident_corpus_costs_the_host_nothing(corpus, sim, pack, options):
    corpus.group = 2 if pack == "pairs" else 1
    served, plain = corpus.batches(16, 2, sim, pack=pack, **options), corpus.batches(16, 2, "cpu", pack=pack, **options)
    with watch() as ledger:
        on_device = [served.take() for _ in range(2 * len(served))]
        fetched = served.take() if options else served.fetch()
    assert (ledger.totals["syncs"], ledger.totals["h2d_copies"], ledger.totals["d2h_copies"]) == (0, 0, 0)
    for batch in [*on_device, fetched]:
        want = plain.take()
        assert all(value.device == sim and torch.equal(value.cpu(), want[name]) for name, value in batch.items())


def batches(device, count=4):
    """One leaf on the host, one on the device already, at other places of the nesting."""
    return [
        {"x": torch.full((3,), float(i)), "more": [torch.full((2,), float(i), device=device), "text"]} for i in range(count)
    ]


def test_resident_batches_are_uploaded_once_and_leaf_by_leaf(sim):
    with watch() as ledger:
        served = feed(batches(sim), sim)
    assert ledger.totals["h2d_bytes"] == 4 * 12, "only the leaves that were not there"
    with watch() as ledger:
        for _ in range(3):
            values = [(batch["x"].cpu()[0].item(), batch["more"][0].cpu()[0].item()) for batch in served]
    assert values == [(float(i), float(i)) for i in range(4)]
    assert ledger.totals["h2d_bytes"] == 0
    stats = served.stats()
    assert (stats.mode, stats.resident, stats.passed, stats.copied) == ("resident", 12, 12, 0)


def test_the_ring_copies_what_is_not_there_in_one_piece(sim):
    source = batches(sim)
    served = feed(source, sim, mode="ring")
    with watch() as ledger:
        got = list(served)
    assert ledger.totals["h2d_copies"] == 4 and served.stats().hit_rate == 0.5 and served.stats().bytes_per_step == 12
    for batch, was in zip(got, source):
        assert batch["more"][0] is was["more"][0] and batch["more"][1] == "text"
        assert batch["x"].device == sim and torch.equal(batch["x"].cpu(), was["x"])


def test_a_budget_too_small_takes_the_ring(sim, said):
    assert feed(batches(sim), sim, budget=47).mode == "ring"
    assert said() == message("data/simgpu:a_budget_too_small_takes")
    assert feed(batches(sim), sim, budget=48).mode == "resident"
    assert feed([{"x": torch.ones(2, device=sim)}], sim, budget=0).mode == "resident", "nothing to copy fits nothing"


def test_an_unknown_dataset_streams_and_says_how_not_to(sim, said):
    loader = torch.utils.data.DataLoader(torch.arange(4).float(), batch_size=2)
    served = feed(loader, sim)
    assert served.mode == "ring" and [batch.cpu().tolist() for batch in served] == [[0, 1], [2, 3]]
    assert said() == message("data/simgpu:an_unknown_dataset_strea")
    kept = feed(loader, sim, mode="resident")
    assert kept.mode == "resident" and [batch.cpu().tolist() for batch in kept] == [[0, 1], [2, 3]]


def test_items_are_shuffled_where_they_lie(sim):
    data = torch.utils.data.TensorDataset(torch.arange(10).float())
    there, here = (feed(data, device, batch_size=3, shuffle=True, seed=1) for device in (sim, "cpu"))
    with watch() as ledger:
        got = [batch[0] for batch in there]
    assert ledger.totals["h2d_bytes"] == 0
    assert all(torch.equal(a.cpu(), b[0]) for a, b in zip(got, here, strict=True))
