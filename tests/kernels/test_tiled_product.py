"""The products of a decoding step for several rows at once: parity with the reference, guard bands, sentences, plans."""

import pytest
import torch

from benchmarks.candidates import candidates
from gpubound import kernels
from gpubound.device import Chip
from gpubound.kernels import plans
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.plans.types import ResidentPlan
from gpubound.kernels.registry import load
from tests.messages import message

from .cases import TOLERANCE, assert_inside, banded, draw, pairwise, same

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
H200 = Chip(90, 232_448, 132, "")


def both(op, make, whole_of):
    """What kernel and definition write into banded results."""
    results = []
    for source in ("triton", "reference"):
        whole, out = whole_of()
        load(source, op)(*make(out))
        assert_inside(whole, out)
        results.append(out)
    return results


def bound(dtype):
    return max(4 * TOLERANCE[dtype], 1e-5)  # x is rounded, too


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("hidden, q, k", [(64, 32, 16), (40, 20, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_q_k_v_agree_with_the_reference(device, dtype, rows, hidden, q, k, biased):
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5, 1.0)
    weights = [draw(device, dtype, n, hidden, seed=2 + i) for i, n in enumerate((q, k, k))]
    biases = [draw(device, dtype, n, seed=5 + i) if biased else None for i, n in enumerate((q, k, k))]
    found = both("tiled_norm_product", lambda out: (x, norm, *weights, *biases, out), lambda: banded((rows, q + 2 * k), device))
    same("q k v", *found, bound(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_that_is_rounded_already(device, dtype):
    x, norm = draw(device, dtype, 3, 64), Norm(draw(device, dtype, 64, seed=1), 1e-5)
    gate, up = (draw(device, dtype, 24, 64, seed=2 + i) * 0.125 for i in range(2))
    found = both("tiled_norm_gate_up", lambda out: (x, norm, gate, up, None, None, out), lambda: banded((3, 24), device, dtype))
    same("gated", *found, bound(dtype))
    found = both(
        "tiled_norm_product", lambda out: (x, norm, gate, up, None, None, None, None, out), lambda: banded((3, 48), device)
    )
    same("product", *found, bound(dtype))


@pytest.mark.parametrize("parts", [1, 2])
def test_fewer_weights_and_no_norm(device, parts):
    x, weights = draw(device, torch.float32, 3, 48), [draw(device, torch.float32, 24, 48, seed=i) for i in range(parts)]
    given = [*weights, *[None] * (3 - parts)]
    found = both(
        "tiled_norm_product",
        lambda out: (x, None, *given, None, None, None, out),
        lambda: banded((3, 24 * parts), device),
    )
    same("one or two", *found, 1e-5)


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, hidden, width", [(3, 64, 96), (12, 40, 7)])
@pytest.mark.parametrize("biased, activation", [(False, "silu"), (True, "gelu_tanh"), (True, "gelu")])
def test_gate_and_up_agree_with_the_reference(device, dtype, rows, hidden, width, biased, activation):
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=1), 1e-5)
    gate, up = (draw(device, dtype, width, hidden, seed=2 + i) * hidden**-0.5 for i in range(2))
    biases = [draw(device, dtype, width, seed=4 + i) if biased else None for i in range(2)]
    found = both(
        "tiled_norm_gate_up",
        lambda out: (x, norm, gate, up, *biases, out, 0, activation),
        lambda: banded((rows, width), device, dtype),
    )
    same("gated", *found, bound(dtype))


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, inner, hidden", [(3, 96, 64), (17, 130, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_residual_product_agrees_with_the_reference(device, dtype, rows, inner, hidden, biased):
    h, weight = draw(device, dtype, rows, inner), draw(device, dtype, hidden, inner, seed=1)
    bias = draw(device, dtype, hidden, seed=2) if biased else None

    def stream():
        whole, x = banded((rows, hidden), device)
        return whole, x.copy_(draw(device, torch.float32, rows, hidden, seed=3))

    copies = [torch.zeros(rows, hidden, device=device, dtype=dtype) for _ in range(2)]
    to = iter(copies)
    found = both("tiled_add_product", lambda x: (h, weight, bias, x, 0, next(to)), stream)
    same("stream", *found, 1e-5)
    same("copy", *copies, TOLERANCE[dtype])


@pytest.mark.parametrize("held", [1, 2, 8])
@pytest.mark.parametrize("ahead", [1, 2])
def test_slices_that_are_held_and_do_not_divide_the_columns(device, monkeypatch, held, ahead):
    """What lies behind the last tile is NaN, and NaN times a masked zero would show."""
    rows, inner, hidden = 3, 200, 40
    monkeypatch.setitem(plans.TRIED, ("tiled_product", "", (hidden, inner, 8)), ResidentPlan(16, 64, 4, held, ahead))
    h = draw(device, torch.bfloat16, rows, inner)
    weight = banded((hidden, inner), device, torch.bfloat16)[1].copy_(draw(device, torch.bfloat16, hidden, inner, seed=1))
    found = both("tiled_add_product", lambda x: (h, weight, None, x.zero_()), lambda: banded((rows, hidden), device))
    same("sum", *found, 1e-5)


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
    with pytest.raises(ValueError) as error:
        kernels.tiled_norm_product(x, None, weight)
    assert str(error.value) == message("kernels/tiled_product:what_it_refuses")
    with pytest.raises(ValueError, check=message("kernels/tiled_product:what_it_refuses.2")):
        kernels.tiled_norm_gate_up(x[:2].half(), None, weight.bfloat16(), weight.bfloat16())
    with pytest.raises(ValueError, check=message("kernels/tiled_product:what_it_refuses.3")):
        kernels.tiled_add_product(x[:2], weight, None, torch.zeros(2, 8), copy=torch.zeros(2, 7))
    with pytest.raises(ValueError) as error:
        kernels.tiled_norm_product(x[:1], None, weight, v_weight=weight)
    assert str(error.value) == message("kernels/tiled_product:what_it_refuses.4")


def test_the_doors_make_what_those_of_single_rows_make(device):
    x, norm = draw(device, torch.float32, 3, 64), Norm(draw(device, torch.float32, 64, seed=1), 1e-5)
    weight, out = draw(device, torch.float32, 16, 64, seed=2), draw(device, torch.float32, 64, 16, seed=3)
    same("product", kernels.tiled_norm_product(x, norm, weight), kernels.norm_product(x, norm, weight), 1e-5)
    gated = kernels.tiled_norm_gate_up(x, norm, weight, weight), kernels.norm_gate_up(x, norm, weight, weight)
    same("gated", *gated, 1e-5)
    h, sums = draw(device, torch.float32, 3, 16), [torch.zeros(3, 64, device=device) for _ in range(2)]
    kernels.tiled_add_product(h, out, None, sums[0])
    kernels.add_product(h, out, None, sums[1])
    same("sum", *sums, 1e-5)


@pytest.mark.parametrize("shape", [(1536, 1024, 8), (8192, 1024, 16), (1024, 4096, 8), (2048, 8192, 16), (48, 40, 32)])
def test_plans_fit_and_become_smaller_to_the_end(shape):
    job = plans.Job("tiled_product", "", shape, 2, H200)
    plan = plans.plan_for(job)
    assert plans.fits(job, plan) and plan.columns % (16 * plan.warps) == 0
    seen = [plan]
    while (smaller := seen[-1].smaller()) is not None:
        seen.append(smaller)
        assert smaller.shared(job) < seen[-2].shared(job)
    assert seen[-1].rows == 16 and seen[-1].resident == 1
    assert all(plans.fits(job, candidate) for candidate in candidates(job))
