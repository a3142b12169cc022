"""What the ledger counts in the phase that locates is marked on the tape, but for what the doctor itself does."""

import torch

from gpubound.doctor.record.phases import MarkingLedger
from gpubound.doctor.record.tape import MARK
from gpubound.watch.pretend import simgpu


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
