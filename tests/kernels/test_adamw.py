"""The update: both mirrors agree, the reference is torch's AdamW, the plan's every branch, random rounding, exact errors."""

import math

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.adamw import join_fp32, split_fp32
from gpubound.kernels.triton import adamw as fast
from tests.messages import refusals

from .cases import agree, definitions, draw, module, pairwise, same

reference = definitions("adamw")

SIZES = [1, 63, 4096, 5000]  # a block of the kernel is 4096
BETAS = (0.9, 0.95)
INF, NAN = float("inf"), float("nan")


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def planned(
    gradient: Tensor, state: Tensor, weight_decay=0.1, clip=None, loss=3.0, items=2.0, rates=(1e-2,), growth=0, by=kernels
):
    """(plan, report) by name of the slot; `state` moves on."""
    to = gradient.device
    totals, table = wide(loss, items).to(to), wide(*rates).to(to)
    if by is kernels:
        plan, report = kernels.plan_update(gradient, totals, state, table, BETAS, weight_decay, clip, growth)
    else:
        plan, report = by.plan_update(gradient, totals, state, table, BETAS, weight_decay, clip, growth)
    return plan, dict(zip(reference.REPORT, report.tolist()))


def state_of(n: int, dtype: torch.dtype, device, plan: Tensor, master: bool) -> tuple:
    """(weight, gradient, m, v, plan, master)"""
    gradient, m, v, whole = (draw(device, torch.float32, n, seed=seed) for seed in (0, 2, 3, 4))
    return draw(device, dtype, n, seed=1), gradient, m, v.square(), plan, whole if master else None


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("n", SIZES)
def test_plan_matches(n, clip, device):
    gradient, result = draw(device, torch.float32, n), []
    for by in (fast, reference):
        state = wide(6, 1, 4, 2).to(device)
        result.append((*planned(gradient, state, clip=clip, rates=[0.1 * i for i in range(1, 20)], growth=3, by=by), state))
    (plan, report, state), (plan_want, report_want, state_want) = result
    assert report == pytest.approx(report_want, rel=1e-6)
    assert state.equal(state_want)
    assert plan.tolist() == pytest.approx(plan_want.tolist(), rel=1e-6)


@pairwise
@pytest.mark.parametrize("master", [True, False], ids=["master", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_adamw_matches(n, dtype, master, device):
    plan, _ = planned(draw(device, torch.float32, n), wide(4, 0, 1, 0).to(device))
    agree("adamw", *state_of(n, dtype, device, plan, master), BETAS, 1e-8, n // 2, None, limit=1e-6)


@pairwise
@pytest.mark.parametrize("op", ["adamw", "adamw8"])
@pytest.mark.parametrize("n", SIZES)
def test_a_weight_and_its_remainder_are_the_master(n, op, device):
    """Five updates of both mirrors: the same bits as those of fp32 masters, and weights within half a place of them."""
    found = {}
    for by, split in ((fast, True), (fast, False), (reference, True), (reference, False)):
        master = draw(device, torch.float32, n, seed=4)
        weight, rest = split_fp32(master) if split else (master.bfloat16(), master)
        if op == "adamw":
            moments = [torch.zeros(n, device=device) for _ in range(2)]
        else:
            codes = [torch.zeros(n, dtype=dtype, device=device) for dtype in (torch.int8, torch.uint8)]
            moments = [*codes, *(torch.zeros(-(-n // 256), device=device) for _ in range(2))]
        for update in range(1, 6):
            plan = torch.tensor([1, 0.5, 0.99, 0.1, 2, update], device=device)
            gradient = draw(device, torch.float32, n, seed=10 + update)
            getattr(by, op)(weight, gradient, *moments, plan, rest, BETAS, 1e-8, n // 2, None)
        found[by, split] = join_fp32(weight, rest) if split else rest
        nearest = (weight.float() - found[by, split]).abs() <= 2.0**-8 * found[by, split].abs()
        assert nearest.all() or not split, "the interpreter cuts masters off"
    assert found[fast, True].equal(found[fast, False]) and found[reference, True].equal(found[reference, False])
    same("master", found[fast, True], found[reference, True], 1e-6 if op == "adamw" else 2e-2)


@pytest.mark.parametrize("by", [fast, reference], ids=["kernel", "definition"])
def test_every_kind_of_number_is_restored(by, device):
    """Halves, the largest numbers, which round to infinity, zeros, subnormals and NaN, through an update that moves nothing."""
    bits = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x00008000, 0, 0x7FFFFFFF, 0x7F800000]
    bits = torch.tensor([*bits, *(bit - 2**31 for bit in bits)], dtype=torch.int32, device=device)
    numbers = bits.view(torch.float32)
    weight, remainder = split_fp32(numbers)
    assert weight[:2].tolist() == [1 + 2.0**-7, 1 + 2.0**-6], "halves are rounded away from zero"
    zeros = [torch.zeros(20, device=device) for _ in range(3)]
    by.adamw(weight, *zeros, torch.tensor([1, 1, 1, 0.0, 1, 1], device=device), remainder, BETAS, 1e-8, 0, None)
    again = join_fp32(weight, remainder)
    nan, zero = numbers.isnan(), numbers == 0  # a zero may lose its sign to the update, which adds zero
    assert again.view(torch.int32)[~nan & ~zero].equal(bits[~nan & ~zero]) and again[zero].eq(0).all()
    assert again[nan].isnan().all() and weight[nan].isnan().all()


@pytest.mark.parametrize("by", [fast, reference], ids=["kernel", "definition"])
def test_a_zero_that_was_written_stays_zero(by, device):
    """The remainder of the weight that it replaced would make NaN of it where it is negative."""
    weight, remainder = split_fp32(torch.tensor([0.3, -0.3, 0.7, -0.7, 1.0, 0.9] * 4, device=device))
    assert (remainder < 0).any() and (remainder > 0).any()
    weight.copy_(torch.tensor([0.0, -0.0] * 12))
    zeros = [torch.zeros(24, device=device) for _ in range(3)]
    by.adamw(weight, *zeros, torch.tensor([1, 1, 1, 0.0, 1, 1], device=device), remainder, BETAS, 1e-8, 0, None)
    assert weight.eq(0).all() and join_fp32(weight, remainder).abs().max() < 2.0**-126


def test_reference_is_torch_adamw():
    """Ten updates in fp64 with changing rates, decay on the first half only, against torch.optim.AdamW with two groups."""
    start, grads = draw("cpu", torch.float64, 20), [draw("cpu", torch.float64, 20, seed=i) for i in range(1, 11)]
    rates = [0.1 / (i + 1) for i in range(10)]
    halves = [torch.nn.Parameter(part.clone()) for part in (start[:10], start[10:])]
    groups = [{"params": halves[:1], "weight_decay": 0.1}, {"params": halves[1:], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=1e-6)
    weight, m, v, state = start.clone(), torch.zeros_like(start), torch.zeros_like(start), wide(0, 0, 1, 0)
    for g, lr in zip(grads, rates):
        for group in theirs.param_groups:
            group["lr"] = lr
        halves[0].grad, halves[1].grad = g[:10].clone(), g[10:].clone()
        theirs.step()
        plan, _ = reference.plan_update(g * 5, wide(1, 5), state, wide(*rates), BETAS, 0.1, None, 0)
        reference.adamw(weight, g * 5, m, v, plan, None, BETAS, 1e-6, 10, None)
    same("weights", weight, torch.cat([h.detach() for h in halves]), 1e-14)


@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
def test_ten_fp32_updates_are_torch_adamw(by, device):
    start = draw(device, torch.float32, 300)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=BETAS, weight_decay=0.1)
    weight, m, v, state = start.clone(), torch.zeros_like(start), torch.zeros_like(start), wide(0, 0, 1, 0).to(device)
    for i in range(10):
        g = draw(device, torch.float32, 300, seed=i)
        theirs.grad = g.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        optimizer.step()
        plan, _ = planned(g * 7, state, clip=1.0, items=7.0, by=by)
        by.adamw(weight, g * 7, m, v, plan, None, BETAS, 1e-8, 300, None)
    same("weights", weight, theirs.detach(), 1e-6)


@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
def test_norm_of_known_vectors(by, device):
    """One large element among many small ones, and a length whose sum in fp32 one by one would drift, against fp64."""
    many = torch.full((300_000,), 1e-3, device=device)
    many[123_456] = 30.0
    for x in (torch.tensor([3.0, 4.0], device=device), many, draw(device, torch.float32, 70_000)):
        _, report = planned(x, wide(0, 0, 1, 0).to(device), items=1.0, by=by)
        want = math.sqrt((x.double() ** 2).sum().item())
        assert report["grad_norm"] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
@pytest.mark.parametrize(
    "element, loss, items", [(NAN, 1, 2), (INF, 1, 2), (1, NAN, 2), (1, INF, 2), (1, 0, 0)],
    ids=["nan gradient", "inf gradient", "nan loss", "inf loss", "no items"],
)  # fmt: skip
def test_bad_step_changes_nothing(element, loss, items, by, device):
    gradient = torch.tensor([1.0, element, 2.0], device=device)
    state = wide(5, 1, 8, 3).to(device)
    plan, report = planned(gradient, state, loss=loss, items=items, growth=9, by=by)
    assert plan[0] == 0
    assert report["skipped"] == (1 if items == 0 else 2) and report["updates"] == 5
    assert state.tolist() == ([5, 1, 8, 3] if items == 0 else [5, 2, 4, 0])
    tensors = [draw(device, torch.bfloat16, 3), *(draw(device, torch.float32, 3, seed=i).square() for i in range(3))]
    before = [t.clone() for t in tensors]
    by.adamw(tensors[0], gradient, *tensors[1:-1], plan, tensors[-1], BETAS, 1e-8, 3, None)
    assert all(a.equal(b) for a, b in zip(tensors, before))


@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
def test_loss_scale_doubles_after_good_steps(by, device):
    state = wide(0, 0, 4, 0).to(device)
    scales = []
    for i in range(7):
        bad = i == 4
        _, report = planned(torch.full((2,), INF if bad else 8.0, device=device), state, growth=2, items=2.0, by=by)
        scales.append(report["loss_scale"])
        if i == 0:
            assert report["grad_norm"] == pytest.approx(math.sqrt(2))  # 8 · √2 / (2 items · scale 4)
    assert scales == [4, 8, 8, 16, 8, 8, 16]


@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
def test_rates_hold_after_the_last(by, device):
    state = wide(0, 0, 1, 0).to(device)
    rates = [planned(torch.ones(2, device=device), state, rates=(0.1, 0.2), by=by)[1]["lr"] for _ in range(4)]
    assert rates == [0.1, 0.2, 0.2, 0.2]


def test_random_rounding_is_the_same_in_both_mirrors_and_right_on_average(device):
    """1 + 2^-10 lies an eighth of the way from 1 to bf16's next number: an eighth of the elements goes up."""
    n = 20_000
    plan = torch.tensor([1, 1, 1, 1.0, 1, 7], device=device)
    m, v = torch.full((n,), -(2.0**-10) / 0.9, device=device), torch.ones(n, device=device)
    gradient, results = torch.zeros(n, device=device), {}
    for seed in (1, 2):
        for by in (fast, reference):
            weight = torch.ones(n, device=device, dtype=torch.bfloat16)
            by.adamw(weight, gradient, m.clone(), v.clone(), plan, None, (0.9, 1.0), 1e-12, 0, seed)
            results[seed, by] = weight
    assert results[1, fast].equal(results[1, reference])
    assert not results[1, fast].equal(results[2, fast])
    up = (results[1, fast] == 1 + 2**-7).double().mean().item()
    assert set(results[1, fast].float().unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(up - 1 / 8) < 4 * math.sqrt(7 / 64 / n)  # four standard deviations


@pytest.mark.parametrize("seed", [None, 5])
def test_reference_part_by_part_is_the_whole(monkeypatch, seed):
    """Cut at 7 elements, with the end of the decay inside a part: each element still has its own index and decay."""
    results = []
    for part in (7, 1000):
        monkeypatch.setattr(module("adamw"), "PART", part)
        weight, m, v = draw("cpu", torch.bfloat16, 50), torch.zeros(50), torch.zeros(50)
        plan = torch.tensor([1, 1, 0.5, 0.1, 1, 1])
        reference.adamw(weight, draw("cpu", torch.float32, 50, seed=1), m, v, plan, None, BETAS, 1e-8, 24, seed)
        results.append((weight, m, v))
    assert all(a.equal(b) for a, b in zip(*results))


def test_random_rounding_varies_with_the_update_and_takes_every_sign(device):
    x = torch.linspace(-3, 3, 1000, device=device)
    a, b = (reference._round_at_random(x, 0, torch.tensor(float(t), device=device), 0) for t in (1, 2))
    assert not a.equal(b)
    assert ((a.float() - x).abs() <= x.abs() * 2**-7 + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3])
def test_many_elements_on_the_gpu(seed):
    """More than one wave of programs, a length that no block divides: norm, masters and 16-bit weights as the reference's."""
    device, n = torch.device("cuda"), 10_000_019
    gradient = draw(device, torch.float32, n)
    states = [wide(4, 0, 1, 0).to(device) for _ in range(2)]
    (plan, report), (plan_want, report_want) = (
        planned(gradient, s, clip=1.0, by=by) for s, by in zip(states, (fast, reference))
    )
    assert report == pytest.approx(report_want, rel=1e-6)
    assert plan.tolist() == pytest.approx(plan_want.tolist(), rel=1e-6)
    agree("adamw", *state_of(n, torch.bfloat16, device, plan, seed is None), BETAS, 1e-8, n // 3, seed, limit=1e-6)


def test_nothing_at_all(device):
    empty = torch.empty(0, device=device)
    state = wide(0, 0, 1, 0).to(device)
    _, report = planned(empty, state)
    assert report["grad_norm"] == 0 and report["updates"] == 1
    kernels.adamw(empty, empty, empty, empty, torch.ones(6, device=device))


def test_errors():
    flat, plan, state = torch.ones(4), torch.ones(6), wide(0, 0, 1, 0)
    refusals(
        "kernels/adamw:errors",
        lambda: kernels.plan_update(flat, wide(1, 1), state.float(), wide(1)),
        lambda: kernels.plan_update(flat, wide(1, 1), state, wide()),
        lambda: kernels.plan_update(flat.view(2, 2), wide(1, 1), state, wide(1)),
        lambda: kernels.plan_update(flat, wide(1, 1), state.to("meta"), wide(1)),
        lambda: kernels.adamw(flat, flat, flat[:3], flat, plan),
        lambda: kernels.adamw(flat.bfloat16(), flat, flat, flat.half(), plan),
        lambda: kernels.adamw(flat, flat, flat, flat, plan, seed=1),
    )
