"""A corpus on a pretend GPU, where torch itself tells host from device."""

import pytest
import torch

from gpubound.watch import watch
from gpubound.watch.pretend import simgpu


@pytest.fixture
def sim():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one; test_gpu.py has the real one's tests")
    return simgpu()


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_a_resident_corpus_costs_the_host_nothing(corpus, sim, pack):
    served, plain = corpus.batches(16, 2, sim, pack=pack), corpus.batches(16, 2, "cpu", pack=pack)
    with watch() as ledger:
        on_device = [served.take() for _ in range(2 * len(served))]
        fetched = served.fetch()
    assert (ledger.totals["syncs"], ledger.totals["h2d_copies"], ledger.totals["d2h_copies"]) == (0, 0, 0)
    for batch in [*on_device, fetched]:
        want = plain.take()
        assert all(value.device == sim and torch.equal(value.cpu(), want[name]) for name, value in batch.items())
