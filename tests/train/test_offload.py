"""Optimizer state in host memory: the bits of a step that has it on the device, whatever the parts; saved, loaded, refused."""

import pytest
import torch

from gpubound.errors import GraphError
from gpubound.train import AdamW, AdamW8bit, Muon, TrainStep, adamw, offload
from gpubound.watch import watch

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
