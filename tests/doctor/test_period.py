"""The period of a loop, found from the steps in which its lines block; windows that see rare steps."""

import pytest
import torch

from gpubound.doctor.finding import Verdict
from gpubound.doctor.record import located as located_module
from gpubound.doctor.record.located import FEWEST, LONGEST, LocatedPhase, SurveyPhase, WatchedPhase, period_of, repeats_after
from gpubound.doctor.record.phases import LoaderClock, Period, Phase, Phases, RecordedPhase, TimedPhase
from gpubound.doctor.record.run import RunPlan, _timed_and_taped, lines_once, rare_steps, spread
from gpubound.doctor.report.words import notes, screen
from gpubound.watch.pretend import simgpu

from .verdicts import judged, looped


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Tests on a busy machine must not be shorter than elsewhere."""
    monkeypatch.setattr(located_module, "PATIENCE_S", float("inf"))


PATTERNS = [
    (range(12), 12, 1),
    ({0, 10}, 12, 10),
    ({6, 22, 38}, 48, 16),
    ({2, 3, 12, 13}, 20, 10),  # two steps in a row of every ten
    ({4}, 12, 0),  # seen once
    ({1, 4, 5, 9}, 12, 0),  # without a rhythm
    ({0, 4}, 12, 0),  # it would have come again
    ((), 12, 0),
]


@pytest.mark.parametrize(("steps", "window", "distance"), PATTERNS)
def test_a_line_s_distance(steps, window, distance):
    assert repeats_after(steps, window) == distance


def test_the_period_of_several_lines_is_their_common_multiple():
    every, tenth, fourth = range(24), {3, 13, 23}, {1, 5, 9, 13, 17, 21}
    assert period_of({"a": every, "b": fourth}, 24) == (4, False)
    assert period_of({"a": every, "b": fourth, "c": tenth}, 24) == (20, False)
    assert period_of({"a": every, "b": {2, 5, 11}}, 24) == (1, False), "a line without a rhythm has no part in it"
    assert period_of({"a": every, "b": {7}}, 24) == (1, True)
    assert period_of({}, 24) == (1, False)
    far = {"a": {0, 31}, "b": {0, 29}}
    assert period_of(far, 32) == (31, False), f"31 x 29 is above {LONGEST}"


def test_windows_are_whole_periods():
    assert [Period(16).rounded(steps) for steps in (1, 16, 20)] == [16, 16, 32] and Period().rounded(20) == 20


def test_what_rare_steps_hold():
    times = [1.0] * 15 + [41.0]
    assert rare_steps(times) == {"steps": 1 / 16, "time": 41 / 56, "times": 41.0}
    assert rare_steps([1.0] * 16) == {} == rare_steps([]) and rare_steps([1.0, 9.0] * 8) == {}, "half of the steps is not rare"
    verdict = Verdict.from_dict(judged(*looped()).as_dict() | {"distortion": None} | {"period": 16, "rare": rare_steps(times)})
    (repeats, long) = notes(verdict)
    assert "every 16 steps" in repeats and "41 times" in long and "73 % of the time" in long


def test_timed_steps_that_are_not_the_script_s_are_reported():
    verdict = judged(*looped()).as_dict() | {"distortion": None}
    verdict |= {"spread": None}
    for plain, timed, remarks in ((43.0, 44.0, 0), (43.0, 70.9, 1), (70.9, 43.0, 1), (None, 43.0, 0)):
        (*found,) = notes(Verdict.from_dict(verdict | {"plain_ms": plain, "timed_ms": timed}))
        assert len(found) == remarks and all("43.0 ms" in text and "70.9 ms" in text for text in found)
    for apart, remarks in ((None, 0), (0.05, 0), (0.21, 1)):
        uncertain = Verdict.from_dict(verdict | {"spread": apart})
        assert len(notes(uncertain)) == remarks and all("21 %" in text for text in notes(uncertain))
        assert ("± 21%" in screen(uncertain)) == bool(remarks)


class Timed(TimedPhase):
    """A phase with these times."""

    def __init__(self, name: str, step_ms: list[float]):
        super().__init__(1, name=name)
        self.step_ms, self.memory, self.loader = step_ms, {}, LoaderClock()
        self._loading = [(float(n), 0.0) for n in range(len(step_ms) + 1)]


def test_a_step_is_timed_in_whole_periods_before_any_sensor_and_afterwards():
    survey, located = SurveyPhase(1, Period(4)), LocatedPhase(1)
    plain, timed = Timed("plain", [9.0, 9.0] + [1.0, 1.0, 1.0, 5.0] * 2), Timed("timed", [3.0] * 8)
    found = _timed_and_taped([plain, survey, timed], located)
    assert found["step_ms"] == [1.0, 1.0, 1.0, 5.0] * 2 + [3.0] * 8 and (found["plain_ms"], found["timed_ms"]) == (1.0, 3.0)
    assert found["loading_ms"] == 1e3
    found = _timed_and_taped([Timed("plain", [1.0] * 3), survey, timed], located)
    assert found["step_ms"] == [3.0] * 8 and "plain_ms" not in found, "three steps are no period"
    assert not {"step_ms", "spread"} & _timed_and_taped([survey, Timed("timed", [1.0] * 3)], located).keys()
    windows = [1.0] * 5 + [2.0] * 5 + [3.0] * 5
    assert spread([windows]) == pytest.approx(2 / 3**0.5 / 2) and spread([[1.0] * 14]) is None
    assert spread([[1.0, 3.0] * 20], 2) == 0.0, "whole periods are alike"
    assert spread([[1.0] * 40, [3.0] * 40]) == 0.5, "a second of another pace"


def loop(planted: list[Phase], steps: int, rollout: int, print_every: int) -> dict[str, float]:
    """Run a planted loop under these phases. Return each line's stalls a step."""
    x = torch.ones(4, device=simgpu())
    with Phases(planted, keep_going=True) as phases:
        for step in range(steps):
            if rollout and step % rollout == 0:
                for _ in range(8):
                    (x * 2).cpu()
            if print_every and step % print_every == 3:
                x.sum().item()
            x.mean().item()
            phases.ended()
    (located,) = [phase for phase in planted if isinstance(phase, WatchedPhase)]
    rows = [row for row in located.ledger.rows if row.kind == "sync"]
    return {row.place.site.code: row.count / located.ledger.steps for row in rows}


def test_a_dry_run_sees_what_happens_in_every_tenth_and_in_every_sixteenth_step():
    period = Period()
    every = loop([Phase(1), SurveyPhase(2, period, "located")], 300, rollout=16, print_every=0)
    assert period.steps == 16 and every == {"(x * 2).cpu()": 8 / 16, "x.mean().item()": 1.0}
    tenth = loop([Phase(1), SurveyPhase(2, Period(), "located")], 300, rollout=0, print_every=10)
    assert tenth == {"x.sum().item()": 0.1, "x.mean().item()": 1.0}


def test_a_line_that_blocked_in_one_step_of_several_is_known():
    located = SurveyPhase(2, Period(), "located")
    loop([Phase(1), located], 30, rollout=0, print_every=17)  # in steps 3 and 20, of which the last is seen among 2 to 21
    reads = [row for row in located.ledger.rows if row.kind == "sync"]  # a garbage collection may have a row as well
    number = {row.place.site.code: row.place.site.line for row in reads}
    times = {row.place.site.code: len(located.ledger.lines[row.place.line]) for row in reads}
    assert {line for _, line, _ in lines_once(located)} == {number[code] for code in number if times[code] == 1}
    assert number["x.mean().item()"] not in {line for _, line, _ in lines_once(located)}


def test_a_loop_of_equal_steps_is_looked_at_for_a_few_steps_alone():
    located = SurveyPhase(2, Period(), "located")
    loop([Phase(1), located], 100, rollout=1, print_every=0)
    assert located.done == FEWEST
    located = SurveyPhase(2, Period(), "located")
    loop([Phase(1), located], 100, rollout=0, print_every=90)  # it could come again within 64 steps
    assert located.done == LONGEST


def test_a_step_that_a_script_s_end_cuts_short_is_not_counted():
    located = SurveyPhase(2, Period(), "located")
    x = torch.ones(4, device=simgpu())
    with Phases([Phase(1), located], keep_going=True) as phases:
        for _ in range(6):
            x.mean().item()
            phases.ended()
        x.mean().item()
        x.sum().item()
    assert [(row.place.site.code, row.count) for row in located.ledger.rows if row.kind == "sync"] == [("x.mean().item()", 5)]
    assert located.ledger.steps == 5


def test_slow_steps_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(located_module, "PATIENCE_S", -1.0)
    located = SurveyPhase(2, Period(), "located")
    loop([Phase(1), located], 100, rollout=16, print_every=10)
    assert located.done == located.least == 2


def test_the_phases_of_a_gpu_share_the_period():
    warm, plain, survey, timed, sampled, recorded, located = RunPlan().phases()
    assert isinstance(survey, SurveyPhase) and isinstance(timed, TimedPhase) and isinstance(recorded, RecordedPhase)
    assert survey.period is timed.period is sampled.period is recorded.period is located._taped.period
    assert plain.period is not survey.period
    assert [phase.name for phase in (warm, plain, survey, timed, sampled, recorded, located)] == [
        "warm-up", "plain", "surveyed", "timed", "sampled", "taped", "located",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_locating_goes_on_until_each_copy_has_been_seen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    x, sizes = torch.ones(4, device=simgpu()), iter([4, 4, 4, 8, 4, 4, 4])
    located = LocatedPhase(1, copied=lambda: {16, 32})  # 8 numbers of 4 bytes are copied in the fourth step alone
    with Phases([located], keep_going=True) as phases:
        for size in sizes:
            torch.ones(size).to(x.device)
            phases.ended()
    assert located.done == located.steps == 5 and located.ledger.steps == 4, "the first step is not on a tape"
