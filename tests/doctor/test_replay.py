"""Prices by replay: what the same program gains without its stalls, also where a copy is held against the rate of the link."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from gpubound.doctor.price.prices import SLOWED, Replay
from gpubound.doctor.record.run import BYTES, pinned_rate
from gpubound.doctor.record.tape import Tape
from gpubound.errors import MeasureError
from tests.messages import message

from .programs import length, program, running, stalling
from .tapes import AUTOGRAD, MAIN, Synthetic

quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.slow
@quick
@given(running)
def test_a_tape_without_waits_replays_to_itself(moves):
    replay = Replay(program(moves, 4).tape())
    assert replay.error < 1e-9
    assert replay.saved(replay.waits) == 0 and replay.ceiling() == pytest.approx(replay.step_ms)
    assert replay.step_ms == pytest.approx(length(program(moves, 40)) / 40e3, rel=0.01)


@pytest.mark.slow
@quick
@given(stalling)
def test_prices_are_what_the_same_program_gains_without_its_stalls(moves):
    """The program is gone through again without them. The first of 40 steps, and a wait's own cost, may make a difference."""
    replay = Replay(program(moves, 4).tape())
    assert replay.error < 1e-6
    with_stalls, without = (length(program(moves, 40, stalls)) / 40e3 for stalls in (True, False))
    assert replay.saved(replay.waits) == pytest.approx(with_stalls - without, rel=0.05, abs=0.012)


@pytest.mark.slow
@quick
@given(stalling, st.randoms(use_true_random=False))
def test_leaving_more_out_never_makes_a_step_slower(moves, random):
    replay = Replay(program(moves, 4).tape())
    waits = sorted(replay.waits)
    sets = [set(random.sample(waits, random.randint(0, len(waits)))) for _ in range(3)]
    singles = [replay.saved(each) for each in sets]
    joint = replay.saved(set().union(*sets))
    assert min(singles) >= 0 and joint >= max(singles) - 1e-12
    assert replay.launch_free() <= replay.ceiling() <= replay.step_ms - joint + 1e-12 <= replay.step_ms + 1e-12


def loop(plant=lambda made: made, run: float = 50.0, steps: int = 5) -> Synthetic:
    made = Synthetic()
    for _ in range(steps):
        made.think(20).launch(run=run, times=10)
        plant(made)
        made.launch(run=run, times=10).step()
    return made


PLANTS = {
    "sync": (lambda made: made.sync(), lambda made: made),
    "device sync": (lambda made: made.sync(None), lambda made: made),
    "item": (lambda made: made.item(), lambda made: made.copy("d2h", run=1.5)),
    "free": (lambda made: made.stop("free", 300), lambda made: made),
    "pageable": (lambda made: made.copy(run=200, pageable=True), lambda made: made.copy(run=(1 << 20) / 25_000)),
    "data": (lambda made: made.doing("data", 2000), lambda made: made),
    "in backward": (
        lambda made: made.hand(AUTOGRAD).launch(thread=AUTOGRAD).sync(thread=AUTOGRAD).think(90, AUTOGRAD).hand(MAIN, AUTOGRAD),
        lambda made: made.hand(AUTOGRAD).launch(thread=AUTOGRAD).think(90, AUTOGRAD).hand(MAIN, AUTOGRAD),
    ),
}


@pytest.mark.parametrize("run", [50.0, 2.0], ids=["gpu bound", "launch bound"])
@pytest.mark.parametrize("plant", PLANTS)
def test_the_price_of_each_kind(plant, run):
    planted, clean = PLANTS[plant]
    replay = Replay(loop(planted, run).tape())
    true = (length(loop(planted, run, 40)) - length(loop(clean, run, 40))) / 40e3
    assert replay.saved(replay.waits, replay.stalls) == pytest.approx(true, rel=0.05, abs=0.004)
    assert replay.ceiling() == pytest.approx(length(loop(clean, run, 40)) / 40e3, rel=0.05)


@pytest.mark.parametrize("slower", [1.0, 1.3, 1.7])
@pytest.mark.parametrize("run, stall", [(50.0, 0.0), (4.0, 0.0), (50.0, 900.0)], ids=["gpu bound", "launch bound", "loader"])
def test_a_recorded_host_is_slow_and_its_device_is_not(slower, run, stall):
    """A wait in front of Python's own time, and perhaps a loader, which no profiler slows. The price is that of a host at its
    own pace. A recorded step's, times timed over recorded step, is half too high where the device holds up the step."""

    def program(slower: float, wait: bool = True, steps: int = 5) -> Synthetic:
        made = Synthetic()
        for _ in range(steps):
            made.launch(run=run, host=6.0 * slower, times=40)
            made = made.sync() if wait else made
            made.think(200.0 * slower).doing("data", stall).launch(run=run, host=6.0 * slower, times=40).step()
        return made

    timed, clean = (length(program(1.0, wait, 40)) / 40e3 for wait in (True, False))
    recorded = Replay(program(slower).tape())
    replay = recorded.paced(timed)
    assert replay.step_ms == pytest.approx(timed, rel=0.01) and 1 / replay.share == pytest.approx(slower, rel=0.1)
    assert replay.recorded_ms == recorded.step_ms
    assert replay.saved(replay.waits) == pytest.approx(timed - clean, rel=0.1, abs=0.004)
    if (slower, run, stall) == (1.7, 50.0, 0.0):
        assert recorded.saved(recorded.waits) * timed / recorded.step_ms > 1.4 * (timed - clean)


def test_a_recording_slows_a_host_twofold_at_most():
    """A step that was timed at less than the device's own time tells nothing of the host."""
    replay = Replay(loop(lambda made: made.sync()).tape())
    assert replay.paced(0.1 * replay.step_ms).share == pytest.approx(SLOWED, abs=0.01)
    assert replay.paced(2 * replay.step_ms) is replay


def test_a_wait_that_costs_nothing_has_no_price():
    """The queue is 2 ms long when the host waits for an event at its head: a long wait, and a free one."""
    made = Synthetic()
    for _ in range(5):
        made.launch(run=100).record("early").launch(run=100, times=20).sync(event="early").step()
    replay = Replay(made.tape())
    waited = sum(call.end - call.start for call in made.calls if call.kind == "sync")
    assert waited > 100 and replay.saved(replay.waits) == pytest.approx(0, abs=1e-4)


def test_two_waits_are_worth_more_together():
    """Of two waits in a row each hides the other."""
    made = loop(lambda made: made.sync().think(30).sync())
    replay = Replay(made.tape())
    first, second = sorted(replay.waits)[::2], sorted(replay.waits)[1::2]
    assert replay.saved(second) < replay.saved([*first, *second]) / 2
    assert replay.saved([*first, *second]) == replay.saved(replay.waits)


def test_a_copys_work_goes_only_when_asked():
    tape = loop(lambda made: made.item(), run=50).tape()
    replay = Replay(tape)
    copies = [place for place, call in enumerate(tape.calls) if call.kind == "copy"]
    assert replay.saved(copies) == replay.saved(replay.waits)  # either stands for both
    assert replay.saved(copies, work=True) - replay.saved(copies) == pytest.approx(1.5e-3 + 1e-3, abs=1e-3)


def test_a_step_under_a_graph_takes_what_the_device_takes():
    replay = Replay(loop(run=2.0).tape())
    assert replay.launch_free() == pytest.approx(20 * (2 + 1) / 1e3, rel=0.05) and replay.step_ms > 0.09


def test_a_full_queue_is_no_cost_of_the_launch():
    """The device is far behind, so launches wait for room: as long as it takes, not as long as it took."""

    def made(plant: bool, steps: int = 4) -> Synthetic:
        loop = Synthetic(depth=300)
        for _ in range(steps):
            loop.launch(run=30, times=700)
            loop = loop.sync().think(800) if plant else loop.think(800)
            loop.step()
        return loop

    replay = Replay(made(True).tape())
    true = (length(made(True, 20)) - length(made(False, 20))) / 20e3
    assert replay.error < 1e-6 and replay.saved(replay.waits) == pytest.approx(true, rel=0.06)


def test_work_behind_another_stream_follows_it_without_an_event_on_the_tape():
    made = Synthetic()
    for _ in range(4):
        made.launch(run=300).record("e").wait_event("e", 20).launch(run=200, stream=20).record("f", 20).wait_event("f", 7)
        made.launch(run=100).sync().think(100).step()
    tape = made.tape()
    bare = dataclasses.replace(tape, calls=[call for call in tape.calls if call.kind != "event"])
    assert Replay(bare).error < 0.005
    assert Replay(bare).saved(Replay(bare).waits) == pytest.approx(Replay(tape).saved(Replay(tape).waits), abs=0.01)


def test_a_wait_for_an_event_that_the_tape_does_not_name_is_found_by_its_end():
    """Profilers name the events only when asked to."""
    made = Synthetic()
    for _ in range(5):
        made.launch(run=400).record("e").launch(run=300).sync(event="e").think(500).step()
    tape = made.tape()
    calls = [dataclasses.replace(call, record=0) if call.kind == "sync" else call for call in tape.calls]
    bare = dataclasses.replace(tape, calls=[dataclasses.replace(c, stream=None) if c.kind == "event" else c for c in calls])
    assert Replay(bare).error < 1e-9
    price = Replay(tape).saved(Replay(tape).waits)
    assert price > 0.1 and Replay(bare).saved(Replay(bare).waits) == pytest.approx(price, abs=0.005)


def test_a_slow_launch_reaches_its_device_late():
    """Of 400 µs in the driver 395 go before the work is handed over: they are the host's, and nothing is unexplained."""
    made = Synthetic()
    for _ in range(4):
        made.launch(run=20, times=3).think(395).launch(run=30, host=5).sync().step()
    tape = made.tape()
    slow = [dataclasses.replace(c, start=c.start - 395) if n % 5 == 3 else c for n, c in enumerate(tape.calls)]
    assert Replay(dataclasses.replace(tape, calls=slow)).error < 1e-9


def test_two_devices_wait_for_their_own():
    made = Synthetic()
    for _ in range(5):
        made.launch(run=500, device=0).launch(run=100, device=1, stream=7).sync(device=1).think(50).step()
    replay = Replay(made.tape())
    assert replay.error < 1e-9 and replay.saved(replay.waits) == pytest.approx(0, abs=0.003)


def test_missing_launches_are_refused():
    tape = loop().tape()
    calls = [call for place, call in enumerate(tape.calls) if place % 3]
    with pytest.raises(MeasureError) as error:
        Replay(dataclasses.replace(tape, calls=calls))
    assert str(error.value) == message("doctor/replay:missing_launches_are_ref")


def test_a_tape_that_does_not_explain_itself_is_refused():
    """Each step's second half begins 400 µs after all that it could have waited for."""
    tape = loop(lambda made: made.doing("annotation", 0)).tape()
    late = [dataclasses.replace(w, start=w.start + 400 * n, end=w.end + 400 * n) for n, w in enumerate(tape.work)]
    with pytest.raises(MeasureError, check=message("doctor/replay:a_tape_that_does_not_exp")):
        Replay(dataclasses.replace(tape, work=late))


def test_hidden_replays_are_refused():
    with pytest.raises(MeasureError, check=message("doctor/replay:hidden_replays_are_refus")):
        Replay(Synthetic().launch().graph(hidden=True).tape())


def test_places_must_be_on_the_tape():
    with pytest.raises(ValueError, check=message("doctor/replay:places_must_be_on_the_ta")):
        Replay(loop().tape()).saved([100])
    with pytest.raises(ValueError, match=r"^spans are numbered"):
        Replay(loop().tape()).saved(spans=[5])


def test_a_tape_without_steps_is_one_step():
    made = Synthetic().launch(run=50).sync().launch(run=50).sync()
    replay = Replay(Tape(made.calls, made.work))
    assert replay.step_ms == pytest.approx(length(made) / 1e3) and replay.saved(replay.waits) > 0


@pytest.mark.parametrize(("rate", "left"), [(None, 2000.0), (50_000.0, 1000.0), (100_000.0, 500.0)])
def test_a_copy_is_left_with_what_the_link_takes(rate, left):
    """50 MB in 4 ms: on a link of 50 GB/s it would take 1 ms. Without a rate a trace is taken for one of a slower link."""
    made = Synthetic()
    for _ in range(6):
        made.launch(run=100).copy(run=4000, bytes=50_000_000, pageable=True).step()
    tape = made.tape()
    tape = replace(tape, about={"pinned": rate}) if rate else tape
    replay = Replay(tape)
    assert replay.saved(replay.waits) == pytest.approx((4000 - left) / 1e3, rel=0.03)


@pytest.mark.gpu
def test_the_rate_is_that_of_a_bus(device):
    rate = pinned_rate()
    assert BYTES >= 1 << 20 and rate is not None and 1e3 < rate < 1e6  # 1 GB/s to 1 TB/s


def test_a_full_device_has_no_rate(monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    assert pinned_rate() is None
