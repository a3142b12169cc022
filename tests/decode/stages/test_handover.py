"""In which streams a lane goes from device to device. What CUDA would be asked is written down here; test_gpu.py asks it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gpubound.decode.placement import pipeline as graphs
from gpubound.decode.placement.pipeline import Handover

Stream = tuple[int, str]  # (device, name)


class RecordedCuda:
    """torch.cuda of two devices, of whose streams it notes what is asked. "null": the default ones."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.current: dict[int, Stream] = {0: (0, "null"), 1: (1, "null")}

    def Stream(self, device: int) -> SimpleNamespace:
        made: Stream = (device, "own")
        return SimpleNamespace(at=made, wait_event=lambda event: self.asked.append(("wait", made, event.recorded)))

    def Event(self) -> SimpleNamespace:
        event = SimpleNamespace(recorded=None)
        event.record = lambda stream: setattr(event, "recorded", stream.at)
        return event

    def current_stream(self, device: int) -> SimpleNamespace:
        now = self.current[device]
        return SimpleNamespace(at=now, wait_event=lambda event: self.asked.append(("wait", now, event.recorded)))

    @contextmanager
    def stream(self, chosen: SimpleNamespace):
        device, before = chosen.at[0], self.current[chosen.at[0]]
        self.current[device] = chosen.at
        yield
        self.current[device] = before

    def copy(self) -> None:
        self.asked.append(("copy", self.current[0], self.current[1]))


@pytest.fixture
def cuda(monkeypatch) -> RecordedCuda:
    recorded = RecordedCuda()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(graphs.torch.cuda, name, getattr(recorded, name))
    return recorded


def place(device: int) -> Handover:
    made = Handover(2, 3, torch.device("cpu"))
    made.copies = graphs.CopyStream(device)
    return made


def test_a_copy_lies_in_no_default_stream_and_waits_for_its_own_lane_alone(cuda, monkeypatch):
    here, there = place(0), place(1)
    cuda.asked.clear()
    copied = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, *given, **how: (cuda.copy(), copied(to, *given))[1])
    here.flat.fill_(7)
    here.send(there)
    assert cuda.asked == [("wait", (0, "own"), (0, "null")), ("copy", (0, "own"), (1, "own"))]
    assert there.copies.arrived.recorded == (1, "own") and there.flat.eq(7).all()
    assert set(cuda.current.values()) == {(0, "null"), (1, "null")}


def test_nothing_arrives_before_the_memory_is_zero(cuda):
    place(1)
    assert cuda.asked == [("wait", (1, "own"), (1, "null"))]
