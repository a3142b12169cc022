"""What only a GPU shows of a corpus: batches cut there without a copy or a wait, and inside captured graphs."""

import pytest
import torch

from gpubound.graph import capture
from gpubound.watch import watch

pytestmark = pytest.mark.gpu

CUDA = "cuda"


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


@pytest.mark.parametrize("pack, options", [("stream", {}), ("examples", {}), ("pairs", {}), ("none", {"buckets": 2})])
def test_a_corpus_on_the_device_copies_nothing_and_waits_for_nothing(corpus, pack, options):
    corpus.group = 2 if pack == "pairs" else 1
    served, plain = (
        corpus.batches(16, 2, CUDA, pack=pack, **options),
        corpus.batches(16, 2, "cpu", pack=pack, mode="ring", **options),
    )
    served.take(), plain.take()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [served.take() for _ in range(len(served))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with watch() as ledger:
        got += [served.take() for _ in range(len(served))]
    assert (ledger.totals["syncs"], ledger.totals["h2d_bytes"]) == (0, 0)
    assert all(same(batch, plain.take()) for batch in got), "the GPU's batches are the CPU's, bit for bit"


@pytest.mark.parametrize("pack", ["stream", "examples", "pairs"])
def test_each_replay_of_a_captured_fetch_draws_the_next_batch(corpus, pack):
    corpus.group = 2 if pack == "pairs" else 1
    served, plain = corpus.batches(16, 2, CUDA, pack=pack), corpus.batches(16, 2, "cpu", pack=pack)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            served.fetch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = served.fetch()
    served.seek(0)
    for _ in range(2 * len(served) + 3):
        graph.replay()
        assert same(batch, plain.take())
    served.fetched(2 * len(served) + 3)
    assert served.state_dict() == plain.state_dict() and served.counter.item() == 2 * len(served) + 3
    assert same(served.take(), plain.take())


def test_a_fetch_inside_gpubounds_own_capture(corpus):
    served, plain = corpus.batches(16, 2, CUDA), corpus.batches(16, 2, "cpu")
    weight = torch.full((), 2, device=CUDA)
    step = capture(lambda: served.fetch()["input_ids"] * weight)
    with watch() as ledger:
        got = [step().clone() for _ in range(5)]
    assert (ledger.totals["syncs"], ledger.totals["h2d_bytes"]) == (0, 0)
    assert all(torch.equal(value.cpu(), plain.take()["input_ids"] * 2) for value in got)
