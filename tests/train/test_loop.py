"""The loop hands out each step's record one step late, times what the step took and nothing else, and stops between steps."""

import runpy
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpubound.distributed.ranks import Ranks
from gpubound.train import AdamW, TrainStep
from gpubound.train.loop import Stop
from gpubound.train.records import StepRecorder, rank_waits

from .conftest import draw, small, summed


class TimedStep:
    """Stands for a TrainStep on a CPU whose step takes half a second by a clock that the test moves."""

    device, captured = torch.device("cpu"), ()

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("gpubound.train.records.time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self, batches):
        self.now += 0.5
        return SimpleNamespace(read=lambda: SimpleNamespace(loss=1.0, grad_norm=2.0, lr=0.1, tokens=100.0, skipped=0))


def test_records_come_one_step_late_and_the_last_at_finish():
    model, seen = small(), []
    recorder = StepRecorder(TrainStep(model, summed, AdamW(1e-2), precision="fp32"), seen.append)
    batches = iter([draw(4, seed=n) for n in range(3)])
    for number in (1, 2, 3):
        recorder.launch(number, batches)
        assert [r["step"] for r in seen] == list(range(1, number))
    recorder.finish()
    recorder.finish()
    assert [r["step"] for r in seen] == [1, 2, 3], "finish twice hands out nothing twice"
    assert seen[0].keys() == {"step", "loss", "grad_norm", "lr", "tokens", "skipped"}, "the first step has no pace"
    assert seen[1].keys() - seen[0].keys() == {"seconds", "tokens_per_s"}
    assert seen[1]["tokens_per_s"] == seen[1]["tokens"] / seen[1]["seconds"]


def test_a_step_without_items_has_no_loss_in_its_record():
    seen = []
    recorder = StepRecorder(TrainStep(small(), summed, precision="fp32"), seen.append)
    ids, labels = draw(4)
    for number in (1, 2):
        recorder.launch(number, iter([(ids, torch.full_like(labels, -100))]))
    recorder.finish()
    assert all(record["tokens"] == 0 and record["skipped"] == 0 for record in seen)
    assert not any({"loss", "grad_norm"} & record.keys() for record in seen)


def test_what_is_noted_goes_into_the_newest_record(monkeypatch):
    seen = []
    recorder = StepRecorder(TimedStep(monkeypatch), seen.append)
    recorder.launch(1, None)
    recorder.note(held_out=3.5)
    recorder.launch(2, None)
    recorder.finish()
    assert [r.get("held_out") for r in seen] == [3.5, None]


def test_pace_is_from_end_to_end_and_leaves_an_evaluation_out(monkeypatch):
    """Between steps 1 and 2 the host is busy for a quarter of a second, which counts; then it evaluates, which does not."""
    step, seen = TimedStep(monkeypatch), []
    recorder = StepRecorder(step, seen.append)
    recorder.launch(1, None)
    step.now += 0.25
    recorder.launch(2, None)
    step.now += 60.0
    recorder.note()
    recorder.launch(3, None)
    recorder.finish()
    assert [r.get("seconds") for r in seen] == [None, 0.75, 0.5]
    assert [r.get("tokens_per_s") for r in seen] == [None, 100 / 0.75, 200.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert stop.asked is None
        signal.raise_signal(number)
        assert stop.asked == signal.Signals(number).name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.fixture
def heard():
    """What reaches the handler of Ctrl-C, a list instead of the suite's own, which may ignore it."""
    found: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *given: found.append(given))
    yield found
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def test_a_rank_that_heard_of_ctrl_c_from_another_takes_its_own_for_the_same(monkeypatch, heard):
    """On a busy machine it comes after the answer of the rank that had it first: inside the block, or behind it."""
    number = signal.SIGINT
    poll = SimpleNamespace(ranks=Ranks(rank=1, world=2), ask=lambda here: [number, here])
    monkeypatch.setattr("gpubound.train.loop.Poll", lambda ranks: poll)
    with Stop() as stop:
        assert stop.agreed() and stop.asked == "SIGINT"
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    with Stop() as stop:
        assert stop.agreed()
    signal.raise_signal(number)
    assert not heard, "the one that was under way still"
    signal.raise_signal(number)
    assert len(heard) == 1


def test_on_a_cpu_a_record_speaks_of_no_gpu():
    """A captured step has the same buffers and checks there, but neither graph nor GPU."""
    seen = []
    step = TrainStep(small(), summed, precision="fp32", graph="require")
    recorder = StepRecorder(step, seen.append)
    for number in range(1, 4):
        recorder.launch(number, draw(2))
    recorder.finish()
    assert step.captured and len(seen) == 3 and not any({"gpu_busy", "host_lead_ms"} & record.keys() for record in seen)


@pytest.mark.gpu
def test_on_a_gpu_a_record_holds_what_the_events_saw(device, monkeypatch):
    model, seen = small().to(device), []
    step = TrainStep(model, summed, AdamW(1e-2), precision="fp32")
    recorder = StepRecorder(step, seen.append)
    batch = tuple(t.to(device) for t in draw(4))
    monkeypatch.setattr("gpubound.train.records.WATCHED_EVERY", 10)
    for number in range(1, 21):
        recorder.launch(number, batch)
    recorder.finish()
    assert step.captured and all(0 < r["gpu_busy"] <= 1 and r["seconds"] > 0 and r["host_lead_ms"] >= 0 for r in seen[1:])
    counted = [r for r in seen if "syncs" in r]
    assert [r["step"] for r in counted] == [6, 16] and all(r["syncs"] == 0 and r["h2d_bytes"] == 0 for r in counted)


def test_the_slowest_rank_waits_least():
    """For the sums alone, as all do; what another waits longer, it waits for that rank."""
    found = rank_waits([0.030, 0.010, 0.0254], seconds=0.2)
    assert found == {
        "waited_ms": [30.0, 10.0, 25.4], "slowest_rank": 1, "held_up_ms": pytest.approx(20), "sums_share": pytest.approx(0.05),
    }  # fmt: skip
    assert "sums_share" not in rank_waits([0.1, 0.2], seconds=None), "the first step has no pace"
    assert rank_waits([], 0.2) == rank_waits([0.1, float("nan")], 0.2) == {}


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_step.py"


def test_train_step(capsys):
    script = runpy.run_path(str(EXAMPLE))
    main = script["main"]
    main.__globals__["STEPS"] = 6
    main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0].rstrip(",")) for line in lines]
    assert lines[-1].startswith("step   6") and losses[-1] < losses[0] - 0.2
