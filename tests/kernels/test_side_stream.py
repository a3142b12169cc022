"""Weight gradients on a second stream: the order of waits, the bound on what is held, the same bits, joined on errors."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpubound.kernels import accumulate as module
from gpubound.kernels.accumulate import Side, aside, deliver, ensure_record, record_of, weight_gradient


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name, log):
        self.name, self.log, self.device, self.events = name, log, torch.device("cuda", 0), 0

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.events += 1
        return f"event {self.events}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *_):
        self.log.append(f"off {self.name}")


@pytest.fixture
def log(monkeypatch):
    """With streams that write what they are asked."""
    log = []
    main, side = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    return log


def on_a_side_stream(*weights, device=None):
    """A side stream, which these weights' deliveries take while it is open."""
    side = Side(device or torch.device("cuda", 0))
    for weight in weights:
        ensure_record(weight).side = side
    return side


def test_work_waits_for_what_it_reads_and_the_end_waits_for_the_work(log):
    weight = nn.Parameter(torch.ones(3))
    side = on_a_side_stream(weight)
    with side.open():
        aside(weight, lambda: log.append("work"), torch.ones(3))
    aside(weight, lambda: log.append("later"), torch.ones(3))
    assert log == ["side waits for main", "on side", "work", "off side", "main waits for side", "later"]


def test_no_more_is_held_than_allowed(log, monkeypatch):
    """Three readers of 400 bytes where 1000 may be held: before the first one's memory is let go, the main stream waits."""
    monkeypatch.setattr(module, "PENDING_BYTES", 1000)
    weight = nn.Parameter(torch.ones(3))
    side = on_a_side_stream(weight)
    with side.open():
        for _ in range(3):
            aside(weight, lambda: None, torch.ones(100))
        assert [line for line in log if "event" in line] == ["main waits for event 1"]
        assert len(side._pending) == 2
    assert not side._pending


def test_an_error_still_joins(log):
    weight = nn.Parameter(torch.ones(3))
    side = on_a_side_stream(weight)
    with pytest.raises(ZeroDivisionError), side.open():
        aside(weight, lambda: 1 / 0)
    assert log[-1] == "main waits for side"
    aside(weight, lambda: log.append("here"))
    assert log[-2:] == ["main waits for side", "here"]


def test_without_a_side_stream_nothing_changes():
    weight, done = nn.Parameter(torch.ones(3)), []
    aside(weight, lambda: done.append(1))
    ensure_record(weight).opening = None
    aside(weight, lambda: done.append(2))
    assert done == [1, 2] and record_of(weight).empty


@pytest.mark.gpu
def test_the_same_bits_and_no_reader_loses_its_memory(device, monkeypatch):
    """The factors are freed at once and their memory written over on the main stream while the side stream is at work."""
    monkeypatch.setattr(module, "PENDING_BYTES", 1 << 20)
    weight, norm = (nn.Parameter(torch.zeros(*s, device=device, dtype=torch.bfloat16)) for s in ((512, 512), (512,)))
    results = []
    for where in (None, device):
        weight.main_grad, norm.main_grad = torch.zeros(512, 512, device=device), torch.zeros(512, device=device)
        torch.manual_seed(0)
        with nullcontext() if where is None else on_a_side_stream(weight, norm, device=where).open():
            for _ in range(50):
                g, x = (torch.randn(2048, 512, device=device, dtype=torch.bfloat16) for _ in range(2))
                weight_gradient(weight, g, x)
                deliver(norm, g.float().sum(0))
                deliver(norm, x[0].float())
                del g, x
                torch.full((2048, 512), float("nan"), device=device, dtype=torch.bfloat16)
        results.append((weight.main_grad, norm.main_grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.gpu
def test_it_is_a_branch_of_a_captured_graph(device):
    weight = nn.Parameter(torch.zeros(256, 256, device=device, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(256, 256, device=device)
    g, x = (torch.randn(256, 256, device=device, dtype=torch.bfloat16) for _ in range(2))

    side = on_a_side_stream(weight, device=device)

    def call():
        with side.open():
            weight_gradient(weight, g * 2, x)

    call()
    weight.main_grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    graph.replay()
    torch.testing.assert_close(weight.main_grad, 4 * (g.float().t() @ x.float()), rtol=1e-2, atol=1.0)
