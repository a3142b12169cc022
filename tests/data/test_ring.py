"""The ring's order of events, with late copies; and on the pretend GPU, what is copied, what waits, and what passes."""

import threading
import time

import pytest
import torch

from gpubound.data import feed, stores as ring_module
from gpubound.data.leaves import Padding, pack
from gpubound.data.stores import AHEAD, CudaLane, Lane, Ring
from gpubound.watch import watch
from gpubound.watch.pretend import simgpu
from tests.messages import message, refusal

CPU = torch.device("cpu")


class LateLane:
    """A copy takes place when its event is waited for on the host, or at `finish`: never earlier, as a slow bus would have
    it."""

    device = CPU

    def __init__(self, honours_events=True):
        self.honours_events = honours_events
        self.pending, self.stagings, self.waits, self.sends = [], 0, 0, 0
        self.uses_end = True  # whether the device ever gets through what it was given

    def staging(self, size):
        self.stagings += 1
        return torch.zeros(size, dtype=torch.uint8)

    def send(self, staged):
        self.sends += 1
        copy = (staged, torch.zeros_like(staged))
        self.pending.append(copy)
        return copy[1], {"kind": "copy", "copy": copy}

    def wait(self, event):
        self.waits += 1
        if event["kind"] == "use":
            while not self.uses_end:
                time.sleep(0.001)
        elif self.honours_events:
            self._complete(event["copy"])

    def receive(self, sent, event): ...

    def record(self):
        return {"kind": "use"}

    def finish(self):
        for copy in self.pending:
            copy[1].copy_(copy[0])
        self.pending.clear()

    def _complete(self, copy):
        for i, (staged, sent) in enumerate(self.pending):
            if sent is copy[1]:
                sent.copy_(staged)
                del self.pending[i]
                return


def numbers(count, size=8):
    return ({"x": torch.full((size,), float(i)), "y": torch.tensor(i)} for i in range(count))


def drain(ring):
    return [served.batch for served in iter(ring.take, None)]


def right(got):
    return all(batch["y"].item() == i and batch["x"].eq(i).all() for i, batch in enumerate(got))


def test_the_ring_s_thread_asks_for_an_event_and_never_synchronizes():
    class Event:  # has no synchronize(): a ledger would count it as a wait of the host
        answers = (False, False, True)
        asked = 0

        def query(self):
            self.asked += 1
            return self.answers[self.asked - 1]

    event = Event()
    CudaLane.wait(object.__new__(CudaLane), event)
    assert event.asked == 3


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_a_slot_is_written_again_only_after_its_copy(slots):
    lane = LateLane()
    got = drain(Ring(numbers(40), lane, slots, Padding()))
    lane.finish()
    assert len(got) == 40 and right(got)
    assert lane.stagings == slots and lane.sends == 40


def test_a_slot_keeps_its_memory_for_smaller_batches():
    """Pinned memory is slow to get: only a larger batch than a slot has had takes more."""
    lane = LateLane()
    batches = ({"x": torch.full((512 * size,), float(i)), "y": torch.tensor(i)} for i, size in enumerate([3, 1, 2, 3, 4, 1]))
    got = drain(Ring(batches, lane, 1, Padding()))
    lane.finish()
    assert len(got) == 6 and right(got) and lane.stagings == 2


def settle(read, wanted):
    """Wait until `read()` is `wanted`, then a little longer to see whether it stays."""
    until = time.monotonic() + 60  # a thread may come to its turn late beside busy processes
    while read() != wanted and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(0.02)
    return read() == wanted


def test_reads_no_further_ahead_than_its_slots():
    read = []

    def source():
        for batch in numbers(20):
            read.append(1)
            yield batch

    ring = Ring(source(), Lane(CPU), 3, Padding())
    assert settle(lambda: len(read), 3)
    ring.take()
    assert settle(lambda: len(read), 4)
    ring.close()


def test_no_more_batches_on_the_device_than_it_can_work_off():
    lane = LateLane()
    lane.uses_end = False
    ring = Ring(numbers(40), lane, 3, Padding())
    for _ in range(AHEAD * 3):
        ring.take()
    assert settle(lambda: lane.sends, AHEAD * 3), lane.sends
    began = time.perf_counter()
    threading.Timer(0.05, lambda: setattr(lane, "uses_end", True)).start()
    served = ring.take()
    assert served.waited == 0.0 and 0 < served.held_back <= time.perf_counter() - began  # the device was behind, not the source
    ring.close()


def test_closing_ends_the_thread_and_the_source():
    closed = []

    def source():
        try:
            yield from numbers(1000)
        finally:
            closed.append(True)

    before = set(threading.enumerate())
    ring = Ring(source(), Lane(CPU), 3, Padding())
    ring.take()
    assert len(set(threading.enumerate()) - before) == 1
    ring.close()
    assert not set(threading.enumerate()) - before and closed == [True]


def test_a_source_that_hangs_does_not_hang_the_close(monkeypatch, said):
    gate = threading.Event()
    monkeypatch.setattr(ring_module, "CLOSING_SECONDS", 0.05)

    def source():
        yield {"x": torch.ones(1)}
        gate.wait()

    ring = Ring(source(), Lane(CPU), 3, Padding())
    ring.take()
    ring.close()
    assert said() == message("data/ring:a_source_that_hangs_does")
    gate.set()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
def test_any_dtype_shape_and_layout_survives_the_flat_run(dtype):
    odd = torch.arange(1, 31).reshape(5, 6).to(dtype)
    batch = {
        "scalar": odd[1, 1],
        "view": odd[1:4, ::2],
        "transposed": odd.t(),
        "empty": odd[:0],
        "images": odd.reshape(1, 5, 2, 3).contiguous(memory_format=torch.channels_last),
        "text": "stays",
    }
    ring = Ring(iter([batch]), Lane(CPU), 3, Padding())
    new = ring.take().batch
    for key, value in batch.items():
        if key == "text":
            assert new[key] == value
        else:
            assert new[key].dtype is dtype and torch.equal(new[key], value)
            assert new[key].data_ptr() != value.data_ptr() or not value.numel()
    assert new["images"].is_contiguous(memory_format=torch.channels_last)
    ring.close()


def test_sparse_leaves_are_refused():
    said = refusal(ValueError, lambda: pack({"x": torch.ones(2, 2).to_sparse()}, CPU, Padding(), always=True))
    assert said == message("data/ring:sparse_leaves_are_refuse")


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
