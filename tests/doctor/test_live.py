"""What a training run's own tape says, in the doctor's words."""

import json
from types import SimpleNamespace

import pytest
import torch

from gpubound.doctor.finding import Verdict
from gpubound.doctor.record.run import of_run
from gpubound.doctor.report.words import brief
from gpubound.train import records
from gpubound.watch import pretend
from tests.messages import message

from .evidences import at, row

STEP = {"loss": 1.0, "seconds": 0.01, "host_lead_ms": 4.0, "gpu_busy": 0.98}


def ran(*watched: dict, steps: int = 8) -> list[dict]:
    """The lines of a run on a GPU, those of its watched steps among them. The first step has neither pace nor busy share."""
    first = {"step": 1, "loss": 2.0, "host_lead_ms": 900.0}
    return [first, *({"step": n, **STEP} for n in range(2, steps)), *({"step": steps, **STEP} | each for each in watched)]


def test_a_run_that_never_waits():
    said = brief(of_run("books", "a GPU", ran({"syncs": 0, "h2d_bytes": 0})))
    assert said == [
        message("doctor/live:a_run_that_never_waits"),
        message("doctor/live:a_run_that_never_waits.2"),
        "no finding",
        message("doctor/live:a_run_that_never_waits.3"),
    ]


def test_what_the_watched_steps_saw_has_its_line_and_remedy():
    """Two watched steps: three reads of one line, and a copy in one of them."""
    read = row("sync", "item", at(12, "loss.item()"))
    copy = row("h2d", "copy to device", at(9), bytes=64, detail="pageable, blocking")
    read.count, copy.count, copy.bytes = 1, 1, 128
    twice = json.loads(json.dumps([read.record()] * 2))  # as they lie on the disk
    other = [read.record(), copy.record()]
    verdict = of_run("books", "a GPU", ran({"syncs": 2, "stalls": twice}, {"syncs": 1, "stalls": other}))
    assert [(f.kind, f.line.line, f.count, f.ms) for f in verdict.findings] == [("sync", 12, 1.5, None), ("h2d", 9, 0.5, None)]
    assert verdict.counts == {"syncs": 1.5, "pageable_bytes": 64}
    first = next(line for line in brief(verdict) if line.startswith("1. "))
    assert first.startswith("1. train.py:12  loss.item(): sync, 1.5 a step: waits in item. Instead: keep the value on")
    assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))).lead_ms == 4.0


@pytest.mark.parametrize(
    "records, absent",
    [
        ([{"step": 1, "seconds": 0.5}], {"prices"}),
        (ran(), {"prices", "counts"}),
        ([{"step": 6, "seconds": 0.5, "host_lead_ms": 0.0, "syncs": 0}], {"prices", "the busy share"}),
        ([], {"prices"}),
    ],
)
def test_what_was_not_measured_is_not_said(records, absent):
    """A CPU, a run that is too short, eager steps, no step at all: never "no finding" where nobody looked."""
    verdict = of_run("books", "some device", records)
    assert verdict.absent.keys() == absent and ("no finding" in brief(verdict)) == ("syncs" in verdict.counts)


def test_a_watched_step_puts_its_stalls_on_the_tape(monkeypatch):
    """On the pretend device: a step that uploads its batch and reads its loss, as an objective of the user's might."""
    weight = torch.ones(3, device=pretend.simgpu())

    def step(batches):
        loss = (weight * batches.to(weight.device)).sum()
        values = SimpleNamespace(loss=loss.item(), grad_norm=1.0, lr=0.1, tokens=3.0, skipped=0)
        return SimpleNamespace(read=lambda: values)

    step.device, step.captured = torch.device("cuda", 0), ()
    monkeypatch.setattr(records, "Instant", lambda device: SimpleNamespace(event=None, since=lambda _: 0.01))
    seen = []
    recorder = records.StepRecorder(step, seen.append)
    for number in range(1, records.WATCHED + 2):
        recorder.launch(number, torch.ones(3))
    recorder.finish()
    assert [r["step"] for r in seen if "stalls" in r] == [records.WATCHED]
    verdict = of_run("books", "pretend", json.loads(json.dumps([record | {"host_lead_ms": 0.0} for record in seen])))
    line = step.__code__.co_firstlineno
    assert [(f.kind, f.line.line, f.count) for f in verdict.findings] == [("h2d", line + 1, 1), ("sync", line + 2, 1)]
    assert not any(f.line.file.startswith("/") for f in verdict.findings), "no folder of this machine"
