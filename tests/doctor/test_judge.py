"""Prices, ranking, what is harmless, what has no line: held against synthetic loops whose true step times are known."""

import pytest

from gpubound.doctor.price.prices import Replay
from gpubound.doctor.rules.diagnose import diagnose

from .evidences import STEPS, at, replace, row, seen, steps

FIRST, SECOND = at(88, "loss.item()"), at(90, "norm.item()")
ROWS = (row("sync", "item", FIRST), row("sync", "item", SECOND))


def two_reads():
    """Two reads a step, the host busy after either: the second one dearer."""
    evidence = seen(steps(lambda l: l.item().think(150).launch(run=20, times=5).item().think(400)), *ROWS)
    waits = [n for n, call in enumerate(evidence.tape.calls) if call.kind == "sync"]
    return replace(evidence, located={n: (FIRST, SECOND)[nth % 2] for nth, n in enumerate(waits[:-1])})


def test_findings_have_their_true_prices_and_the_dearest_is_first():
    """The truth is how much sooner the same loop is over without the read, or without both."""

    def over(*reads):
        first, second = (lambda l, on=on: l.item() if on else l for on in reads)
        loop = steps(lambda l: second(first(l).think(150).launch(run=20, times=5)).think(400))
        return loop.clock[1] / STEPS / 1e3

    whole = over(True, True)
    truth = {88: whole - over(False, True), 90: whole - over(True, False)}
    verdict = diagnose(two_reads())
    for finding in verdict.findings:
        assert finding.certainty == "replayed"
        assert finding.ms == pytest.approx(truth[finding.line.line], rel=0.15)
    assert [f.line.line for f in verdict.findings] == sorted(truth, key=truth.get, reverse=True)
    assert verdict.together_ms == pytest.approx(whole - over(False, False), rel=0.15)
    assert verdict.step_ms - verdict.together_ms == pytest.approx(verdict.ceiling_ms, rel=0.02)
    assert sum(verdict.bar["shares"].values()) == pytest.approx(100)


def test_prices_are_those_of_the_timed_step():
    """Where a timed step takes twice as long as a recorded one, no pace of the host explains it: a price is twice as high."""
    evidence = two_reads()
    recorded = Replay(evidence.tape).step_ms
    short, timed = diagnose(evidence), diagnose(replace(evidence, step_ms=[recorded * 2] * 3))
    assert timed.step_ms == recorded * 2 and timed.distortion == pytest.approx(0.5)
    once, twice = ({each.line: each.ms for each in said.findings if each.kind == "sync"} for said in (short, timed))
    assert len(once) == 2 and twice == pytest.approx({line: 2 * ms for line, ms in once.items()})


def test_what_happens_now_and_then_is_in_the_step_as_it_is_in_a_price():
    """Every fifth step takes 40 ms, the others 6: a step takes 12.8, and a price is a share of that."""
    assert diagnose(replace(two_reads(), step_ms=[6.0, 6.0, 6.0, 6.0, 40.0] * 2)).step_ms == pytest.approx(12.8)


def test_a_wait_that_costs_nothing_is_harmless_with_its_price():
    verdict = diagnose(seen(steps(lambda l: l.item(), run=600.0), ROWS[0], line=FIRST))
    assert not verdict.findings
    assert verdict.harmless[0].line.line == 88 and verdict.harmless[0].ms < 0.005 * verdict.step_ms


def test_waits_without_a_line_are_said_and_priced():
    dear = diagnose(seen(steps(lambda l: l.item().think(300)), ROWS[0]))
    assert "have no line (cudaStreamSynchronize): 0." in dear.unlocated[0]
    assert dear.findings[0].ms is None  # it may be one of them: the line is named without a price
    free = diagnose(seen(steps(lambda l: l.item(), run=600.0), ROWS[0]))
    assert not free.findings and free.harmless  # all of them together cost nothing, so this one does


def test_a_read_beside_a_copy_is_told_with_it():
    """`model(x.to(device)).item()` is one finding, priced as a whole; that it reads as well had been left out."""
    line = at(88, "model(x.to(device)).item()")
    copy, again = (
        row("h2d", "copy to device", line, 1, "pageable, blocking", 1000),
        row("repeat", "copy to device", at(90), 1, "", 9),
    )
    verdict = diagnose(
        seen(None, copy, row("sync", "item", line), again, row("h2d", "copy to device", at(90), 1, "pageable, blocking", 9))
    )
    assert [(f.kind, f.evidence) for f in verdict.findings] == [
        ("repeat", "9 B a step are on the device already"),
        ("h2d", "1.0 kB a step (pageable, blocking); the line also waits in item"),
    ]


def test_without_a_tape_there_are_counts_and_no_prices():
    verdict = diagnose(seen(None, *ROWS, row("h2d", "copy to device", at(5), 2, "pageable, blocking", 1000)))
    assert verdict.counts == {"syncs": 2.0, "pageable_bytes": 1000.0}
    assert {finding.certainty for finding in verdict.findings} == {"counted"}
    assert verdict.ceiling_ms is None and verdict.together_ms is None and not verdict.bar
    assert verdict.absent == {"prices": "no tape was recorded"}
    assert diagnose(replace(seen(None), counted=frozenset())).counts == {}


def test_a_tape_that_cannot_be_replayed_is_priced_by_its_gaps():
    evidence = seen(steps(lambda l: l.item().think(300)), ROWS[0], line=FIRST)
    lost = {work.correlation for work in evidence.tape.work[::50]}
    calls = [replace(call, correlation=0) if call.correlation in lost else call for call in evidence.tape.calls]
    verdict = diagnose(replace(evidence, tape=replace(evidence.tape, calls=calls)))
    assert "no launch on the tape" in verdict.absent["prices"]
    found = verdict.findings[0]
    assert found.certainty == "estimate" and 0.2 < found.ms < 0.4
