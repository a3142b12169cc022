"""Peaks by phase on a pretended allocator, and the sentence of an out-of-memory error."""

import pytest
import torch

from gpubound.errors import DeviceError
from gpubound.measure.memory_phases import MemoryPhases, Peak


class Allocator:
    """The statistics that torch keeps of a GPU."""

    def __init__(self, monkeypatch):
        self.now = self.peak = self.reserved = self.peak_reserved = 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: self.reset())
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(cuda, "max_memory_reserved", lambda device: self.peak_reserved)

    def reset(self):
        self.peak, self.peak_reserved = self.now, self.reserved

    def takes(self, size):
        self.now += size
        self.reserved = max(self.reserved, self.now)
        self.peak, self.peak_reserved = max(self.peak, self.now), max(self.peak_reserved, self.reserved)


@pytest.fixture
def allocator(monkeypatch):
    monkeypatch.setattr("gpubound.measure.memory_phases.total_bytes", lambda device: 80 * 10**9)
    return Allocator(monkeypatch)


def test_each_phase_has_its_own_peak_also_inside_of_another(allocator):
    phases = MemoryPhases(torch.device("cuda", 0))
    with phases("place"):
        allocator.takes(5), allocator.takes(-3)
    with phases("steps"):
        with phases("first step"):
            allocator.takes(10), allocator.takes(-9)
        allocator.takes(2), allocator.takes(-2)
    assert phases.peaks == {"place": Peak(5, 5), "first step": Peak(12, 12), "steps": Peak(5, 12)}
    with phases("place"):
        allocator.takes(1)
    assert phases.peaks["place"] == Peak(5, 12), "the largest of two counts"
    phases.predicted = {"steps": 6}
    assert phases.rows()[::2] == [
        {"phase": "place", "allocated": 5, "reserved": 12, "predicted": 0},
        {"phase": "steps", "allocated": 5, "reserved": 12, "predicted": 6},
    ]


def test_an_error_names_the_phase_and_the_largest_holders_first(allocator):
    phases = MemoryPhases(torch.device("cuda", 0))
    phases.known = {"weights": 10**9, "moments": 4 * 10**9, "masters": 0}
    with pytest.raises(DeviceError) as error, phases("first step"):
        allocator.takes(7 * 10**9)
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    text = str(error.value)
    facts = "first step", "7.0 GB", "80.0 GB", "moments 4.0 GB", "activations and all else 2.0 GB", "weights 1.0 GB"
    assert all(fact in text for fact in facts) and "masters" not in text
    assert sorted(facts[3:], key=text.index) == list(facts[3:])


def test_other_errors_pass_and_a_cpu_is_not_measured(allocator):
    with pytest.raises(KeyError), MemoryPhases(torch.device("cuda", 0))("place"):
        raise KeyError
    phases = MemoryPhases(torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError), phases("place"):
        raise torch.OutOfMemoryError
    assert phases.peaks == {}
