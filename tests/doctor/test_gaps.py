from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from gpubound.doctor.price.idle import LEAVES, SHARES, idle_times
from gpubound.doctor.record.tape import Call, Span, Tape, Work
from gpubound.errors import MeasureError
from tests.messages import message, refusal

from .programs import program, stalling
from .tapes import AUTOGRAD, LOADER, MAIN, Synthetic

quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def rounded(values: dict) -> dict:
    return {name: round(value, 6) for name, value in values.items() if value}


def by_hand(tape: Tape, device: int) -> dict[str, float]:
    """Busy, communication and idle time of a device, moment by moment: a definition, not an algorithm."""
    start, end = tape.window
    cuts = sorted({start, end, *(t for w in tape.work for t in (w.start, w.end) if start < t < end)})
    found = {"busy": 0.0, "comm": 0.0, "idle": 0.0}
    for a, b in pairwise(cuts):
        kinds = {w.kind == "comm" for w in tape.work if w.device == device and w.start <= a and b <= w.end}
        found["busy" if False in kinds else "comm" if kinds else "idle"] += b - a
    return found


@quick
@given(stalling)
def test_the_shares_are_all_of_the_step(moves):
    tape = program(moves, 3).launch(kind="comm", run=40, stream=9).launch(device=1).step().tape()
    bar = idle_times(tape)
    assert set(bar.shares) == set(SHARES) and set(bar.late) == set(LEAVES)
    assert sum(bar.shares.values()) == pytest.approx(100, abs=1e-9)
    assert sum(bar.late.values()) == pytest.approx(bar.shares["host_late"], abs=1e-9)
    start, end = tape.window
    for device in (0, 1):
        true = by_hand(tape, device)
        assert bar.devices[device]["busy"] == pytest.approx(100 * true["busy"] / (end - start), abs=1e-6)
        assert bar.devices[device]["comm"] == pytest.approx(100 * true["comm"] / (end - start), abs=1e-6)
        assert sum(gap.us for gap in bar.gaps if gap.device == device) == pytest.approx(true["idle"], abs=1e-6)
    assert bar.step_ms * 4 == pytest.approx((end - start) / 1e3)


def one_gap(calls: list[Call], *spans: Span) -> list[tuple]:
    """A device that runs until 100 and again from 300 on: how the time between is cut. The last call launches the second."""
    work = [Work("a", "kernel", 0, 7, 10.0, 100.0, 1), Work("b", "kernel", 0, 7, 300.0, 400.0, 2)]
    first = Call("cudaLaunchKernel", "launch", MAIN, 0.0, 5.0, 1, 7)
    bar = idle_times(Tape([first, *calls], work, spans, steps=[(10.0, 400.0)]))
    return [(gap.start, gap.end, gap.leaf or gap.cause, gap.call, gap.span) for gap in bar.gaps]


def launch(start: float, end: float, thread: int = MAIN) -> Call:
    return Call("cudaLaunchKernel", "launch", thread, start, end, 2, 7)


def test_work_that_stood_in_the_queue_was_held_up_by_the_device():
    assert one_gap([launch(50.0, 100.0)]) == [(100.0, 300.0, "device_side", 1, None)]


def test_work_without_a_launch_is_not_located():
    assert one_gap([]) == [(100.0, 300.0, "unlocated", None, None)]


def test_a_host_that_computes_is_late_by_dispatch():
    assert one_gap([launch(290.0, 295.0)]) == [(100.0, 300.0, "dispatch", 1, None)]


@pytest.mark.parametrize("end", [102.0, 81.0])
def test_a_wait_that_drained_the_queue_is_blamed_for_what_follows(end):
    """The wait lasts for 2 of the 200 µs, or ended before them: it is why the host had not launched yet."""
    wait = Call("cudaStreamSynchronize", "sync", MAIN, 20.0, end, 3, 7)
    assert {piece[2:] for piece in one_gap([wait, launch(290.0, 295.0)])} == {("sync", 1, None)}


def test_a_wait_long_before_is_not_to_blame():
    wait = Call("cudaStreamSynchronize", "sync", MAIN, 20.0, 79.0, 3, 7)
    assert one_gap([wait, launch(290.0, 295.0)]) == [(100.0, 300.0, "dispatch", 2, None)]


def test_a_gap_is_cut_where_its_cause_changes():
    wait = Call("cudaStreamSynchronize", "sync", MAIN, 20.0, 110.0, 3, 7)
    alloc = Call("cudaMalloc", "alloc", MAIN, 260.0, 280.0)
    data, collection = Span("next", "data", MAIN, 120.0, 250.0), Span("gc", "gc", MAIN, 200.0, 220.0)
    assert one_gap([wait, alloc, launch(290.0, 295.0)], data, collection) == [
        (100.0, 110.0, "sync", 1, None),
        (110.0, 120.0, "sync", 1, None),
        (120.0, 200.0, "data", None, 0),
        (200.0, 220.0, "gc", None, 1),
        (220.0, 250.0, "data", None, 0),
        (250.0, 260.0, "sync", 1, None),
        (260.0, 280.0, "alloc", 2, None),
        (280.0, 300.0, "sync", 1, None),
    ]


def test_other_threads_stalls_are_their_own():
    assert one_gap([launch(290.0, 295.0)], Span("next", "data", LOADER, 100.0, 290.0))[0][2] == "dispatch"


def test_a_pageable_copy_is_a_copy_in_flight():
    copy = Call("cudaMemcpyAsync", "copy", MAIN, 90.0, 390.0, 2, 7, blocks=True)
    assert one_gap([copy]) == [(100.0, 300.0, "copy", 1, None)]


def test_a_wait_on_autograds_thread_is_found_from_the_main_thread():
    """Backward drains the queue, and the optimizer's first launch is the one that comes late."""
    made = Synthetic().launch(run=100).hand(AUTOGRAD).launch(run=100, thread=AUTOGRAD).sync(thread=AUTOGRAD)
    tape = made.hand(MAIN, of=AUTOGRAD).think(50).launch(run=100).step().tape()
    blamed = {tape.calls[gap.call].name for gap in idle_times(tape).gaps if gap.leaf == "sync"}
    assert blamed == {"cudaStreamSynchronize"} and idle_times(tape).late["sync"] > 10


def test_what_follows_a_wait_is_its_own_until_the_host_is_ahead_again():
    """After the wait each kernel of 1 µs comes late, until the long one lets the host get ahead."""
    made = Synthetic().launch(run=50).sync().launch(run=1, times=5).launch(run=300, times=2)
    bar = idle_times(made.launch(run=50).step().tape())
    assert bar.ms("sync") > 0.02 and bar.ms("dispatch") == pytest.approx(0.005)  # the first launch


def test_a_launch_bound_loop_is_not_its_waits_fault():
    """The host never gets ahead, with or without the wait: the wait has its own gap, dispatch has the rest."""
    made = Synthetic()
    for _ in range(5):
        made.launch(run=1, times=50).sync().step()
    bar = idle_times(made.tape())
    assert bar.late["dispatch"] > 5 * bar.late["sync"] > 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_replay_is_as_busy_as_it_is(whole):
    """A graph of 100 nodes of 9 µs with 1 µs between them: public analysers call such a device idle."""
    made = Synthetic()
    for _ in range(10):
        made.graph([9.0] * 100, whole=whole).step()
    made.steps = [(5.0, max(work.end for work in made.work))]
    assert idle_times(made.tape()).shares["busy"] == pytest.approx(100 if whole else 90, abs=1)


def test_a_replay_that_hides_its_work_is_refused():
    made = Synthetic().launch().graph(hidden=True).graph().step()
    assert refusal(MeasureError, lambda: idle_times(made.tape())) == message("doctor/gaps:a_replay_that_hides_its")


def test_a_tape_without_a_device_is_refused():
    with pytest.raises(MeasureError, check=message("doctor/gaps:a_tape_without_a_device")):
        idle_times(Tape(spans=[Span("aten::mm", "op", MAIN, 0.0, 1.0)]))


def test_communication_counts_only_where_nothing_hides_it():
    work = [Work("k", "kernel", 0, 7, 0.0, 60.0, 1), Work("ncclDevKernel_AllReduce", "comm", 0, 20, 40.0, 100.0, 2)]
    calls = [Call("l", "launch", MAIN, 0.0, 0.0, 1), Call("l", "launch", MAIN, 0.0, 0.0, 2)]
    assert rounded(idle_times(Tape(calls, work, steps=[(0.0, 100.0)])).shares) == {"busy": 60, "comm": 40}
