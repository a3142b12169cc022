"""`feed` on the CPU: what is served, in which order, from which position; devices compared and sizes read for its budget."""

import copy
import pickle
import re
import threading

import pytest
import torch

from gpubound import device as policy, trace
from gpubound.data import feed, feeds
from gpubound.data.feeds import SHARE, allowance, free_bytes, parse_bytes, target
from gpubound.device import Sight
from gpubound.errors import DataError, DeviceError, FallbackError
from tests.messages import message, refusal, refusals

from .conftest import Counts, batches, seen

MODES = ("resident", "ring", "direct")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_serves_every_batch_once(mode, shuffle):
    served = feed(batches(), device="cpu", mode=mode, shuffle=shuffle, seed=3)
    assert served.mode == mode and len(served) == 7
    epochs = [seen(served) for _ in range(3)]
    assert epochs[0] == seen(feed(batches(), "cpu", shuffle=shuffle, seed=3)), "the order of every mode"
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) is not shuffle
    assert [batch["y"][1] for batch in feed(batches(2), device="cpu", mode=mode)] == ["name 0", "name 1"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, 1, 4, 7, 10, 14])
def test_resumes_in_the_middle_of_an_epoch(mode, at):
    """Stopped after `at` batches and resumed elsewhere, the rest is what the uninterrupted run had."""

    def make():
        return feed(batches(), device="cpu", mode=mode, shuffle=True, seed=1)

    whole, first, second = make(), make(), make()
    expected = [whole.take()["x"] for _ in range(20)]
    for _ in range(at):
        first.take()
    second.load_state_dict(first.state_dict())
    resumed = [second.take()["x"] for _ in range(20 - at)]
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected[at:]))


def test_a_position_at_the_end_of_an_epoch_is_the_beginning_of_the_next():
    """Whether it was saved there, or is named: a loop that continues there is no empty epoch."""
    served = feed(batches(), device="cpu", seed=1, shuffle=True)
    for _ in range(len(served)):
        served.take()
    assert (served.state_dict()["epoch"], served.state_dict()["batch"]) == (1, 0)
    following = seen(served)
    again = feed(batches(), device="cpu", seed=1, shuffle=True)
    again.seek(0, len(again))
    assert [int(again.take()["x"][0, 0]) for _ in range(len(again))] == following


def test_a_new_loop_ends_the_one_before():
    """Its source is closed at once, even while someone holds it: a ring's thread would go on reading."""
    ended = []

    def source():
        try:
            yield from batches()
        finally:
            ended.append(True)

    served = feed(source, device="cpu")
    first = iter(served)
    next(first)
    second = iter(served)
    next(second)
    assert ended == [True]
    with pytest.raises(DataError, check=message("data/feed:a_new_loop_ends_the_one")):
        next(first)


def test_a_batch_that_cannot_be_had_now_is_not_lost(monkeypatch):
    """The ring gives none inside a graph capture, and says so before it takes one."""
    served = feed(batches(), device="cpu", mode="ring")
    loop = iter(served)
    next(loop)
    with monkeypatch.context() as capturing:
        capturing.setattr(served._store, "check_available", lambda: (_ for _ in ()).throw(ValueError("not now")))
        with pytest.raises(ValueError, match="not now"):
            next(loop)
    assert seen(loop) == list(range(1, 7))


def test_a_loop_continues_after_loading_and_starts_anew_after_a_break():
    served = feed(batches(), device="cpu")
    for _ in served:
        break
    assert served.state_dict()["epoch"] == 0 and served.state_dict()["batch"] == 1
    saved = served.state_dict()
    assert seen(served) == list(range(7)), "the loop after a break is a whole epoch"
    assert served.epoch == 2
    served.load_state_dict(saved)
    assert seen(served) == list(range(1, 7)), "the loop after loading is the rest of its epoch"
    assert seen(served) == list(range(7))


def test_a_state_of_another_feed_is_refused():
    saved, served = feed(batches(), device="cpu", shuffle=True, seed=1).state_dict(), feed(batches(), device="cpu")
    refusals(
        "data/feed:a_state_of_another",
        lambda: feed(batches(), device="cpu", shuffle=True, seed=2).load_state_dict(saved),
        lambda: feed(batches(6), device="cpu", shuffle=True, seed=1).load_state_dict(saved),
        lambda: served.load_state_dict(None),
        lambda: served.load_state_dict({"epoch": 1}),
        lambda: served.seek(0, 1.5),
        lambda: served.seek(0, 8),
    )


def test_tensors_on_the_device_pass_through_untouched():
    source = batches()
    served = list(feed(source, device="cpu"))
    assert all(a["x"] is b["x"] and a["y"][0] is b["y"][0] for a, b in zip(source, served))
    direct = feed(lambda: iter(source), device=torch.device("cpu:0"))
    assert direct.mode == "direct" and all(a["x"] is b["x"] for a, b in zip(source, direct))
    assert direct.stats().passed == 14 and direct.stats().copied == 0 and direct.stats().hit_rate == 1.0


def test_statistics_of_the_ring():
    served = feed(batches(), device="cpu", mode="ring")
    with trace.listening(counts := Counts()):
        list(served)
    stats = served.stats()
    assert (stats.batches, stats.copied, stats.passed, stats.resident, stats.hit_rate) == (7, 14, 0, 0, 0.0)
    assert stats.bytes_per_step == 2 * 3 * 4 + 8 and stats.bytes_copied == 7 * 32 == counts["h2d_bytes"]
    assert stats.wait_ms >= 0
    assert str(stats).startswith("ring: 7 batches, 32 bytes copied a step, ")


def test_a_resident_feed_copies_nothing_in_its_steps():
    served = feed(batches(), device="cpu")
    with trace.listening(counts := Counts()):
        list(served)
    assert counts["h2d_bytes"] == 0 and served.stats().bytes_per_step == 0 and served.stats().hit_rate == 1.0


def test_popping_a_key_harms_nobody():
    served = feed(batches(2), device="cpu")
    for _ in range(2):
        for batch in served:
            batch.pop("x")
            batch["new"] = 1
    assert seen(served) == [0, 1]


WRITTEN = (
    "feed: batch['y'][0] was written to in place in epoch 1, batch 2; a resident batch is served again every epoch and must "
    "not change: write to a clone of it, or pass mode='ring'."
)


def test_the_guard_names_what_was_written_when_the_next_batch_is_asked_for():
    served = feed(batches(), device="cpu")
    list(served)
    with pytest.raises(DataError) as error:
        for i, batch in enumerate(served):
            if i == 2:
                batch["y"][0].view(-1)[0] += 1  # through a view: it shares the counter
    assert i == 2 and str(error.value) == WRITTEN


def test_the_guard_sees_a_write_to_the_last_batch_and_one_long_after():
    served = feed(batches(), device="cpu")
    list(served)
    kept = list(served)
    kept[2]["y"][0].add_(1)
    assert refusal(DataError, lambda: list(served)) == WRITTEN
    last = feed(batches(1), device="cpu")
    with pytest.raises(DataError, check=message("data/feed:the_guard_sees_a_write_t")):
        for batch in last:
            batch["x"].zero_()


def test_the_guard_sees_requires_grad():
    served = feed(batches(), device="cpu")
    with pytest.raises(DataError, check=message("data/feed:the_guard_sees_requires")):
        for batch in served:
            batch["x"].requires_grad_()


def test_the_ring_serves_copies_and_needs_no_guard():
    served = feed(batches(), device="cpu", mode="ring")
    for batch in served:
        batch["x"].zero_()
    assert seen(served) == list(range(7))


def test_inference_tensors_are_served_without_a_guard():
    with torch.inference_mode():
        source = [torch.ones(2)]
    assert torch.equal(next(iter(feed(source, device="cpu"))), torch.ones(2))


def test_one_batch_listed_often_is_held_once():
    one = {"x": torch.ones(1, 1)}
    served = feed([one] * 1000, device="cpu")
    assert len({id(batch) for batch in served._store.batches}) == 1 and len(list(served)) == 1000


def test_an_early_break_leaves_no_thread():
    before = set(threading.enumerate())
    served = feed(batches(1000), device="cpu", mode="ring")
    for _ in served:
        break
    assert not set(threading.enumerate()) - before
    served.take()
    assert len(set(threading.enumerate()) - before) == 1
    del served
    assert not set(threading.enumerate()) - before


def test_memory_that_runs_out_falls_back_and_says_so(monkeypatch, said):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(feeds, "Resident", full)
    monkeypatch.setattr(feeds, "bytes_needed", lambda *_: 3_000_000)
    why = "cpu ran out of memory while 3.0 MB were uploaded; streaming instead"
    before = trace.fallbacks["feed", why]
    served = feed(batches(), device="cpu")
    assert seen(served) == list(range(7)) and served.mode == "direct"
    assert trace.fallbacks["feed", why] == before + 1 and said() == f"gpubound: fallback: feed: {why}\n"
    with trace.strict(), pytest.raises(FallbackError):
        feed(batches(), device="cpu")


def test_what_does_not_fit_the_budget_streams(monkeypatch, said):
    monkeypatch.setattr(feeds, "bytes_needed", lambda *_: 3_000_000)
    assert feed(batches(), device="cpu", budget="2 MB").mode == "direct"
    assert said() == message("data/feed:what_does_not_fit_the_bu")
    refusals("data/feed:what_does_not_fit_the_bu.2", lambda: feed(batches(), device="cpu", budget="2 MB", mode="resident"))
    assert feed(batches(), device="cpu", budget="3 MB").mode == "resident"
    assert said() == message("data/feed:what_does_not_fit_the_bu.3")


@pytest.mark.parametrize("mode", ["ring", "direct"])
def test_a_batch_that_failed_is_drawn_again(mode):
    """A generator that raised is over: it looked like the end of the epoch, whose other batches were left out."""
    broken = [True]

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 2 and broken.pop():
                broken.append(False)
                raise OSError("try again")
            return torch.tensor(i)

    served = feed(Rows(), device="cpu", batch_size=1, mode=mode)
    assert [int(served.take()), int(served.take())] == [0, 1]
    with pytest.raises(OSError, match="try again"):
        served.take()
    assert (served.epoch, served.batch) == (0, 2)
    assert [int(served.take()) for _ in range(3)] == [2, 3, 0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda served: pickle.loads(pickle.dumps(served))])
@pytest.mark.parametrize("mode", ["resident", "direct"])
def test_a_copy_goes_on_at_the_position(copied, mode):
    served = feed(batches(), device="cpu", mode=mode)
    served.take()
    other = copied(served)
    assert [int(other.take()["x"][0, 0]) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 0, 1]
    assert int(served.take()["x"][0, 0]) == 1


@pytest.mark.parametrize(
    "spec, current, want",
    [("cuda", 0, "cuda:0"), ("cuda", 2, "cuda:2"), ("cuda:1", 0, "cuda:1"), ("cpu", None, "cpu"), ("cpu:0", None, "cpu")],
)
def test_devices_as_tensors_report_them(spec, current, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(policy, "look", lambda: Sight(3, "3 visible"))
    monkeypatch.setattr(policy, "_tested", lambda index: None)
    assert target(torch.device(spec)) == torch.device(want)


def test_target_on_this_machine():
    assert target("meta") == target("meta:0") == torch.ones(1, device="meta").device
    assert target("cpu") == target(torch.device("cpu")) == torch.ones(1).device
    with pytest.raises(ValueError, match=r"device: got 'cuda:x'"):
        target("cuda:x")


@pytest.mark.parametrize("text, want", [(7, 7), ("7", 7), ("2 GB", 2 * 10**9), ("1.5GiB", 1536 * 2**20), ("10 b", 10)])
def test_sizes(text, want):
    assert parse_bytes("budget", text) == want


@pytest.mark.parametrize("text", ["two", "3 apples", "-1", True, None])
def test_sizes_that_are_none(text):
    assert refusal(ValueError, lambda: parse_bytes("budget", text)) == message("data/choose:sizes_that_are_none", repr(text))


def test_allowance():
    assert allowance("auto", None, 1000) == 1000 // SHARE
    assert allowance("auto", 300, 1000) == 700
    assert allowance("auto", 3000, 1000) == 0
    assert allowance("auto", None, None) is None
    assert allowance("1 kB", None, 50) == 1000
    assert refusal(ValueError, lambda: allowance(5, 5, 5)) == message("data/choose:allowance")


def test_free_memory_of_the_cpu_is_measured():
    assert free_bytes(torch.device("cpu")) > 10**6


@pytest.mark.parametrize("device", ["mars", "cpu:x", torch.device("cuda", 99)])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises((ValueError, DeviceError), match=re.escape(str(device))):
        feed([torch.ones(1)], device)
