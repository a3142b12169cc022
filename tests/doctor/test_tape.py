"""Tapes, and lines that go from the tape under sensors to the one without."""

import json

import pytest

from gpubound.doctor.record.tape import Call, Mark, Span, Tape, chosen, lines_by_mark, match_lines
from gpubound.watch.events import Place, Site
from tests.messages import message

from .tapes import Synthetic


def program() -> Synthetic:
    made = Synthetic()
    for number in range(4):
        made.mark(f"site{number}").launch(run=20).copy(pageable=True).doing("data", 30, "next").item().step()
    return made


def test_a_tape_goes_into_json_with_each_name_once():
    tape = program().tape(device="pretend")
    content = json.loads(json.dumps(tape.as_dict()))
    calls = [Call(content["names"][row[0]], *row[1:]) for row in content["calls"]]
    assert tuple(calls) == tape.calls and len(calls) == 16 and content["about"] == {"device": "pretend"}
    assert len(set(content["names"])) == len(content["names"]) < len(calls)


def test_everything_is_sorted_by_its_start():
    tape = program().tape()
    shuffled = Tape(*(list(reversed(part)) for part in (tape.calls, tape.work, tape.spans, tape.marks, tape.steps)))
    assert shuffled == tape
    assert [call.start for call in tape.calls] == sorted(call.start for call in tape.calls)


def test_what_may_have_waited():
    waits = {call.name: call.waits for call in Synthetic().launch().copy().item().stop("free").record("e").tape().calls}
    assert waits == {
        "cudaLaunchKernel": False, "cudaMemcpyAsync": False, "cudaStreamSynchronize": True, "cudaFree": True,
        "cudaEventRecord": False,
    }  # fmt: skip
    assert Synthetic().copy(pageable=True).tape().calls[0].waits
    assert not Call("cudaMallocAsync", "other", 1, 0.0, 1.0).waits


def test_a_cut_keeps_what_its_calls_launched():
    tape = program().tape()
    cut = tape.cut(1, 2)
    assert cut.steps == tape.steps[1:3] and [mark.site for mark in cut.marks] == ["site1", "site2"]
    assert len(cut.calls) == 8 and {w.correlation for w in cut.work} < {c.correlation for c in cut.calls}
    assert cut.window == (tape.steps[1][0], tape.steps[2][1])
    with pytest.raises(ValueError, check=message("doctor/tape:a_cut_keeps_what_its_cal")):
        tape.cut(4, 1)


def test_places_that_are_not_on_the_tape_are_named():
    with pytest.raises(ValueError, check=message("doctor/tape:damage_is_named.3")):
        chosen([1, 7], 3, "calls")


def test_a_mark_starts_where_it_is():
    assert Mark("a", 1, 5.0).start == 5.0 and Tape().window == (0.0, 0.0)


A, B, C = (Place(Site("train.py", line, "step", "code", line)) for line in (10, 20, 30))
PLACES = {"a": A, "b": B, "c": C}
MAIN, BACKWARD = 1, 2


def sync(at, thread=MAIN):
    return Call("cudaStreamSynchronize", "sync", thread, at, at + 1)


def copy(at, size, thread=MAIN):
    return Call("cudaMemcpyAsync", "copy", thread, at, at + 1, bytes=size)


def test_a_mark_stands_for_the_next_blocking_call_and_the_wait_of_a_copy():
    launch = Call("cudaLaunchKernel", "launch", MAIN, 1.0, 2.0)
    calls = [launch, copy(3, 8), sync(5), sync(7), sync(4, BACKWARD), sync(11)]
    tape = Tape(calls, marks=[Mark("a", MAIN, 0.0), Mark("b", MAIN, 10.0), Mark("gone", BACKWARD, 3.5)])
    got = {(tape.calls[n].thread, tape.calls[n].start): place for n, place in lines_by_mark(tape, PLACES).items()}
    # the sync at 7 is another library's: the mark had been used up. That of the unknown site has no line
    assert got == {(MAIN, 3): A, (MAIN, 5): A, (MAIN, 11): B}


def steps(rows, width=100.0, scale=1.0):
    """A tape of the calls (thread, kind, bytes, line) of each step, its true lines, and its steps."""
    calls, lines, spans = [], {}, []
    for step, row in enumerate(rows):
        for n, (thread, kind, size, _) in enumerate(row):
            at = (step * width + n + 1) * scale
            calls.append(Call(kind, kind, thread, at, at + 0.5 * scale, bytes=size))
        spans.append(
            Span("Optimizer.step#SGD.step", "optimizer", MAIN, (step + 0.9) * width * scale, (step + 0.95) * width * scale)
        )
    lines = {n: row[3] for n, row in enumerate(entry for row in rows for entry in row) if row[3] is not None}
    return Tape(calls, spans=spans, steps=[(s * width * scale, (s + 1) * width * scale) for s in range(len(rows))]), lines


def test_calls_are_matched_by_thread_kind_bytes_and_order():
    step = [(MAIN, "copy", 8, A), (BACKWARD, "sync", 0, C), (MAIN, "sync", 0, B)]
    seen, lines = steps([step, step], scale=3.0)
    other = [(7 if thread == MAIN else 9, kind, size, place) for thread, kind, size, place in step]
    clean, want = steps([other] * 3)
    clean = Tape(clean.calls, spans=[Span(s.name, s.kind, 7, s.start, s.end) for s in clean.spans], steps=clean.steps)
    assert match_lines(clean, seen, lines) == want


def test_what_has_no_counterpart_has_no_line_and_takes_none_of_another_call():
    seen, lines = steps([[(MAIN, "sync", 0, A), (MAIN, "copy", 16, B)]])
    clean, _ = steps([[(MAIN, "sync", 0, None), (MAIN, "copy", 99, None), (MAIN, "copy", 16, None)], []])
    assert match_lines(clean, seen, lines) == {0: A, 2: B}
    assert match_lines(clean, Tape(), {}) == {}


def test_of_unlike_steps_the_likest_one_gives_the_lines():
    often, rarely = [(MAIN, "sync", 0, A)], [(MAIN, "sync", 0, A), (MAIN, "copy", 8, C), (MAIN, "sync", 0, B)]
    seen, lines = steps([often, rarely])
    clean, want = steps([rarely, often, often])
    assert match_lines(clean, seen, lines) == want
