"""Any torch optimizer in a TrainStep: equal to the usual loop, guarded, scheduled, saved, and refused in a sentence."""

import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch

from gpubound import trace
from gpubound.errors import GraphError
from gpubound.train import AdamW, Muon, Schedule, TrainStep
from gpubound.train.graph_cache import GraphCache
from tests.messages import message

from .conftest import cut, draw, named, run_spoiled, small, spoiled, summed, usual_step


class Signs(torch.optim.Optimizer):
    """A user's own: the sign of a momentum, its steps counted as a Python number, and a number in its group."""

    def __init__(self, params, lr=1e-3, keep=0.9):
        super().__init__(params, {"lr": lr, "keep": keep, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("m", torch.zeros_like(p)).mul_(group["keep"]).add_(p.grad)
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(group["lr"] * state["m"].sign() / state["steps"])


def apart(parameters):
    """Two groups with rates of their own."""
    matrices, rest = ([p for p in parameters if (p.dim() > 1) is wide] for wide in (True, False))
    return torch.optim.SGD([{"params": matrices, "lr": 0.05}, {"params": rest}], lr=0.2, momentum=0.9, dampening=0.5)


MAKES = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "a class": torch.optim.Adagrad,
    "groups": apart,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "a user's": partial(Signs, lr=1e-2),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_six_updates_are_the_usual_loops(make):
    """Mean loss over the whole batch, clip_grad_norm_, the schedule's factor on each group's rate, step."""
    model = small()
    theirs = copy.deepcopy(model)
    optimizer = make(list(theirs.parameters()))
    lrs = [group["lr"] for group in optimizer.param_groups]
    schedule = Schedule("linear", steps=8, warmup=2)
    step = TrainStep(model, summed, make, accumulate=3, clip=0.5, precision="fp32", schedule=schedule)
    for i in range(6):
        for group, lr in zip(optimizer.param_groups, lrs):
            group["lr"] = lr * schedule.factor(i + 1)
        _, norm = usual_step(theirs, draw(16, seed=i), optimizer)
        values = step(cut(draw(16, seed=i), 3)).read()
        assert values.grad_norm == pytest.approx(norm, rel=1e-4)
        assert values.lr == pytest.approx(max(lrs) * schedule.factor(i + 1)) and values.updates == i + 1
    for (name, got), want in zip(model.named_parameters(), theirs.parameters()):
        assert (got - want).norm() <= 1e-4 * want.norm(), name


def test_a_captured_step_does_not_guard_its_rates():
    """They change with the schedule, and the graph of the step does not contain the optimizer."""
    model = small()
    step = TrainStep(model, summed, partial(torch.optim.AdamW, lr=1e-2), schedule=Schedule("linear", steps=8), precision="fp32")
    step._graphs = GraphCache(step._graphs.step, "require")  # on a CPU the checks of capture() alone
    rates = [step([draw(8, seed=i)]).read().lr for i in range(4)]
    assert len(step.captured) == 2 and len(set(rates)) == 4 and step.state_dict()["state"][0] == 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_weights_have_fp32_masters_that_it_moves(precision):
    """Updates of 1e-5 would be lost in the weights' own 16 bits."""
    model = small()
    before = named(model)
    step = TrainStep(model, summed, partial(torch.optim.SGD, lr=1e-5), precision=precision, graph="off")
    for i in range(3):
        step([draw(16, seed=i)])
    state = step.state_dict()
    for name, p in model.named_parameters():
        master = state[f"master.{name}"]
        assert 0 < (master - before[name]).abs().max() < 1e-3 and torch.equal(p, master.to(p.dtype))


@pytest.mark.parametrize("make", [MAKES["adamw"], MAKES["a user's"]], ids=["adamw", "a user's"])
def test_a_step_that_is_not_finite_moves_nothing(make):
    model = small()
    step = TrainStep(model, spoiled, make, precision="fp32", graph="off")
    run_spoiled(step, 0, 2)
    weights, state = named(model), {name: t.clone() for name, t in step.state_dict().items()}
    run_spoiled(step, 2, 3)
    after = step.state_dict()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert state.keys() == after.keys() and after["state"][1] == 1
    assert all(torch.equal(after[name], state[name]) for name in state if name != "state")


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_state_resumes_bit_for_bit(make):
    """Saved after two steps, loaded into a step that has made none, and into one that went another way."""

    def fresh():
        model = small()
        return model, TrainStep(model, summed, make, precision="bf16", schedule=Schedule("cosine", steps=6), graph="off")

    model, step = fresh()
    for i in range(2):
        step([draw(8, seed=i)])
    state = {name: t.clone() for name, t in step.state_dict().items()}
    weights = copy.deepcopy(model.state_dict())
    want = [step([draw(8, seed=i)]).read() for i in (2, 3)]
    for wandered in (False, True):
        other, again = fresh()
        if wandered:
            again([draw(8, seed=9)])
        other.load_state_dict(weights)
        again.load_state_dict(state)
        assert [again([draw(8, seed=i)]).read() for i in (2, 3)] == want
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters()))


def test_a_rate_set_later_reaches_the_groups():
    model = small()
    step = TrainStep(model, summed, apart, precision="fp32", graph="off")
    assert step.lr == 0.2
    step.lr = 0.0
    before = named(model)
    step([draw(8)])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_scheduler_of_torch_is_refused_before_it_is_overruled(rate):
    """The step would set the rate back, and train at the first one for ever. One that is made and rests does no harm."""
    made = []

    def make(parameters):
        made.append(torch.optim.SGD(parameters, lr=rate))
        made.append(torch.optim.lr_scheduler.StepLR(made[0], 1, gamma=0.5))
        return made[0]

    model = small()
    step = TrainStep(model, summed, make, precision="fp32", graph="off")
    step([draw(8)])
    step([draw(8)])
    made[1].step()
    before, updates = named(model), step.state_dict()["state"][0].item()
    with pytest.raises(ValueError, check=message("train/foreign:a_scheduler_of_torch_is")):
        step([draw(8)])
    assert all(p.equal(before[name]) for name, p in model.named_parameters()) and step.state_dict()["state"][0] == updates


@pytest.mark.parametrize(
    "add", [lambda o, p: o.add_param_group({"params": [p]}), lambda o, p: o.param_groups[0]["params"].append(p)]
)
def test_what_is_added_to_its_groups_is_refused(add):
    made = []
    step = TrainStep(
        small(), summed, lambda ps: made.append(torch.optim.SGD(ps, lr=0.1)) or made[0], precision="fp32", graph="off"
    )
    add(made[0], torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, check=message("train/foreign:what_is_added_to_its_gro")):
        step([draw(8)])


def test_frozen_and_tied_weights_are_given_once():
    seen = []
    model = small()
    model.norm.requires_grad_(False)
    step = TrainStep(model, summed, lambda ps: seen.append(len(ps)) or torch.optim.SGD(ps, lr=0.1), precision="fp32")
    step([draw(8)])
    assert seen == [3]  # the tied table, the matrix and its bias


def test_what_no_graph_can_hold_is_said_once_a_step(monkeypatch):
    model = small()
    step = TrainStep(model, summed, partial(Signs, lr=1e-2), precision="fp32", graph="off")
    monkeypatch.setattr(step._optimizer, "_fallback", step._optimizer.config.why_not_captured)  # as on a GPU
    monkeypatch.setattr(trace, "fallbacks", Counter())
    for i in range(2):
        step([draw(8, seed=i)])
    (((what, why), count),) = trace.fallbacks.items()
    assert what == "train step: optimizer" and why.startswith("Signs runs call by call") and count == 2


class NeedsMore(Signs):
    def step(self, closure):
        raise AssertionError


REFUSED = {
    "a rate that is none": (lambda ps: Signs(ps, lr=float("nan")), "TrainStep: Signs: every param_group needs a finite lr"),
    "no optimizer": (
        lambda ps: None,
        "TrainStep: optimizer must make a torch.optim.Optimizer of a list of parameters, got a NoneT",
    ),
    "not all": (lambda ps: torch.optim.SGD(ps[1:], lr=0.1), "TrainStep: optimizer must hold the 5 parameters that it is given"),
    "a closure": (NeedsMore, "TrainStep: NeedsMore.step needs closure, which a TrainStep cannot give"),
    "LBFGS": (torch.optim.LBFGS, "TrainStep: LBFGS.step needs closure"),
}


@pytest.mark.parametrize("make, sentence", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_and_the_model_given_back(make, sentence):
    model = small()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        TrainStep(model, summed, make, precision="bf16")
    assert all(p.dtype == torch.float32 and not hasattr(p, "main_grad") for p in model.parameters())


def test_refusals_of_its_settings():
    made = torch.optim.SGD(small().parameters(), lr=0.1)
    with pytest.raises(ValueError, check=message("train/foreign:refusals_of_its_settings")):
        TrainStep(small(), summed, made)
    with pytest.raises(ValueError, match="take precision='bf16'"):
        TrainStep(small(), summed, torch.optim.SGD, precision="bf16-pure")
    with pytest.raises(GraphError, match=r"^TrainStep: Signs runs call by call"):
        TrainStep(small(), summed, Signs, precision="fp32", graph="require")
    step = TrainStep(small(), summed, torch.optim.SGD, precision="fp32", graph="off")
    other = TrainStep(small(), summed, torch.optim.Adam, precision="fp32", graph="off").state_dict()
    with pytest.raises(ValueError, check=message("train/foreign:refusals_of_its_settings.2")):
        step.load_state_dict(other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_rates_that_are_no_rates_are_refused_at_once(name, bad):
    with pytest.raises(ValueError, check=message("train/foreign:rates_that_are_no_rates")):
        AdamW(**{name: bad})
    if name != "eps":
        with pytest.raises(ValueError, check=message("train/foreign:rates_that_are_no_rates.2")):
            Muon(**{name: bad})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_on_a_gpu_it_follows_a_captured_step(device, options):
    """The weights are those of the uncaptured step; a step that is not finite moves nothing; a loaded state continues."""
    ends = []
    for graph in ("auto", "off"):
        model = small().to(device)
        step = TrainStep(model, spoiled, partial(torch.optim.AdamW, lr=1e-2, **options), precision="bf16", graph=graph)
        for i, factor in enumerate([1.0, 1.0, float("nan"), 1.0, 1.0]):
            step(tuple(t.to(device) for t in (*draw(8, seed=i), torch.tensor(factor))))
            step.load_state_dict({name: t.clone() for name, t in step.state_dict().items()})
        ends.append(named(model))
        assert step.state_dict()["state"][0] == 4
    for name, want in ends[1].items():
        torch.testing.assert_close(ends[0][name], want, rtol=2e-2, atol=1e-4)
