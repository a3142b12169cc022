"""Waits for a DataLoader are measured in steps that no profiler slows, and after its queue is empty."""

import queue
import threading
import time

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from gpubound.doctor.fix.repair import Target, repair
from gpubound.doctor.price.prices import Prices, Replay
from gpubound.doctor.record import phases as phases_module
from gpubound.doctor.record.phases import LoaderClock, Phases, TimedPhase, batches_ahead, is_ready
from gpubound.doctor.report.words import conclusion
from gpubound.doctor.rules.diagnose import diagnose
from gpubound.doctor.rules.remedies import ANEW

from .evidences import at, replace, seen
from .tapes import Synthetic


class Iterator(_BaseDataLoaderIter):
    """A loader whose workers have made `made` batches, and make no more unless it is asked for one."""

    def __init__(self, made: int, workers: int = 2, prefetch: int = 2, pause: float = 0.0):
        self._num_workers, self._prefetch_factor, self._pause = workers, prefetch, pause
        self._data_queue: queue.Queue = queue.Queue()
        self._task_info: dict = {}
        self._rcvd_idx = 0
        for n in range(made):
            self._data_queue.put(n)

    def __next__(self):
        return super().__next__()


def following(iterator):
    if iterator._data_queue.empty():
        time.sleep(iterator._pause)
        return None
    return iterator._data_queue.get()


@pytest.fixture
def loader(monkeypatch):
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", following)


def test_a_batch_is_ready_or_has_to_be_waited_for(loader):
    with LoaderClock() as clock:
        iterator = Iterator(1, pause=0.01)
        next(iterator)
        assert not clock.waited and clock.seconds < 0.01 and clock.ahead == 4
        next(iterator)
        assert clock.waited and clock.seconds >= 0.01
        thread = threading.Thread(target=next, args=[iterator])  # a script that loads in a thread does not wait there
        before = clock.seconds
        thread.start()
        thread.join()
        assert clock.seconds == before
    assert _BaseDataLoaderIter.__next__ is following


def test_torch_s_own_iterators_are_understood():
    """Private names of torch: a release that renames them fails here."""
    plain = iter(torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2))
    assert batches_ahead(plain) == 0 and not is_ready(plain)
    workers = iter(torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1, prefetch_factor=3))
    assert batches_ahead(workers) == 3
    assert {"_data_queue", "_task_info", "_rcvd_idx", "_num_yielded", "_persistent_workers"} <= vars(workers).keys()
    next(workers)
    assert workers._rcvd_idx == 1


class Event:
    now = 0.0

    def __init__(self, enable_timing: bool):
        self.at = 0.0

    def record(self):
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.parametrize("made, wanted", [(3, 3), (100, 7), (0, 0)], ids=["emptied", "never empty", "empty"])
def test_timing_begins_when_no_batch_is_left_that_was_made_before(loader, monkeypatch, made, wanted):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(phases_module, "statistics", lambda: {"alloc": 0})
    for seconds, steps in ((0.0, 4), (1e9, 4 * phases_module.MORE)):  # few steps of little time scatter too much
        timed, iterator = TimedPhase(4, seconds=seconds), Iterator(made)
        with Phases([timed], keep_going=True) as phases:
            for _ in range(40):
                fast = not iterator._data_queue.empty()
                next(iterator)
                Event.now += 1.0 if fast else 5.0
                phases.ended()
        assert timed.drained == wanted and timed.done == wanted + steps
        assert timed.step_ms == ([1.0] * steps if made == 100 else [5.0] * steps)
        assert timed.as_dict().get("drained", 0) == wanted and timed.as_dict()["steps"] == timed.done


def test_a_loader_that_a_recorded_host_hides_has_its_price():
    """The host needs 2 ms a step, the loader 3 ms. Recorded, the host needs 3 ms, and the loader seems to be ready."""

    def program(host: float, wait: float, steps: int = 6) -> Synthetic:
        made = Synthetic()
        for _ in range(steps):
            made.doing("data", wait, "loader")
            for _ in range(10):
                made.think(host).launch(run=20.0)
            made.step()
        return made

    recorded, line = program(300.0, 20.0), at(38, "for x in loader:")
    evidence = seen(recorded, step_ms=[3.05] * 6, loading_ms=1.0, named_lines={"loader": line})
    prices = Prices(evidence)
    assert prices.replay is not None and prices.replay.loading == pytest.approx(50)
    assert prices.step_ms == 3.05 and 1.8 < 10 * 0.3 * prices.replay.share < 2.2
    finding = next(found for found in diagnose(evidence).findings if found.kind == "data")
    assert finding.ms == pytest.approx(1.0, rel=0.05) and "1 ms" in finding.evidence
    bar = diagnose(evidence).bar
    assert bar["late"]["data"] == pytest.approx(100 / 3.05, rel=0.1)
    assert sum(bar["late"].values()) == pytest.approx(bar["shares"]["host_late"])
    longer = diagnose(replace(evidence, step_ms=[5.1] * 6, loading_ms=3.0))
    assert longer.bar["late"]["data"] == pytest.approx(100 * 3.0 / 5.1, rel=0.05), "longer than a recorded step, by data"
    assert longer.findings[0].kind == "data" and longer.findings[0].ms == pytest.approx(3.0, rel=0.05)
    assert not diagnose(evidence).loader["workers"] and diagnose(evidence).loader["ms"] == 1.0
    assert diagnose(replace(evidence, workers=2)).loader == {"workers": 2, "ms": 6.1}, "both make batches all the time"
    blind = diagnose(seen(recorded, step_ms=[3.05] * 6, named_lines={"loader": line}))
    assert all(found.ms < 0.1 for found in [*blind.findings, *blind.harmless] if found.kind == "data")


def test_workers_that_start_in_every_epoch_are_told_from_slow_ones(monkeypatch):
    """A loader of two workers, for two epochs: what its start and its first batch take is apart."""
    clock, now = LoaderClock(), [0.0]
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now[0])

    def lasting(seconds: float):
        return lambda *_: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__init__", lasting(100.0))
    monkeypatch.delattr(_MultiProcessingDataLoaderIter, "__del__")
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", lasting(1.0))
    with clock:
        for persistent in (False, True):
            iterator = _MultiProcessingDataLoaderIter(None)
            vars(iterator).update(_num_workers=2, _prefetch_factor=2, _persistent_workers=persistent, _rcvd_idx=0)
            for yielded in range(4):
                iterator._num_yielded = yielded
                next(iterator)
    assert clock.seconds == 208.0 and clock.starting == 201.0, "kept workers make the first batch as any other"


def test_advice_and_what_to_expect_of_workers_that_start_anew(tmp_path):
    tape = Synthetic()
    for _ in range(6):
        tape.doing("data", 2000.0, "loader").think(300.0).launch(run=20.0).step()
    evidence = seen(tape, step_ms=[2.4] * 6, loading_ms=2.0, workers=2, named_lines={"loader": at(2, "for x in loader:")})
    slow, anew = (diagnose(replace(evidence, starting_ms=ms)) for ms in (0.5, 1.9))
    assert slow.findings[0].fix != ANEW and "start" not in slow.findings[0].evidence
    assert slow.loaded_ms(2) == pytest.approx(1.9 + 0.5) and slow.loaded_ms(1) == pytest.approx(2 * 1.9 + 0.5)
    assert 2 * 1.9 / 4 + 0.5 < slow.loaded_ms(4) < slow.loaded_ms(2), "four workers take as long to start"
    assert anew.findings[0].fix == ANEW and "1.9 ms of it while workers start" in anew.findings[0].evidence
    assert "workers start anew" in conclusion(anew) and "num_workers" not in conclusion(anew)
    path = tmp_path / "train.py"
    path.write_text("loader = DataLoader(data, num_workers=2)\nfor x in loader:\n    step(x)\n")
    target = Target("data", str(path), 2, remedy=ANEW)
    refused = repair([target])
    assert not refused.changes and "ask for it by name" in refused.refused[target], "more workers would start longer"
    ((_, after),) = repair([target], ["persistent"]).changes.values()
    assert b"num_workers=2, persistent_workers=True)" in after
    assert repair([replace(target, remedy="")]).patches[replace(target, remedy="")].name == "loader"


def test_a_script_without_a_loader_keeps_its_replay():
    tape = Synthetic().think(50).launch(run=10).step().think(50).launch(run=10).step().tape()
    replay = Replay(tape)
    assert replay.loaded(1.0) is replay and replay.loaded(0.0) is replay
