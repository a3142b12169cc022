"""Optimizer state in host memory, with the bits of one on the device; copies of a run's state on their way to the host."""

import threading
from contextlib import nullcontext

import pytest
import torch

from gpubound import trace
from gpubound.errors import GraphError
from gpubound.train import AdamW, AdamW8bit, Muon, TrainStep, adamw, offload
from gpubound.train.checkpoint import files as home
from gpubound.train.checkpoint.files import SPARE, Staging, fitting
from gpubound.train.recipe import Recipe
from gpubound.watch import watch
from tests.messages import message

from .conftest import draw, small, summed
from .test_backward_update import batch, decoder, spelled

OPTIONS = [
    {"precision": "fp32"},
    {"precision": "bf16"},
    {"precision": "bf16-split", "update_in_backward": True},
    {"precision": "bf16-split", "optimizer": AdamW8bit(lr=1e-2), "update_in_backward": True},
    {"precision": "fp16", "optimizer": AdamW8bit(lr=1e-2), "accumulate": 2, "clip": 0.1},
]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts so small that a tiny model has eight of them, the last a smaller one."""
    monkeypatch.setattr(adamw, "OFFLOADED_PART", 1 << 14)


def made(offloaded: bool, **options) -> TrainStep:
    options = {"optimizer": AdamW(lr=1e-2), "graph": "off"} | options
    return TrainStep(decoder(True), "next_token", **options, offload_optimizer=offloaded)


def take(step: TrainStep, seeds: range) -> list[float]:
    return [step([batch(seed + 100 * part) for part in range(step.accumulate)]).read().loss for seed in seeds]


def assert_same(one: TrainStep, other: TrainStep) -> None:
    here, there = one.state_dict(), other.state_dict()
    assert here.keys() == there.keys() and all(t.equal(there[name]) for name, t in here.items())
    assert all(p.equal(q) for p, q in zip(one.model.parameters(), other.model.parameters()))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "small_parts")
@pytest.mark.parametrize("options", OPTIONS, ids=spelled)
def test_the_numbers_are_those_of_a_step_with_its_state_on_the_device(options):
    steps = offloaded, kept = [made(flag, **options) for flag in (True, False)]
    assert take(offloaded, range(3)) == take(kept, range(3))
    assert_same(*steps)
    both = "masters", "moments"
    assert offloaded.host_memory == {name: kept.memory[name] for name in both} and not offloaded.memory.keys() & {*both}
    buffers = 2 * (1 << 14) * (8 + 4)
    assert 0 < offloaded.memory["buffers of offloaded state"] <= buffers


@pytest.mark.usefixtures("one_thread", "small_parts")
def test_a_state_passes_between_the_two():
    """Saved by one and loaded by the other; weights that are written between two steps reach masters in host memory."""
    first, second = made(True, precision="bf16"), made(False, precision="bf16")
    take(first, range(2))
    second.load_state_dict({name: t.clone() for name, t in first.state_dict().items()})
    second.model.load_state_dict(first.model.state_dict())
    for step in (first, second):
        with torch.no_grad():
            step.model.lm_head.weight[0].fill_(0.5)
        take(step, range(2, 4))
    assert_same(first, second)


@pytest.mark.usefixtures("small_parts")
def test_the_host_waits_for_no_part(sim):
    """On the pretend device: a step reads nothing, and copies from and to pinned memory alone."""
    ids, device = torch.arange(8).view(2, 4), sim
    step = TrainStep(small().to(device), summed, AdamW(lr=1e-2), graph="off", offload_optimizer=True)
    inputs = ids.to(device), ids.to(device)
    step(inputs)
    with watch() as ledger:
        step(inputs)
    found = ledger.as_dict()["totals"]
    report, passed = 7 * 8, sum(step.host_memory.values())
    assert (found["syncs"], found["pageable_copies"], found["fallbacks"]) == (0, 0, 0)
    assert (found["h2d_bytes"], found["d2h_bytes"]) == (passed, passed + report)


def test_a_micro_batch_is_captured_and_the_update_is_not():
    steps = [TrainStep(small(), summed, AdamW(lr=1e-2), graph="require", offload_optimizer=flag) for flag in (True, False)]
    for step in steps:
        for seed in range(3):
            step(draw(4, seed))
    assert_same(*steps)
    assert [[graph.name for graph in step.captured] for step in steps] == [["micro_batch"], ["micro_batch", "update"]]


def test_what_cannot_be_offloaded_is_refused(monkeypatch):
    for optimizer in (Muon(), torch.optim.SGD):
        with pytest.raises(ValueError, match=r"offload_optimizer.*AdamW or AdamW8bit"):
            made(True, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"one process"):
        offload.check(AdamW(), False)
    with pytest.raises(ValueError, match=r"ema.*offload_optimizer"):
        Recipe(offload_optimizer=True, ema=0.99)
    step = made(True, precision="fp32", update_in_backward=True, graph="require")
    with pytest.raises(GraphError, match="in host memory"):
        step(batch(0))
    monkeypatch.setattr(offload, "host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"host memory, of which 1\.0 kB are free.*AdamW8bit"):
        made(True)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True], ids=["after", "in_backward"])
@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2), AdamW8bit(lr=1e-2)], ids=lambda config: type(config).__name__)
def test_through_pinned_memory_on_the_gpu(early, optimizer, monkeypatch):
    """Parts in flight on three streams: the bits of a step that keeps its state on the GPU, in gradients without noise."""
    monkeypatch.setattr(adamw, "OFFLOADED_PART", 1 << 16)
    torch.manual_seed(0)

    def weighted(model, gradients):
        return sum((p.float() * g).sum() for p, g in zip(model.parameters(), gradients)), 1

    states = []
    for offloaded in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6))).cuda()
        options = {"precision": "bf16-split", "graph": "off", "update_in_backward": early}
        step = TrainStep(model, weighted, optimizer, **options, offload_optimizer=offloaded)
        generator = torch.Generator("cuda").manual_seed(1)
        for _ in range(12):  # launched at once: a part's next load must wait for its last store
            step(tuple(torch.randn(p.shape, generator=generator, device="cuda") for p in model.parameters()))
        states.append({name: t.cpu().clone() for name, t in step.state_dict().items()})
        if offloaded:
            assert step._optimizer.moments[0].is_pinned() and step._optimizer.moments[0].device.type == "cpu"
    assert states[0].keys() == states[1].keys() and all(t.equal(states[1][name]) for name, t in states[0].items())


@pytest.mark.gpu
def test_a_micro_batch_is_captured_and_the_update_is_launched():
    step = TrainStep(decoder(True).cuda(), "next_token", AdamW(lr=1e-2), graph="require", offload_optimizer=True)
    losses = [step({name: t.cuda() for name, t in batch(0).items()}).read().loss for _ in range(8)]
    assert [graph.name for graph in step.captured] == ["micro_batch"] and losses[-1] < losses[0] - 1


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
