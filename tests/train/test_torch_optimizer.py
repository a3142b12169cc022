"""Any torch optimizer in a TrainStep equals the usual loop; Muon is torch's own Muon and AdamW beside each other."""

import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from gpubound import trace
from gpubound.errors import GraphError
from gpubound.train import AdamW, Muon, Schedule, TrainStep, adamw
from gpubound.train.adamw import orthogonal
from gpubound.train.graph_cache import GraphCache
from tests.messages import message, refusals

from .conftest import (
    Small,
    check_captured_skipped_and_resumed,
    cut,
    draw,
    named,
    run_spoiled,
    small,
    spoiled,
    summed,
    usual_step,
)
from .objectives.test_causal_lm import llama


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


def deep() -> Small:
    """Matrices of three shapes, two of one of them."""
    model = small(tied=False)
    model.mix = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(24, 8))
    return model


CONFIG = Muon(lr=2e-2, weight_decay=0.1, rest=AdamW(lr=1e-2, weight_decay=0.05))


def of_mix(name, parameter):
    return name.startswith("mix") and parameter.dim() == 2


def test_torch_muon_and_adamw(monkeypatch):
    monkeypatch.setattr(adamw, "fast_bf16", lambda device: True)  # torch's own iterates in bf16 on any device
    model = deep()
    theirs, start = copy.deepcopy(model), named(model)
    taken = [p for name, p in theirs.named_parameters() if of_mix(name, p)]
    rest = [p for name, p in theirs.named_parameters() if not of_mix(name, p)]
    matrices = torch.optim.Muon(taken, lr=2e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [p for p in rest if p.dim() > 1]}, {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)
    config = Muon(lr=2e-2, takes=of_mix, rest=AdamW(lr=1e-2, weight_decay=0.05))
    step = TrainStep(model, summed, config, accumulate=2, clip=0.5, precision="fp32", graph="off")
    for i in range(5):
        usual_step(theirs, draw(8, seed=i), matrices, adam)
        step(cut(draw(8, seed=i), 2))
    for (name, got), want in zip(model.named_parameters(), theirs.parameters()):
        moved = (want - start[name]).norm()
        # The iterations in bf16 turn the last bit of a gradient into 2 % of an update: torch's own do, fed g and 0.37 g.
        assert (got - want).norm() <= (1e-1 if of_mix(name, got) else 1e-3) * moved, name


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (8, 8)])
def test_one_update_is_torch_muons_bit_for_bit(shape, monkeypatch):
    monkeypatch.setattr(adamw, "fast_bf16", lambda device: True)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = nn.Parameter(torch.zeros(shape))
    theirs.grad = gradient.clone()
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    want = theirs.detach() / (-0.2 * 24**0.5 if 24 in shape else -0.2 * 8**0.5)
    assert torch.allclose(orthogonal(gradient[None], 5)[0].float(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_fp32_where_16_bits_are_slow(shape, monkeypatch):
    monkeypatch.setattr(adamw, "fast_bf16", lambda device: False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = orthogonal(x, 5)
    u, values, v = torch.linalg.svd(x.double() / x.double().norm(dim=(1, 2), keepdim=True), full_matrices=False)
    for _ in range(5):
        a, b, c = adamw.COEFFICIENTS
        values = a * values + b * values**3 + c * values**5
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), u @ torch.diag_embed(values) @ v, rtol=0, atol=1e-4)


def test_what_it_takes():
    model = llama(tied=True)
    chosen = CONFIG.chooser(model)
    assert {name.split(".")[-2] for name, p in model.named_parameters() if chosen(name, p)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not CONFIG.chooser(llama(tied=False))("lm_head.weight", model.lm_head.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_skipped_and_resumed(precision):
    def fresh(graph):
        model = deep()
        schedule = Schedule("linear", steps=9, warmup=2)
        return model, TrainStep(model, spoiled, CONFIG, clip=0.5, precision=precision, graph=graph, schedule=schedule)

    saved = check_captured_skipped_and_resumed(fresh)
    assert "v.mix.0.weight" not in saved and "m.mix.0.weight" in saved


def test_a_rate_set_by_hand_moves_both():
    """From ten times the rate set back to the configured one: the same update as never having changed it."""
    moved = []
    for ten in (False, True):
        model = deep()
        config = Muon(lr=2e-1, rest=AdamW(lr=1e-1)) if ten else Muon(lr=2e-2, rest=AdamW(lr=1e-2))
        step = TrainStep(model, summed, config, precision="fp32", graph="require")
        if ten:
            step.lr = 1e-2
        step(draw(4))
        moved.append(named(model))
    for name in moved[0]:
        assert torch.allclose(moved[0][name], moved[1][name], rtol=1e-6, atol=1e-8), name


@pytest.mark.gpu
def test_captured_on_the_gpu():
    torch.use_deterministic_algorithms(False)
    models = [deep().cuda() for _ in range(2)]
    steps = [TrainStep(m, summed, CONFIG, clip=0.5, graph=graph) for m, graph in zip(models, ("require", "off"))]
    for i in range(10):
        got, want = (step(tuple(t.cuda() for t in draw(4, seed=i))).read() for step in steps)
        assert got == want
    assert all(a.equal(b) for a, b in zip(*(model.parameters() for model in models)))


def test_memory_is_one_moment_less():
    model = nn.Linear(64, 64)
    step = TrainStep(model, summed, "muon", precision="bf16", graph="off")
    assert step.memory["moments"] == 4 * (64 * 64 + 64) + 4 * 64


def test_errors():
    refusals(
        "train/muon:errors",
        lambda: Muon(momentum=1.0),
        lambda: Muon(rest=AdamW(lr=0.0)),
        lambda: TrainStep(small(), summed, "muon", precision="bf16-pure"),
        lambda: TrainStep(small(), summed, "muon", precision="bf16-split"),
        lambda: TrainStep(small(), summed, Muon(takes=lambda name, p: "norm" in name)),
    )
