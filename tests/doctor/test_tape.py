import json

import pytest

from gpubound.doctor.record.tape import Call, Mark, Tape, chosen
from tests.doctor.tapes import Synthetic
from tests.messages import message


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
