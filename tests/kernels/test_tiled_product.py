"""The products of a decoding step for several rows at once: parity with the reference, guard bands, sentences, plans."""

import pytest
import torch

from benchmarks.candidates import candidates
from gpubound import kernels
from gpubound.device import Chip
from gpubound.kernels import plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import pack
from gpubound.kernels.plans.types import ResidentPlan
from gpubound.kernels.registry import load
from tests.messages import message, refusals

from .cases import TOLERANCE, agree, draw, same

H200 = Chip(90, 232_448, 132, "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_that_is_rounded_already(device, dtype):
    x, norm = draw(device, dtype, 3, 64), Norm(draw(device, dtype, 64, seed=1), 1e-5)
    weights = [draw(device, dtype, 24, 64, seed=2 + i) * 0.125 for i in range(2)]
    limit, found = 4 * TOLERANCE[dtype], (torch.empty(3, 24, device=device, dtype=dtype), torch.empty(3, 48, device=device))
    agree("tiled_norm_gate_up", x, norm, *weights, None, None, found[0], limit=limit)
    agree("tiled_norm_product", x, norm, *weights, None, None, None, None, found[1], limit=limit)


@pytest.mark.parametrize("parts", [1, 2])
def test_fewer_weights_and_no_norm(device, parts):
    x, weights = draw(device, torch.float32, 3, 48), [draw(device, torch.float32, 24, 48, seed=i) for i in range(parts)]
    no = [None] * (6 - parts)
    agree("tiled_norm_product", x, None, *weights, *no, torch.empty(3, 24 * parts, device=device))


@pytest.mark.parametrize("held", [1, 2, 8])
@pytest.mark.parametrize("ahead", [1, 2])
def test_slices_that_are_held_and_do_not_divide_the_columns(device, monkeypatch, held, ahead):
    """What lies behind the last tile is NaN, and NaN times a masked zero would show."""
    rows, inner, hidden = 3, 200, 40
    monkeypatch.setitem(plans.TRIED, ("tiled_product", "", (hidden, inner, 8)), ResidentPlan(16, 2, held, ahead))
    h, weight = draw(device, torch.bfloat16, rows, inner), draw(device, torch.bfloat16, hidden, inner, seed=1)
    agree("tiled_add_product", h, weight, None, torch.zeros(rows, hidden, device=device))


def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    x, norm = draw(device, torch.float32, 8, 64), Norm(draw(device, torch.bfloat16, 64, seed=1), 1e-5)
    weight = draw(device, torch.bfloat16, 48, 64, seed=2)
    results = []
    for others in (1.0, float("nan")):
        given, out = x.clone(), torch.zeros(8, 48, device=device)
        given[1:] *= others
        load("triton", "tiled_norm_product")(given, norm, weight, None, None, None, None, None, out)
        results.append(out[0])
    assert torch.equal(*results)


def test_what_it_refuses():
    x, weight = torch.ones(33, 32), torch.ones(8, 32)
    refusals("kernels/tiled_product:what_it_refuses", lambda: kernels.norm_product(x, None, weight, tiled=True))
    with pytest.raises(ValueError, check=message("kernels/tiled_product:what_it_refuses.2")):
        kernels.norm_gate_up(x[:2].half(), None, weight.bfloat16(), weight.bfloat16(), tiled=True)
    with pytest.raises(ValueError, check=message("kernels/tiled_product:what_it_refuses.3")):
        kernels.add_product(x[:2], weight, None, torch.zeros(2, 8), copy=torch.zeros(2, 7), tiled=True)
    refusals(
        "kernels/tiled_product:what_it_refuses.4",
        lambda: kernels.norm_product(x[:1], None, weight, v_weight=weight, tiled=True),
    )
    x, h = x[:2], torch.zeros(2, 8)
    refusals(
        "kernels/tiled_product:what_no_kernel_takes",
        lambda: kernels.norm_product(x, None, weight, cap=1.0, tiled=True),
        lambda: kernels.norm_product(x, None, pack(weight, "int8"), tiled=True),
        lambda: kernels.norm_product(x, None, pack(weight, "int8"), k_weight=weight),
        lambda: kernels.add_product(x, weight, None, h, copy=h),
        lambda: kernels.add_product(x, pack(weight, "int8"), None, h, keep=h),
    )


def test_the_doors_make_what_those_of_single_rows_make(device):
    x, norm = draw(device, torch.float32, 3, 64), Norm(draw(device, torch.float32, 64, seed=1), 1e-5)
    weight, out = draw(device, torch.float32, 16, 64, seed=2), draw(device, torch.float32, 64, 16, seed=3)
    same("product", kernels.norm_product(x, norm, weight, tiled=True), kernels.norm_product(x, norm, weight), 1e-5)
    gated = kernels.norm_gate_up(x, norm, weight, weight, tiled=True), kernels.norm_gate_up(x, norm, weight, weight)
    same("gated", *gated, 1e-5)
    h, sums = draw(device, torch.float32, 3, 16), [torch.zeros(3, 64, device=device) for _ in range(2)]
    kernels.add_product(h, out, None, sums[0], tiled=True)
    kernels.add_product(h, out, None, sums[1])
    same("sum", *sums, 1e-5)


@pytest.mark.parametrize("shape", [(1536, 1024, 8), (8192, 1024, 16), (1024, 4096, 8), (2048, 8192, 16), (48, 40, 32)])
def test_plans_fit_and_become_smaller_to_the_end(shape):
    job = plans.Job("tiled_product", "", shape, 2, H200)
    plan = plans.plan_for(job)
    assert plans.fits(job, plan)
    for lines, slices, registers in ((plan.rows, plan.resident, 128), (shape[2], plan.ahead, 48)):
        assert slices == 1 or lines * slices * 32 * 2 <= registers * 32 * 4
    seen = [plan]
    while (smaller := seen[-1].smaller()) is not None:
        seen.append(smaller)
        assert smaller.shared(job) < seen[-2].shared(job)
    assert seen[-1].rows == 16
    assert all(plans.fits(job, candidate) for candidate in candidates(job))
