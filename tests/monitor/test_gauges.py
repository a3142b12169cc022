"""The gauges give what the machine has, at most once a period, and drop what it refuses, aloud."""

import types

import pytest
import torch

from gpubound import trace
from gpubound.monitor.gauges import Gauges, _Chip

CPU = torch.device("cpu")


class FakeNvml:
    """NVML as gauges.py uses it: 312.5 W, and SMs that were busy for 40 points more at each sample."""

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


def test_what_the_gpu_refuses_is_left_out_aloud_and_not_asked_again(capsys, monkeypatch):
    monkeypatch.setattr(trace, "_said", set())
    nvml = FakeNvml(power=None)
    chip = _Chip(nvml, "handle")
    assert chip.read() == {"sm_active": 0.4}
    assert capsys.readouterr().err == "gpubound: power_w is left out: NVML says Not Supported.\n"
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
