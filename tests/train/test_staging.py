"""Copies of a run's state on their way to the host: on the GPU where steps leave room, over the link where they do not."""

import threading
from contextlib import nullcontext

import pytest
import torch

from gpubound import trace
from gpubound.train.checkpoint import files as home
from gpubound.train.checkpoint.files import SPARE, Staging, fitting
from tests.messages import message

TOTAL = 1 << 37


@pytest.fixture
def memory(monkeypatch):
    """A GPU's memory as a test wants it: bytes free at present, and how often the allocator has taken memory back."""
    now = {"free": TOTAL // 2, "unused": 0, "num_alloc_retries": 0}
    now |= {"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (now["free"], TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: now)
    monkeypatch.setattr(home, "free_bytes", lambda device: now["free"])
    monkeypatch.setattr(home, "usable_bytes", lambda device: now["free"] + now["unused"])
    monkeypatch.setattr(trace, "fallbacks", type(trace.fallbacks)())
    return now


def test_what_fits_is_taken_in_its_order():
    assert fitting({"a": 4, "b": 7, "c": 6, "d": 0}, 10) == {"a": 4, "c": 6, "d": 0}
    assert fitting({"a": 4}, 0) == {} and fitting({}, 10) == {}


def test_copies_take_what_was_free_before_there_were_any_and_leave_some(memory):
    staging, gpu = Staging(), torch.device("cuda", 0)
    assert staging._room_on(gpu) == TOTAL // 2 - TOTAL // SPARE
    memory["free"] = 0  # the copies of the last time are in the allocator's hands
    assert staging._room_on(gpu) == TOTAL // 2 - TOTAL // SPARE
    assert Staging()._room_on(gpu) == 0


def test_copies_make_way_where_the_allocator_has_taken_memory_back(memory):
    memory["num_alloc_retries"] = 5  # before there were any copies
    staging, gpu = Staging(), torch.device("cuda", 0)
    whole = staging._room_on(gpu)
    memory["num_alloc_retries"] = 7
    assert [staging._room_on(gpu), staging._room_on(gpu)] == [whole // 2, whole // 2]
    memory["num_alloc_retries"] = 8
    assert staging._room_on(gpu) == whole // 4


def test_what_steps_need_is_seen_where_somebody_waited_for_it_else_it_is_the_most_that_was_allocated(memory):
    memory |= {
        "free": TOTAL // 4,
        "unused": TOTAL // 4,
        "allocated_bytes.all.current": TOTAL // 4,
        "allocated_bytes.all.peak": TOTAL // 2 + TOTAL // 8,
    }
    gpu = torch.device("cuda", 0)
    assert Staging()._room_on(gpu, settled=True) == TOTAL // 4 - TOTAL // SPARE
    assert Staging()._room_on(gpu) == TOTAL // 8 - TOTAL // SPARE
    memory["allocated_bytes.all.peak"] = TOTAL  # while placing, say: no room that a step is known to leave
    assert Staging()._room_on(gpu) == 0


def given():
    made = {"one": torch.arange(1 << 20, device="cuda"), "two": torch.randn(1 << 21, device="cuda")}
    return made | {"turned": torch.randn(64, 33, device="cuda").t(), "host": torch.arange(5)}


def ready(staging):
    """What the thread beside the steps does."""
    thread = threading.Thread(target=staging.make_ready)
    thread.start()
    thread.join()


@pytest.mark.gpu
@pytest.mark.parametrize("room, here", [(1 << 30, {"one", "two", "turned"}), (1 << 23, {"one"}), (0, set())])
@pytest.mark.parametrize("expected", [True, False])
def test_what_finds_no_room_goes_to_the_host_at_once(memory, expected, room, here):
    """By way of a little pinned memory, until it has its own."""
    memory["free"] = TOTAL // SPARE + room
    staging, tensors = Staging(), given()
    there = tensors.keys() - here - {"host"}
    if expected:
        staging.expect(tensors)
        ready(staging)
    for number in range(2):
        wanted = {name: t.cpu().clone() for name, t in tensors.items()}
        copies = staging.take(tensors)
        for t in tensors.values():
            t.add_(1)  # the next step, behind the copies
        assert {name for name, t in copies.items() if t.is_cuda} == here
        assert all(copies[name].is_pinned() == (expected or number > 0) for name in there)
        got = staging.give(copies)
        assert all(torch.equal(got[name], wanted[name]) and not got[name].is_cuda for name in tensors)
        ready(staging)
    assert sum(trace.fallbacks.values()) == (0 if len(here) == 3 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
def test_copies_in_host_memory_take_none_of_the_device(last, memory):
    staging, tensors, before = Staging(), given(), torch.cuda.memory_allocated()
    copies = staging.take(tensors, to_host=True, last=last)
    assert torch.cuda.memory_allocated() - before < 1 << 16 and not any(t.is_cuda for t in copies.values())
    got = staging.give(copies)
    assert all(torch.equal(got[name], t.cpu()) for name, t in tensors.items())
    assert bool(staging._wanted) == (not last) and not trace.fallbacks


@pytest.mark.gpu
def test_another_shape_under_a_known_name(memory):
    memory["free"] = 0
    staging = Staging()
    for size in (5, 7, 7):
        tensor = torch.randn(size, device="cuda")
        assert torch.equal(staging.give(staging.take({"one": tensor}))["one"], tensor.cpu())
        ready(staging)


@pytest.mark.gpu
def test_no_memory_after_all(memory, monkeypatch):
    """As where another process takes it between the question and the copy."""

    def none(self, *args, **options):
        raise torch.OutOfMemoryError("no room")

    staging, tensors = Staging(), given()
    wanted = {name: t.cpu() for name, t in tensors.items() if t.is_cuda}
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", none)
        copies = staging.take({name: tensors[name] for name in wanted})
    got = staging.give(copies)
    assert all(not copies[name].is_cuda and torch.equal(got[name], wanted[name]) for name in wanted)
    assert staging._room_on(torch.device("cuda", 0)) == 0


def test_a_host_that_pins_no_memory_is_told_of_once(memory, monkeypatch):
    def full(*args, **options):
        raise RuntimeError("CUDA error: out of memory\nand advice")

    staging = Staging()
    staging._wanted = {"one": (torch.Size([4]), torch.float32), "two": (torch.Size([4]), torch.float32)}
    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    staging.make_ready()
    (said,) = trace.fallbacks
    assert message("train/staging:a_host_that_pins_no_memo").within(said[1])
    assert not staging._wanted and not staging._pinned
