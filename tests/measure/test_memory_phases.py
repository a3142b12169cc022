"""Peaks by phase on a pretended allocator, and the sentence of an out-of-memory error."""

from collections import Counter

import pytest
import torch
from torch import nn

from gpubound.errors import DeviceError
from gpubound.measure.memory_phases import MemoryPhases, Peak, bytes_by_role


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


ALLOCATORS = (  # of a run within 16 GB
    "CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 78.08 GiB is free. "
    "Process 803 has 1.05 GiB memory in use. Including non-PyTorch memory, this process has 15.17 GiB memory in use. 14.30 GiB "
    "allowed; Of the allocated memory 13.34 GiB is allocated by PyTorch, with 4.36 GiB allocated in private pools (e.g., CUDA "
    "Graphs), and 977.98 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
)


def ran_out(phases: MemoryPhases, message: str) -> str:
    with pytest.raises(DeviceError) as error, phases("first step"):
        raise torch.OutOfMemoryError(message)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    return str(error.value)


def test_an_error_names_the_phase_and_the_largest_holders_first(allocator):
    phases = MemoryPhases(torch.device("cuda", 0))
    phases.known, phases.predicted = {"weights": 10**9, "moments": 4 * 10**9, "masters": 0}, {"first step": 12 * 10**9}
    text = ran_out(phases, ALLOCATORS)
    facts = (
        "first step",
        "14.3 GB",
        "80.0 GB",
        "activations and all else 4.6 GB",
        "graphs 4.7 GB",
        "moments 4.0 GB",
        "weights 1.0 GB",
    )
    others = "16.8 MB", "1.0 GB are cached", "939.5 MB", "12.0 GB were predicted"
    assert all(fact in text for fact in (*facts, *others)) and "masters" not in text, text
    assert sorted(facts[4:], key=text.index) == list(facts[4:])


def test_without_torch_s_figures_the_peak_is_explained(allocator):
    phases = MemoryPhases(torch.device("cuda", 0))
    phases.known = {"weights": 10**9}
    allocator.takes(3 * 10**9)
    text = ran_out(phases, "out of memory")
    assert "3.0 GB were allocated of 80.0 GB (activations and all else 2.0 GB, weights 1.0 GB)." in text


def test_modules_hold_weights_gradients_and_frozen_weights():
    """A storage of several parameters counts once, and what is on another device not at all."""
    stack = torch.zeros(2, 4, 8)
    q, k, norm, elsewhere = (
        nn.Linear(8, 4, bias=False),
        nn.Linear(8, 4, bias=False),
        nn.BatchNorm1d(4),
        nn.Linear(8, 4, device="meta"),
    )
    q.weight.data, k.weight.data = stack
    norm.requires_grad_(False)
    q.weight.grad = torch.zeros(4, 8)
    held = bytes_by_role(nn.ModuleList([q, k, norm, q, elsewhere]).modules(), torch.device("cpu"))
    assert held == {"weights": 4 * 64, "gradient": 4 * 32, "frozen weights": 4 * 16 + 8}


def test_the_live_modules_are_found(allocator, monkeypatch):
    model = nn.Linear(1, 1)
    seen = list[nn.Module]()
    monkeypatch.setattr("gpubound.measure.memory_phases.bytes_by_role", lambda modules, device: Counter(seen.extend(modules)))
    ran_out(MemoryPhases(torch.device("cuda", 0)), "out of memory")
    assert any(each is model for each in seen)


def test_other_errors_pass_and_a_cpu_is_not_measured(allocator):
    with pytest.raises(KeyError), MemoryPhases(torch.device("cuda", 0))("place"):
        raise KeyError
    phases = MemoryPhases(torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError), phases("place"):
        raise torch.OutOfMemoryError
    assert phases.peaks == {}
