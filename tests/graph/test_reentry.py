"""What one caller at a time may use, and what a refused function has rebound, which stands where it stood."""

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

from gpubound.graph import capture
from gpubound.graph.guards import NotCopyable, ReentryGuard
from gpubound.graph.reachable import AccessPath, Reachable
from tests.messages import message

from .cases import drawn, said
from .test_certificate import peek


def test_one_caller_at_a_time_in_whatever_thread():
    turn, heard = ReentryGuard(KeyError, "busy"), []

    def other():
        try:
            with turn:
                heard.append("inside")
        except KeyError as error:
            heard.append(error.args[0])

    with turn:
        for call in (other, lambda: in_a_thread(other)):
            call()
        assert turn.taken
    in_a_thread(other)
    assert heard == ["busy", "busy", "inside"] and not turn.taken


def test_a_generator_may_end_in_another_thread_than_it_began():
    turn = ReentryGuard(KeyError, "busy")

    def taking():
        with turn:
            yield

    running = taking()
    next(running)
    in_a_thread(running.close)
    assert not turn.taken


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_is_made(make):
    class Step(NotCopyable):
        INSTEAD = "copy the model"

    with pytest.raises(TypeError, check=message("single:no_copy_is_made")):
        make(Step())


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Cell(nn.Module):
    """It rebinds all that it holds, and is refused for what it reads at last."""

    def __init__(self, read):
        super().__init__()
        self.read, self.last, self.table, self.length, self.calls = read, None, torch.zeros(1), 1, []
        self.register_buffer("mean", torch.zeros(3))
        self.pair, self.cache, self.rows = (torch.zeros(3), torch.ones(3)), {"keys": torch.zeros(3)}, [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.pair, self.cache["keys"], self.rows[0] = x * 2, (x * 3, x * 4), x * 5, x * 6
        self.cache["values"], self.mean = x * 7, x.mean(0).expand(3) * 8
        if self.length < len(x):
            self.table, self.length = torch.zeros(len(x)), len(x)
        self.calls.append(len(x))
        return self.read(self.last) + self.table


def of_the_host(x):
    return x * x.sum().item()


def test_what_it_held_is_there_again(runner):
    assert_there_again(Cell(of_the_host))


def test_where_the_certificate_fails(tape):
    assert_there_again(Cell(lambda x: x * peek(x)))


def assert_there_again(cell):
    before, cache, rows = dict(vars(cell)), dict(cell.cache), list(cell.rows)
    mean, values = cell.mean, copy.deepcopy(cell.state_dict())
    said(capture, cell, torch.ones(3))
    assert all(vars(cell)[name] is value for name, value in before.items()) and vars(cell).keys() == before.keys()
    assert cell.cache == cache and cell.rows == rows and cell.mean is mean
    assert all(torch.equal(value, cell.state_dict()[name]) for name, value in values.items())
    assert len(cell.calls) >= 3  # a list without tensors is somebody's account


def test_names_around_it(runner):
    kept, begun = torch.zeros(3), None

    def step(x):
        nonlocal kept, begun
        global WORN
        kept, begun, WORN = kept + x, x * 2, WORN + x
        return of_the_host(kept + WORN)

    before, worn = kept, WORN
    said(capture, step, torch.ones(3))
    assert kept is before and begun is None and WORN is worn


WORN = torch.zeros(3)


def test_moments_that_it_made(runner):
    """They had seen gradients of the watched calls, and went on from there."""
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return of_the_host(loss)

    said(capture, step, drawn(5, 4))
    assert not optimizer.state


def test_what_a_capture_that_holds_has_bound_stays(runner):
    class Last:
        value = None

        def step(self, x):
            self.value = x * 2
            return self.value + 1

    last = Last()
    captured = capture(last.step, torch.ones(3))
    captured(torch.full((3,), 4.0))
    assert last.value is not None


def test_no_path_is_made_to_numbers_and_to_objects_seen_before(monkeypatch):
    made, to = list[str](), AccessPath.to
    monkeypatch.setattr(AccessPath, "to", lambda path, label, *steps: made.append(label) or to(path, label, *steps))
    module = nn.Linear(2, 2)
    module.numbers, module.again, module.other = [*range(100), "name", None], [module, module], {"weight": module.weight}
    found = Reachable(lambda: module(torch.ones(2)), None)
    assert sorted(made) == sorted([".training", ".weight", ".bias", ".numbers", ".again", ".other", "['weight']"])
    assert [path.name for path, _ in found.tensors] == ["module.weight", "module.bias", "module.other['weight']"]
