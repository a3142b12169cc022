"""A script goes through the phases step by step, and what the ledger counts in the one that locates is marked on the tape."""

import gc
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.data.dataloader import _BaseDataLoaderIter

import gpubound
from gpubound.doctor.record import phases as phases_module
from gpubound.doctor.record.located import LocatedPhase, MarkingLedger, SurveyPhase, WatchedPhase, unchanged
from gpubound.doctor.record.phases import Period, Phase, Phases, RecordedPhase, TimedPhase
from gpubound.doctor.record.run import RunPlan, _measure
from gpubound.doctor.record.script import Steps, StopScript
from gpubound.doctor.record.tape import MARK
from gpubound.errors import MeasureError
from gpubound.watch.pretend import simgpu
from gpubound.watch.sensors import Hook


class Noted(Phase):
    def __init__(self, name, steps, notes):
        super().__init__(steps)
        self.name, self.notes = name, notes

    def begin(self):
        super().begin()
        self.notes.append(f"begin {self.name}")

    def step(self):
        super().step()
        self.notes.append(f"{self.name} {self.done}")

    def end(self):
        super().end()
        self.notes.append(f"end {self.name}")


def test_slow_steps_are_reported_within_a_phase(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(sys.modules[Phases.__module__], "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with Phases([Phase(1), Phase(9)], keep_going=True, report=lines.append) as phases:
        for _ in range(10):
            now[0] += 6.0
            phases.ended()
    assert [line.split(",")[0] for line in lines] == ["warm-up 1/1"] + [f"warm-up {n}/9" for n in (2, 4, 6, 8, 9)]
    assert lines[1].endswith("6 s a step")


def test_a_script_that_is_too_short_is_told_how_many_steps_it_takes(monkeypatch):
    """Fast steps are repeated for the time that they take: what was asked for is not what is wanted."""

    class Growing(Phase):
        def step(self):
            super().step()
            self.steps = 50

    monkeypatch.setattr(RunPlan, "phases", lambda plan: [Growing(1), SurveyPhase(2, Period(), "located")])
    with pytest.raises(MeasureError) as error:
        _measure("train.py", lambda phases: [phases.ended() for _ in range(10)], RunPlan(dry=True), "")
    assert "ended after 10 steps, wanted 52;" in str(error.value)


def test_phases_follow_each_other_and_then_the_script_is_stopped():
    notes = []
    with pytest.raises(StopScript), Phases([Noted("a", 1, notes), Noted("b", 2, notes)]) as phases:
        for _ in range(10):
            phases.ended()
    assert notes == ["begin a", "a 1", "end a", "begin b", "b 1", "b 2", "end b"]
    with pytest.raises(StopScript):  # a script that swallowed it meets it at its next step
        phases.ended()


def test_a_script_may_end_early_or_go_on():
    notes = []
    with Phases([Noted("a", 5, notes)]) as phases:
        phases.ended()
    assert notes == ["begin a", "a 1", "end a"]
    with Phases([Noted("a", 1, [])], keep_going=True) as phases:
        for _ in range(4):
            phases.ended()
    assert phases.total == 4 and phases.finished


def test_the_located_phase_counts_its_own_steps_alone():
    x = torch.ones(4, device=simgpu())
    located = WatchedPhase(2)
    with Phases([Phase(1), located], keep_going=True) as phases:
        for _ in range(6):
            x.sum().item()
            phases.ended()
    (row,) = [row for row in located.ledger.rows if row.kind == "sync"]
    assert row.count == located.ledger.steps == 2
    assert row.place.site.code == "x.sum().item()"


def of_a_step() -> dict:
    """Return torch's functions that a sensor may replace, and what Python and torch call of their own accord."""
    cuda = (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
    owners = (torch, torch.Tensor, torch.nn.Module, torch.autograd, _BaseDataLoaderIter, *cuda)
    functions = {(owner, name): id(value) for owner in owners for name, value in vars(owner).items()}
    modes = (_len_torch_dispatch_stack(), _len_torch_function_stack(), Hook.listeners)
    return functions | {"callbacks": tuple(gc.callbacks), "modes": modes, "switch": sys.getswitchinterval()}


def test_nothing_of_the_survey_is_left_in_the_steps_that_are_timed():
    x, seen = torch.ones(4, device=simgpu()), {}
    order = [Phase(1), Noted("plain", 1, []), SurveyPhase(1, Period()), Noted("timed", 1, [])]
    with Phases(order, keep_going=True) as phases:
        while not phases.finished:
            x.sum().item()
            seen[order[phases._now].name] = of_a_step()
            phases.ended()
    plain, surveyed, timed = (seen[name].items() for name in ("plain", "surveyed", "timed"))
    assert plain <= timed and not plain <= surveyed


def calls_of_timed_steps(layers: int) -> list[str]:
    """Return the functions of this library that are called in three timed steps of a model with so many layers."""
    own, called = str(Path(gpubound.__file__).parent), []
    timed = TimedPhase(3, seconds=0.0)

    def watched(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(own):
            called.append(frame.f_code.co_qualname)

    with Phases([Phase(2), timed], keep_going=True) as phases, Steps(phases.ended):  # before the model is made, as for a script
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(torch.utils.data.DataLoader(torch.ones(10, 2), batch_size=2))
        for batch in batches:
            sys.setprofile(watched if phases.total == 2 else sys.getprofile())
            loss = model(batch.clone()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        sys.setprofile(None)
    assert len(timed.step_ms) == 3
    return called


def test_a_timed_step_calls_the_doctor_a_few_times_however_long_it_is(monkeypatch):
    """STEP is the script's own: nothing watches its modules, ops and Python code. What is called is the same for any model."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    monkeypatch.setattr(phases_module, "statistics", lambda: {"alloc": 0})
    short = calls_of_timed_steps(1)
    assert short == calls_of_timed_steps(20) and "TimedPhase._record" in short and len(short) / 3 < 30


def test_a_script_that_profiles_itself_has_no_tape_and_is_told_so():
    taped = RecordedPhase(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), Phases([taped], keep_going=True) as phases:
        phases.ended()
        phases.ended()
    assert taped.tape is None and taped.other_profiler
    assert taped.absent == {"tape": "the script runs a profiler itself; leave it out while the doctor measures"}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_what_empties_the_cache_has_a_line(monkeypatch):
    """The allocator's counters say how much was freed; this row says by which line, and counts nothing a second time."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    located = LocatedPhase(2)
    with Phases([located], keep_going=True):
        torch.cuda.empty_cache()
    (row,) = [row for row in located.ledger.rows if row.kind == "free"]
    assert (row.count, row.place.site.code) == (0, "torch.cuda.empty_cache()")


def test_the_line_that_waits_for_data_is_known_by_the_name_of_its_span():
    loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
    located = WatchedPhase(2)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        Phases([located], keep_going=True) as phases,
    ):
        next(iter(loader))
        for _batch in loader:
            phases.ended()
    ((name, place),) = located.named_lines.items()
    assert name in {event.name for event in profile.events()} and place.site.code == "for _batch in loader:"


class Uploading(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, n):
        return torch.full((2,), float(n)).sin()

    @staticmethod
    def joined(items):
        return torch.stack(items).to("simgpu")


def test_a_loader_computes_where_it_should_but_its_copies_count():
    simgpu()
    located = WatchedPhase(2)
    with Phases([Phase(1), located], keep_going=True) as phases:
        for batch in torch.utils.data.DataLoader(Uploading(), batch_size=2, collate_fn=Uploading.joined):
            torch.ones(2).sin()
            batch.sum()
            phases.ended()
    found = {(row.kind, row.place.site.code): row for row in located.ledger.rows if row.kind in ("cpu_op", "h2d")}
    assert [(code, row.count) for (kind, code), row in found.items() if kind == "cpu_op"] == [("torch.ones(2).sin()", 2)]
    assert [(code, row.count) for (kind, code), row in found.items() if kind == "h2d"] == [
        ('return torch.stack(items).to("simgpu")', 2)
    ]


def test_conversions_that_change_nothing_are_seen_once_for_a_module():
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.ones(2)
    with unchanged() as rows:
        for _ in range(3):
            x.to("cpu")
            model.to("cpu").float()
            x.to(torch.float64).float()
            torch.testing.assert_close(x, x)  # converts inside torch, on this line
        model.double()
        model.to(torch.float64)
    lines = {(row.what, row.place.site.code): row.count for row in rows.values() if "assert_close" not in row.place.site.code}
    assert lines == {
        (".to()", 'x.to("cpu")'): 3, (".to()", 'model.to("cpu").float()'): 3, (".float()", 'model.to("cpu").float()'): 3,
        (".to()", "model.to(torch.float64)"): 1,
    }  # fmt: skip
    assert all(row.ms > 0 for row in rows.values()) and "to" not in vars(torch.Tensor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_pauses_are_on_the_tape_with_their_lines(monkeypatch):
    """A collection, a checkpoint, and torch's span of a compilation: torch calls who has registered inside it."""
    compiling = []
    handler = SimpleNamespace(register_start_callback=compiling.append, remove_start_callback=compiling.remove)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", SimpleNamespace(callback_handler=handler))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    taped = RecordedPhase(2)
    with Phases([taped], keep_going=True) as phases:
        for _ in range(3):
            gc.collect()
            torch.save({}, io.BytesIO())
            with torch.profiler.record_function("_compile (dynamo_timed)"):
                compiling[0](None)
            phases.ended()
    spans = [(span.kind, taped.named_lines[span.name].site.code) for span in taped.tape.spans if span.name in taped.named_lines]
    assert spans == [
        ("gc", "gc.collect()"), ("checkpoint", "torch.save({}, io.BytesIO())"),
        ("compile", "compiling[0](None)"),
    ] * 2  # fmt: skip
    assert compiling == [] and taped._collecting not in gc.callbacks


def test_each_stall_leaves_a_mark_on_the_profile_with_the_id_of_its_place():
    x = torch.ones(4, device=simgpu())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, MarkingLedger(False) as ledger:
        for _ in range(2):
            x.sum().item()
        x.max().item()
    marks = [event.name.removeprefix(MARK) for event in profile.events() if event.name.startswith(MARK)]
    assert [ledger.locations[mark].site.code for mark in marks] == ["x.sum().item()"] * 2 + ["x.max().item()"]


def test_what_the_doctor_waits_for_is_not_the_scripts():
    x = torch.ones(4, device=simgpu())
    with MarkingLedger(gputrace=False) as ledger:
        with ledger.paused():
            x.sum().item()
        x.sum().item()
    assert [row.count for row in ledger.rows if row.kind == "sync"] == [1]


def test_rows_that_a_garbage_collection_adds_at_a_steps_end():
    ledger = MarkingLedger(gputrace=False)

    class Collecting:
        bytes, ms = 0, 0.0

        @property
        def count(self):
            ledger._rows["gc", len(ledger._rows)] = self
            return 1

    ledger._rows["sync", 0] = Collecting()
    ledger.complete()
    assert list(ledger._complete) == [("sync", 0)]
