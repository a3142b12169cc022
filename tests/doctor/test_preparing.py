"""The host's work inside an op that copies: it is priced with the copy, because the fix takes it away too."""

from dataclasses import replace

import pytest

from gpubound.doctor.finding import KINDS
from gpubound.doctor.price.idle import Stalls
from gpubound.doctor.record.tape import Span, Tape
from gpubound.doctor.report.files import picks, program
from gpubound.doctor.rules.diagnose import diagnose
from gpubound.doctor.rules.waits import CONVERTED, MUCH, copy_preparation

from .evidences import STEPS, at, row, seen
from .programs import length
from .tapes import LOADER, MAIN, Synthetic


def loop(prepare: float, run: float = 20.0, pageable: bool = True) -> Synthetic:
    """A host that is behind its device; each step begins with an op that thinks for `prepare` µs and copies."""
    made = Synthetic()
    for _ in range(STEPS):
        start = made.clock[MAIN]
        made.think(prepare).copy(run=30, pageable=pageable)
        end = made.clock[MAIN] + 1
        made.spans += [Span("aten::to", "op", MAIN, start, end), Span("aten::copy_", "op", MAIN, start + 1, end - 1)]
        made.launch(run=run, times=10).step()
    return made


def test_what_an_op_does_beside_its_copy_is_part_of_the_price():
    where = row("h2d", "copy to device", at(5), detail="pageable, non_blocking", bytes=1 << 20)
    slow, quick = (diagnose(seen(loop(us), where, line=at(5), kinds=("copy",))) for us in (900.0, 10.0))
    (finding,) = (found for found in slow.findings if found.kind != "launch_bound")
    true = (length(loop(900.0)) - length(loop(0.0, pageable=False))) / STEPS / 1e3
    assert finding.fix == CONVERTED and finding.ms == pytest.approx(true, rel=0.05)
    assert all(
        f.fix == KINDS["pageable"].remedy and f.ms < 0.1 for f in [*quick.findings, *quick.harmless] if f.kind == "pageable"
    )


def test_the_page_leaves_it_out_as_the_doctor_does():
    evidence = seen(loop(900.0), row("h2d", "copy to device", at(5), detail="pageable, blocking"), line=at(5), kinds=("copy",))
    copied = [found for found in diagnose(evidence).findings if found.kind == "h2d"]
    (pick,) = picks(evidence.tape, copied, evidence.located)
    assert pick.spans == copy_preparation(evidence.tape, evidence.located) and len(pick.spans) == STEPS
    assert any(1 in numbers and us > 800 for _, us, numbers in program(evidence.replay, [pick])["stalls"])


def test_only_the_outermost_op_around_a_copy_that_is_long_beside_it():
    made = loop(MUCH + 50)
    tape = made.tape()
    copies = [n for n, call in enumerate(tape.calls) if call.kind == "copy"]
    assert {tape.spans[n].name for n in copy_preparation(tape, copies)} == {"aten::to"}
    assert copy_preparation(tape, [n for n in range(len(tape.calls)) if n not in copies]) == frozenset()
    elsewhere = replace(tape, spans=tuple(replace(span, thread=LOADER) for span in tape.spans))
    assert copy_preparation(elsewhere, copies) == frozenset()
    short = loop(MUCH - 50).tape()
    assert copy_preparation(short, [n for n, call in enumerate(short.calls) if call.kind == "copy"]) == frozenset()


def test_stalls_are_of_their_kinds_or_those_that_are_asked_for():
    spans = (Span("aten::to", "op", MAIN, 0, 10), Span("gc", "gc", MAIN, 5, 20))
    assert Stalls(Tape(spans=spans)).within(0, 30, {MAIN}) == [(5, 20, 1)]
    assert Stalls(Tape(spans=spans), frozenset({0})).within(0, 30, {MAIN}) == [(0, 10, 0)]
    assert Stalls(Tape(spans=spans), frozenset({0, 1})).within(0, 30, {MAIN}) == [(0, 5, 0), (5, 10, 1), (10, 20, 1)]
