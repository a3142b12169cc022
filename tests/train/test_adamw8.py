"""The trainer with 8-bit moments: a quarter of the bytes, AdamW's curve, skipped, certified, and resumed bit for bit."""

import sys
from functools import partial

import pytest
import torch

from gpubound.errors import GraphError
from gpubound.graph.memory import CopyBudget, StorageCopy
from gpubound.graph.runner import EagerRunner
from gpubound.kernels.adamw import decode
from gpubound.trace import hooked
from gpubound.train import AdamW, AdamW8bit, Muon, Schedule, TrainStep
from gpubound.train.accumulate import matrices
from gpubound.train.adamw import QuantisedMoment, quantised_bytes
from tests.messages import message, refusal, refusals

from .conftest import check_captured_skipped_and_resumed, cut, draw, run_spoiled, small, spoiled, summed

BETAS = (0.9, 0.95)


def wide():
    """Groups of some thousand weights, so that scales and the filling of the last block are few."""
    return small(words=13, width=64, tied=False)


def test_the_moments_take_a_quarter():
    state = {}
    for optimizer in ("adamw", "adamw8bit"):
        step = TrainStep(wide(), summed, optimizer, precision="bf16", graph="off")
        moments = {n: t for n, t in step.state_dict().items() if n.startswith(("m.", "v.", "scale."))}
        state[optimizer] = sum(t.nbytes for t in moments.values())
        held = sum(t.untyped_storage().nbytes() for t in step._optimizer.moments)
        assert step.memory["moments"] == held >= state[optimizer]
    assert 0.25 < state["adamw8bit"] / state["adamw"] < 0.26


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
def test_the_curve_is_adamws(precision):
    losses = []
    for config in (AdamW(lr=1e-2, betas=BETAS), AdamW8bit(lr=1e-2, betas=BETAS)):
        step = TrainStep(wide(), summed, config, clip=1.0, precision=precision, graph="off")
        losses.append(torch.tensor([step(draw(8)).read().loss for _ in range(30)]))
    exact, coarse = losses
    assert exact[-1] < 0.5 * exact[0]
    assert ((coarse - exact).abs() < 2e-3 * exact[0]).all(), "3e-4 in bf16, 7e-5 in fp32"


def fresh(precision, graph):
    model = small()
    schedule = Schedule("linear", steps=9, warmup=2)
    config = AdamW8bit(lr=1e-2, betas=BETAS)
    return model, TrainStep(model, spoiled, config, clip=0.5, precision=precision, graph=graph, schedule=schedule)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "bf16-split"])
def test_captured_skipped_and_resumed(precision):
    saved = check_captured_skipped_and_resumed(partial(fresh, precision))
    assert saved["m.mix.weight"].dtype == torch.int8 and saved["v.mix.weight"].dtype == torch.uint8
    assert saved["m.mix.weight"].shape == small().mix.weight.shape


def test_a_certificate_compares_numbers_not_codes():
    """Just either side of zero, codes lie 2 of 127 apart and what they stand for 4e-6 of the block's largest."""
    moment = QuantisedMoment(torch.zeros(quantised_bytes(300), dtype=torch.uint8), 300, torch.int8)
    moment.codes[:2], moment.codes[2:], moment.scales[:] = torch.tensor([127, 1]), 9, torch.tensor([2.0, 0.5])
    kept = StorageCopy(moment.codes, "m", CopyBudget(torch.device("cpu")))
    moment.codes[1] = -1
    found = kept.difference()
    assert not found.bitwise and found.relative == pytest.approx(2 * 8.0**-6)
    moment.scales[0] = 1.0
    assert kept.difference().relative == pytest.approx(0.5)
    again = StorageCopy(kept.tensor, "m", CopyBudget(torch.device("cpu")))
    moment.codes[0] = 0
    assert again.difference().relative == pytest.approx(1.0)


def test_a_graph_that_forgets_the_moments_is_refused(monkeypatch):
    """Its replay leaves the codes as they were."""
    _, step = fresh("fp32", "require")
    own = EagerRunner.replay

    def forgetful(runner):
        before = [t.clone() for t in step._optimizer.moments]
        own(runner)
        for tensor, old in zip(step._optimizer.moments, before):
            tensor.copy_(old)

    monkeypatch.setattr(EagerRunner, "replay", forgetful)
    with pytest.raises(GraphError, check=message("train/adamw8:a_graph_that_forgets_the")):
        run_spoiled(step, 0, 1)


def test_the_state_of_another_optimizer_is_refused():
    coded, plain = (TrainStep(small(), summed, which, precision="fp32", graph="off") for which in ("adamw8bit", "adamw"))
    for one, other in ((coded, plain), (plain, coded)):
        with pytest.raises(ValueError, match=r"load_state_dict: (places|scale\.[mv]\.0): got "):
            one.load_state_dict(other.state_dict())


def test_errors():
    assert refusal(ValueError, lambda: AdamW8bit(lr=-1)) == message("train/adamw8:errors")
    refusals("train/adamw8:errors.2", lambda: TrainStep(small(), summed, Muon(rest=AdamW8bit()), precision="fp32"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "bf16-split"])
def test_captured_is_eager_bit_for_bit_on_the_gpu(precision):
    torch.use_deterministic_algorithms(False)
    models = [wide().cuda() for _ in range(2)]
    steps = [
        TrainStep(model, summed, AdamW8bit(lr=1e-2), accumulate=2, clip=0.5, precision=precision, graph=graph)
        for model, graph in zip(models, ("require", "off"))
    ]
    for i in range(10):
        got, want = (step([tuple(t.cuda() for t in part) for part in cut(draw(4, seed=i), 2)]).read() for step in steps)
        assert got == want
    assert all(a.equal(b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    assert steps[0].state_dict()["m.mix.weight"].equal(steps[1].state_dict()["m.mix.weight"])


def read(step, kind):
    """A moment's numbers, by parameter."""
    moments = {"m": step._optimizer.m8, "v": step._optimizer.v8}[kind]
    slots = [(slot, group) for group in moments for slot in step._weights.layout.slots_of(group)]
    return {slot.name: slot.view(decode(moments[group].codes, moments[group].scales), group.start) for slot, group in slots}


def test_a_state_goes_on_where_parameters_lie_otherwise():
    """Without decay they lie in another order, so other numbers share a scale: one moves by half a step of its code at most.
    QuantisedMoment again among those that it was coded with, it stays."""
    here, there, again = (
        TrainStep(wide(), summed, AdamW8bit(lr=1e-2, decays=decays), precision="fp32", graph="off")
        for decays in (matrices, lambda name, p: p.dim() == 1, matrices)
    )
    for number in range(3):
        here(draw(number))
    state = here.state_dict()
    there.load_state_dict(state)
    again.load_state_dict(state | {"places": torch.nn.functional.pad(state["places"], (0, 1))})  # in other words
    for kind, steps in (("m", 64), ("v", 128)):
        was, moved, same = (read(step, kind) for step in (here, there, again))
        most = max(t.abs().max() for t in was.values())
        for name in was:
            assert was[name].any() and same[name].equal(was[name])
            assert (moved[name] - was[name]).abs().max() <= 0.51 * 7 / 8 / steps * most
        assert not all(moved[name].equal(was[name]) for name in was)
    del state["places"]
    with pytest.raises(ValueError, check=message("train/adamw8:a_state_goes_on_where_pa")):
        there.load_state_dict(state)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw", "muon"])
def test_an_updates_kernels_are_compiled_before_the_first_step(optimizer, monkeypatch):
    """By an update without its kernels, which changes nothing. Products of torch's in Muon's would."""
    asked = set()

    def without_kernel(_, op, *rest):
        asked.add(op)
        return lambda *tensors: (torch.ones(6), torch.ones(7))

    def ahead(call, device):
        with hooked(sys.modules[decode.__module__], "implementation", without_kernel):
            call()

    monkeypatch.setattr("gpubound.train.device_step.compile_ahead", ahead)
    step = TrainStep(small(), summed, optimizer, precision="bf16", graph="off")
    assert asked == {"adamw8bit": {"adamw8", "plan_update"}, "adamw": {"adamw", "plan_update"}, "muon": set()}[optimizer]
    assert step(draw(2)).read().updates == 1
