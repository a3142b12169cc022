"""The products of a decoding step whose sums have parts: parity with the reference, odd sizes, sentences, plans."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from benchmarks.candidates import candidates
from gpubound import kernels
from gpubound.device import Chip
from gpubound.kernels import plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.plans.types import SplitPlan
from gpubound.kernels.registry import load
from tests.messages import refusals

from .cases import TOLERANCE, agree, draw, pairwise, same

H200 = Chip(90, 232_448, 132, "")


PLANS = pytest.mark.parametrize("plan", [None, (16, 32, 4, 1, 3), (32, 32, 4, 1, 0), (64, 16, 4, 1, 2)])


def take(plan, monkeypatch):
    """Use a plan for the tests' weights of 136 columns; in neither of 1, 2 nor 4 parts a number of slices."""
    for way, outputs in (("", 80), ("", 72), ("gated", 80)) if plan else ():
        monkeypatch.setitem(plans.TRIED, ("split_product", way, (outputs, 136, 16)), SplitPlan(*plan))


@pairwise
@PLANS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rows, biased", [(9, True), (16, False)])
def test_parts_agree_with_the_reference(device, plan, dtype, parts, rows, biased, monkeypatch):
    take(plan, monkeypatch)
    x, sizes = draw(device, dtype, rows, 136), (40, 20, 20)
    weights = [draw(device, dtype, n, 136, seed=2 + i) for i, n in enumerate(sizes)]
    biases = [draw(device, dtype, n, seed=5 + i) if biased else None for i, n in enumerate(sizes)]
    agree("split_product", x, *weights, *biases, torch.empty(parts, rows, 80, device=device), limit=4 * TOLERANCE[dtype])
    one = draw(device, dtype, 72, 136, seed=8)
    out = torch.empty(parts, rows, 72, device=device)
    agree("split_product", x, one, None, None, None, None, None, out, limit=4 * TOLERANCE[dtype])


def test_fewer_parts_than_the_plan_has_are_read_in_a_loop(device, monkeypatch):
    """All weights of a range that is four times as long might not fit."""
    module = import_module("gpubound.kernels.triton.split_product")
    seen, kernel = [], module._split_product_kernel

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, **named: (seen.append((named["HELD"], named["STAGES"])), kernel[grid](*given, **named))

    monkeypatch.setattr(module, "_split_product_kernel", Noted())
    monkeypatch.setitem(plans.TRIED, ("split_product", "", (48, 128, 16)), SplitPlan(16, 16, 4, 4, 0))
    x, weight = draw(device, torch.float32, 9, 128), draw(device, torch.float32, 48, 128, seed=1)
    for parts in (1, 4):
        load("triton", "split_product")(x, weight, *[None] * 5, torch.empty(parts, 9, 48, device=device))
    assert seen == [(False, 2), (True, 2)]


@pairwise
@PLANS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, biased, activation", [(9, True, "gelu_tanh"), (16, False, "silu")])
def test_gate_and_up_agree_with_the_reference(device, plan, dtype, rows, biased, activation, monkeypatch):
    take(plan, monkeypatch)
    x, weights = draw(device, dtype, rows, 136), [draw(device, dtype, 40, 136, seed=i) * 0.1 for i in (1, 2)]
    biases = [draw(device, dtype, 40, seed=3 + i) if biased else None for i in range(2)]
    out = torch.empty(rows, 40, device=device, dtype=dtype)
    agree("split_gate_up", x, *weights, *biases, out, 0, activation, limit=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_the_parts_of_the_product_before_it(device, dtype):
    """The stream and its norm are those of a product that is added at once."""
    h, weight = draw(device, dtype, 12, 256), draw(device, dtype, 40, 256, seed=1) * 0.1
    x, norm = draw(device, torch.float32, 12, 40, seed=2), Norm(draw(device, dtype, 40, seed=3), 1e-5)
    parts = kernels.split_product(h, weight, parts=torch.full((4, 12, 40), float("nan"), device=device))
    want = x + F.linear(h.float(), weight.float())
    out = kernels.norm_rows(x, norm, torch.empty(12, 40, device=device), 0, parts)
    same("stream", x, want, 1e-5)
    same("norm", out, F.rms_norm(want, (40,), norm.weight.float(), 1e-5), 1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    x, weight = draw(device, torch.bfloat16, 16, 512), draw(device, torch.bfloat16, 48, 512, seed=2)
    results = []
    for others in (1.0, float("nan")):
        given, parts = x.clone(), torch.zeros(2, 16, 48, device=device)
        given[1:] *= others
        load("triton", "split_product")(given, weight, None, None, None, None, None, parts)
        results.append(parts[:, 0])
    assert torch.equal(*results)


def test_what_it_refuses():
    x, weight = torch.ones(9, 32), torch.ones(8, 32)
    refusals(
        "kernels/split_product:what_it_refuses",
        lambda: kernels.split_product(torch.ones(129, 32), weight),
        lambda: kernels.split_product(x, weight.half()),
        lambda: kernels.split_product(x, weight, parts=torch.zeros(3, 9, 8)),
        lambda: kernels.split_product(x, weight, parts=torch.zeros(9, 8)),
        lambda: kernels.split_gate_up(x, weight, weight, activation="relu"),
        lambda: kernels.split_gate_up(x, weight, weight[:4]),
        lambda: kernels.norm_rows(torch.zeros(9, 8), Norm(torch.ones(8), 1e-5), torch.zeros(9, 8), 0, torch.zeros(9, 8)),
    )


@pytest.mark.parametrize("way", ["", "gated"])
@pytest.mark.parametrize("shape", [(1536, 1024, 16), (8192, 1024, 32), (1024, 4096, 128), (2048, 8192, 64), (48, 40, 32)])
@pytest.mark.parametrize("shared", [101_376, 232_448])
def test_plans_fit_and_become_smaller_to_the_end(way, shape, shared):
    job = plans.Job("split_product", way, shape, 2, H200._replace(shared_bytes=shared))
    plan = plans.plan_for(job)
    assert plans.fits(job, plan) and shape[1] % plan.parts == 0 and (way == "" or plan.parts == 1)
    seen = [plan]
    while (smaller := seen[-1].smaller()) is not None:
        seen.append(smaller)
    assert seen[-1].columns == 16 and {one.parts for one in seen} == {plan.parts}  # which the reader knows already
    assert all(plans.fits(job, candidate) for candidate in candidates(job))


def test_parts_give_the_multiprocessors_programs():
    """350m and 1b on an H200: q k v, output, down."""
    found = [
        plans.plan_for(plans.Job("split_product", "", (*shape, 32), 2, H200)).parts
        for shape in ((1536, 1024), (1024, 1024), (1024, 4096), (3072, 2048), (2048, 2048), (2048, 8192))
    ]
    assert found == [4, 4, 8, 2, 4, 4]  # 1b's q, k and v as a search found
