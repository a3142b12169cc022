"""A run while it goes on: what the machine says, the line of a terminal and of a log, and a throughput that falls."""

import re
import sys
import types
from io import StringIO

import pytest
import torch
from rich.console import Console

from gpubound.monitor import LiveLine, RunTape, write_report
from gpubound.monitor.figures import Figures, Throughput
from gpubound.monitor.live import Gauges, _Chip, check_log, open_log
from tests.messages import message, refusal

CPU = torch.device("cpu")


class FakeNvml:
    """NVML as Gauges uses it: 312.5 W, and SMs that were busy for 40 points more at each sample."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_SM_UTIL = 1, 2

    def __init__(self, supported=True, power=312_500):
        self.supported, self.power, self.clock, self.freed, self.closed = supported, power, 0, [], False

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.power is None:
            raise self.NVMLError("Not Supported")
        return self.power

    def nvmlGpmQueryDeviceSupport(self, handle):
        return types.SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self):
        return types.SimpleNamespace(at=None)

    def nvmlGpmSampleGet(self, handle, sample):
        self.clock += 40
        sample.at = self.clock

    def c_nvmlGpmMetricsGet_t(self):
        return types.SimpleNamespace(metrics=[types.SimpleNamespace()])

    def nvmlGpmMetricsGet(self, asked):
        assert asked.numMetrics == asked.version == 1 and asked.metrics[0].metricId == 2
        asked.metrics[0].value = float(asked.sample2.at - asked.sample1.at)

    def nvmlGpmSampleFree(self, sample):
        self.freed.append(sample)

    def nvmlShutdown(self):
        self.closed = True


def test_power_and_the_sms_between_two_readings():
    nvml = FakeNvml()
    chip = _Chip(nvml, "handle")
    assert [chip.read() for _ in range(3)] == [{"power_w": 312.5, "sm_active": 0.4}] * 3
    chip.close()
    assert len(nvml.freed) == 2 and nvml.closed


def test_a_gpu_without_the_counters_gives_power_alone():
    assert _Chip(FakeNvml(supported=False), "handle").read() == {"power_w": 312.5}


def test_what_the_gpu_refuses_is_left_out_aloud_and_not_asked_again(said):
    nvml = FakeNvml(power=None)
    chip = _Chip(nvml, "handle")
    assert chip.read() == {"sm_active": 0.4}
    assert said() == message("monitor/live:what_the_gpu_refuses_is")
    nvml.power = 100_000
    assert chip.read() == {"sm_active": 0.4}


def test_at_most_once_a_period():
    with Gauges(CPU, period=3600) as gauges:
        assert gauges.read().keys() == {"memory_bytes"} and gauges.read() == {}
    with Gauges(CPU, period=0) as gauges:
        first, second = gauges.read()["memory_bytes"], gauges.read()["memory_bytes"]
    assert 100e6 < first <= second < 100e9, "bytes: torch alone is some hundred million"


@pytest.mark.gpu
def test_a_real_gpu(device):
    with Gauges(device, period=0) as gauges:
        gauges.read()
        a = torch.randn(4096, 4096, device=device)
        for _ in range(200):
            a @ a
        torch.cuda.synchronize()
        found = gauges.read()
    peak, allocated, reserved = (found[f"memory_{kind}bytes"] for kind in ("", "allocated_", "reserved_"))
    assert min(peak, reserved) >= allocated >= a.nbytes, "the peak is the process's, and may be of memory given back since"
    assert 20 < found["power_w"] < 2000
    assert "sm_active" not in found or 0 < found["sm_active"] <= 1


def shown(steps: int, records, title="demo", **console) -> str:
    out = StringIO()
    with LiveLine(steps, title, Console(file=out, **{"width": 200} | console)) as live:
        for record in records:
            live.show(record)
    return out.getvalue()


def test_what_is_measured_seldom_stays_in_the_line():
    text = shown(10, [{"step": 1, "loss": 3.0, "memory_bytes": 5e8, "held_out": 3.25}, {"step": 2, "loss": 2.0}])
    assert text.splitlines()[-1] == message("monitor/live:what_is_measured_seldom")


def test_another_phase_has_another_held_out_loss():
    books = [{"step": 4, "loss": 3.0, "held_out": 3.25, "phase": "books"}, {"step": 5, "loss": 2.0, "phase": "books"}]
    assert shown(10, [*books, {"step": 6, "loss": 1.0, "phase": "chats"}]).splitlines() == [
        message("monitor/live:another_phase_has_anothe"),
        message("monitor/live:another_phase_has_anothe.2"),
        message("monitor/live:another_phase_has_anothe.3"),
    ]


def test_the_first_step_of_a_resumed_run_is_shown():
    lines = shown(100, [{"step": step, "loss": 2.0} for step in range(57, 63)]).splitlines()
    assert lines == ["demo 57/100  loss 2.000", "demo 60/100  loss 2.000"]


def test_on_a_terminal_of_80_columns_the_bar_and_all_figures_are_seen():
    figures = {"loss": 3.21, "held_out": 3.5, "tokens_per_s": 192_000, "mfu": 0.494, "gpu_busy": 0.97, "power_w": 690}
    record = {"step": 1200, "phase": "pretrain", **figures, "memory_bytes": 2.37e10, "skipped": 1}
    text = shown(2000, [record], "first", force_terminal=True, width=80)
    bar, *below = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.split("\x1b[2K")[-1]).splitlines()
    assert bar.startswith("first ━") and "1200/2000" in bar
    assert " ".join(" ".join(below).split()) == message("monitor/live:on_a_terminal_of_80_colu")


def test_live_without_a_terminal_prints_ten_lines():
    records = [{"step": step, "loss": 2.0, "tokens_per_s": 192_400, "syncs": 0} for step in range(1, 101)]
    lines = shown(100, records).splitlines()
    assert len(lines) == 11 and lines[-1] == message("monitor/live:live_without_a_terminal")


RECORD = {"step": 7, "loss": 2.5, "lr": 1e-3}


def library(name, **functions):
    module = types.ModuleType(name)
    for function, does in functions.items():
        setattr(module, function, does)
    return module


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_get_the_config_and_each_record(tmp_path, monkeypatch, capsys, kind):
    calls = []
    note = lambda what: lambda *a, **k: (calls.append((what, a, k)), what == "log" or print(what))  # noqa: E731
    monkeypatch.setitem(sys.modules, kind, library(kind, init=note("init"), log=note("log"), finish=note("finish")))
    with open_log(kind, tmp_path, "first", {"lr": 1e-3}) as log:
        log(RECORD)
    where = {"dir": str(tmp_path)} if kind == "wandb" else {}
    assert calls == [
        ("init", (), {"project": "gpubound", "name": "first", "config": {"lr": 1e-3}, **where}),
        ("log", ({"loss": 2.5, "lr": 1e-3},), {"step": 7}),
        ("finish", (), {}),
    ]
    assert capsys.readouterr() == ("", "init\nfinish\n"), "stdout is for --json"


def test_tensorboard_gets_scalars(tmp_path, monkeypatch):
    written, closed = [], []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            closed.append(True)

    monkeypatch.setitem(sys.modules, "tensorboard", library("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library("torch.utils.tensorboard", SummaryWriter=SummaryWriter))
    with open_log("tensorboard", tmp_path, "first", {}) as log:
        log(RECORD)
    assert written == [("loss", 2.5, 7), ("lr", 1e-3, 7)] and closed == [True]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_named(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    assert refusal(ValueError, lambda: check_log(kind)) == message("monitor/live:a_missing_library_is_nam", kind)


def test_no_logger_is_none(tmp_path):
    with open_log(None, tmp_path, "first", {}) as log:
        log(RECORD)
    assert not list(tmp_path.iterdir())


FAST = 1216.0


def run(*parts, tokens=512):
    """Records of (number of steps, tokens per second[, phase]) one after another."""
    paces = [(pace, *phase) for count, pace, *phase in parts for _ in range(count)]
    return [
        {"step": step, "tokens": tokens, "tokens_per_s": pace, "seconds": tokens / pace, "loss": 2.0}
        | ({"phase": phase[0]} if phase else {})
        for step, (pace, *phase) in enumerate(paces, 1)
    ]


def slow_blocks(records):
    throughput, found = Throughput(), []
    for record in records:
        if throughput.add(record):
            found.append(throughput.slow)
    return found, throughput


@pytest.mark.parametrize(
    "records",
    [
        run((800, FAST)),
        run((60, FAST / 20), (740, FAST)),  # a slow start: compilation, a cold cache
        run(*[(1, FAST / 50), (9, FAST)] * 60),  # an evaluation every tenth step
        run((300, FAST), (8, FAST / 30), (300, FAST)),  # a checkpoint
        run((20_000, 1e6), (30, 1e4), (20_000, 1e6), tokens=5_000),  # 15 s of slow steps among steps of 5 ms
        run((300, FAST, "short"), (300, FAST / 4, "long")),  # another sequence length
        run((300, FAST), (300, FAST * 0.6)),
        run((30, FAST), (15, FAST / 18)),  # ends before a whole block was slow
        [{"step": step, "tokens_per_s": "nan"} for step in range(100)],
    ],
    ids=["steady", "start", "evaluation", "checkpoint", "short-steps", "phases", "less-than-half", "end", "nan"],
)
def test_no_alarm(records):
    found, throughput = slow_blocks(records)
    assert not found and throughput.worst is None


@pytest.mark.parametrize("share", [0.5, 1 / 18])
def test_a_fall_by_half_is_found_within_two_blocks(share):
    (block,), throughput = slow_blocks(run((390, FAST), (200, FAST * share)))
    assert 390 - 48 < block.first <= 391 + 48 and block.last <= 390 + 2 * 48
    assert block.best == FAST and FAST * share <= throughput.worst.tokens_per_s <= FAST * 0.5


def test_each_fall_is_reported_once_and_ends_when_the_speed_is_back():
    found, throughput = slow_blocks(run((400, FAST), (200, FAST / 4), (400, FAST), (200, FAST / 8)))
    assert len(found) == 2 and throughput.worst.tokens_per_s == FAST / 8 and throughput.slow is not None


def test_the_report_and_the_live_line_warn(tmp_path):
    records = run((390, FAST), (110, 68.0))
    tape, out = RunTape.create(tmp_path, name="busy machine"), StringIO()
    with LiveLine(len(records), "demo", Console(file=out, width=200)) as live:
        for record in records:
            tape.append(record)
            live.show(record)
    (warning,) = Figures(tape).warnings
    assert "1.22k" in warning and "68" in warning and "1.22k" in write_report([tape]).read_text()
    lines = out.getvalue().splitlines()
    slow = [int(line.split()[1].split("/")[0]) for line in lines if "SLOW" in line]
    assert len(lines) == 12, "a tenth of the run each, the first step, and the step that completed the first slow block"
    assert 390 < slow[0] < 440 and slow[1:] == [450, 500]
