"""What only a GPU shows of feeds and corpora: copies beside compute, late events, capture, batches cut there without a wait."""

import pytest
import torch

from gpubound import trace
from gpubound.data import feed
from gpubound.data.stores import AHEAD
from gpubound.errors import DataError, GraphError
from gpubound.graph import capture
from gpubound.watch import watch
from tests.messages import message

pytestmark = pytest.mark.gpu

CUDA = "cuda"


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


def large(count, size=1 << 20):
    """Batches of several leaves and 12 MB, every element telling its batch."""
    for i in range(count):
        yield {"x": torch.full((size,), float(i)), "y": [torch.full((size,), i, dtype=torch.int64), torch.tensor([i])]}


@pytest.mark.parametrize("own_stream", [False, True])
def test_the_ring_is_right_under_load(own_stream):
    """The GPU is kept behind by sleeping kernels, every batch is dropped as soon as its kernels are launched, and each is
    summed there: memory given back too early, or a slot written too early, shows in a sum."""
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        for batch in feed(lambda: large(60), CUDA, mode="ring"):
            torch.cuda._sleep(2_000_000)
            sums.append(torch.stack([batch["x"].double().sum(), batch["y"][0].double().sum(), batch["y"][1].double().sum()]))
            del batch
        got = torch.stack(sums).cpu()
    size = 1 << 20
    assert torch.equal(
        got, torch.tensor([[float(i * size), float(i * size), float(i)] for i in range(60)], dtype=torch.float64)
    )


def test_a_loop_that_runs_far_ahead_is_held_back_before_the_memory_fills():
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, each, one = torch.cuda.memory_allocated(), 12 << 20, next(large(1))
    served = feed(lambda: (one for _ in range(80)), CUDA, mode="ring")
    for batch in served:
        torch.cuda._sleep(20_000_000)  # 10 ms, of which the host knows nothing
        batch["x"].add_(1)
    torch.cuda.synchronize()
    limit = (AHEAD * 3 + 3 + 2) * (each + (1 << 21))
    assert torch.cuda.max_memory_allocated() - before < limit
    assert served.stats().held_back_ms > served.stats().wait_ms


def test_the_ring_makes_no_host_wait_for_the_device():
    served = feed(lambda: large(20, 1 << 12), CUDA, mode="ring")
    served.take()
    with watch() as ledger:
        for _ in range(10):
            served.take()["x"].mul_(2)
    assert ledger.totals["syncs"] == 0


def test_devices_are_compared_as_tensors_report_them():
    source = [{"x": torch.ones(3, device=CUDA), "y": torch.ones(2)}, {"x": torch.ones(3, device="cuda:0"), "y": torch.ones(2)}]
    for device in ("cuda", torch.device("cuda"), "cuda:0", None):
        for mode in ("resident", "ring"):
            served = feed(source, device, mode=mode)
            assert all(a["x"] is b["x"] and b["y"].is_cuda for a, b in zip(source, served))
            assert served.stats().passed == 2


def test_the_guard_on_the_device():
    served = feed([{"x": torch.ones(3)} for _ in range(3)], CUDA)
    with pytest.raises(DataError, check=message("data/gpu:the_guard_on_the_device")):
        for i, batch in enumerate(served):
            if i == 1:
                batch["x"].mul_(2)


def test_a_ring_may_run_while_a_graph_is_captured():
    served = feed(lambda: large(200, 1 << 16), CUDA, mode="ring")
    first = served.take()
    x = torch.ones(1 << 16, device=CUDA)
    for _ in range(5):
        doubled = capture(lambda x: x * 2, x)
        served.take()
    assert torch.equal(doubled(first["x"] + 3), torch.full_like(x, 6.0))
    assert served.take()["y"][1].item() == 6


# the refusal ends the capture before its first kernel, and torch's warning of that would take the place of the GraphError
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_batch_of_the_ring_is_refused_inside_a_capture():
    served = feed(lambda: large(20, 1 << 10), CUDA, mode="ring")
    served.take()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(GraphError) as error, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        served.take()
    assert str(error.value) == message("data/gpu:a_batch_of_the_ring_is_r")
    assert served.take()["y"][1].item() == 1, "no batch was lost"


def test_memory_that_runs_out_while_uploading(monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        served = feed([{"x": torch.full((1 << 22,), float(i))} for i in range(32)], CUDA, budget="100 GB")
        assert served.mode == "ring" and [batch["x"][0].item() for batch in served] == [float(i) for i in range(32)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    why = "cuda:0 ran out of memory while 536.9 MB were uploaded; streaming instead"
    assert trace.fallbacks["feed", why] == 1


def test_the_budget_is_measured():
    free = torch.cuda.mem_get_info()[0]
    from gpubound.data.feeds import free_bytes

    assert free_bytes(torch.device("cuda", 0)) >= free - (64 << 20)


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
