"""The product of which each row chooses its weight: few and many agree with plain loops, gradients too; unknown ids."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.registry import load
from gpubound.kernels.triton import grouped_linear as fast
from tests.messages import message, refusals

from .cases import TOLERANCE, definitions, draw, pairwise, same

reference = definitions("grouped_linear")

FP32, FP64 = torch.float32, torch.float64
# (rows, choices, weights, outputs, inputs): one of each, a weight that nobody chose, more choices than are few
SHAPES = [(1, 1, 1, 8, 16), (3, 2, 9, 24, 40), (50, 2, 4, 16, 8)]


def inputs(device, dtype, rows, choices, weights, outputs, width):
    x, weight = draw(device, dtype, rows, width), draw(device, dtype, weights, outputs, width, seed=1) * width**-0.5
    ids = torch.randint(0, weights, (rows, choices), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    return x, weight, ids.to(device)


def by_loops(x, weight, ids, dy):
    """y, dx and dweight in fp64, one choice after the other."""
    x, weight, dy = x.double().cpu(), weight.double().cpu(), dy.double().cpu()
    y, dx, dweight = torch.zeros(dy.shape, dtype=FP64), torch.zeros_like(x), torch.zeros_like(weight)
    for n, row in enumerate(ids.tolist()):
        for s, number in enumerate(row):
            y[n, s] = weight[number] @ x[n]
            dx[n] += weight[number].t() @ dy[n, s]
            dweight[number] += torch.outer(dy[n, s], x[n])
    return y, dx, dweight


@pairwise
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", ["triton", "reference"])
def test_products_and_gradients_are_those_of_plain_loops(source, dtype, shape, device):
    if device.type == "cuda" and dtype == FP32 and source == "triton":
        pytest.skip("F.grouped_mm takes bfloat16 on the device: the door gives fp32 to the definition")
    x, weight, ids = inputs(device, dtype, *shape)
    x.requires_grad_(), weight.requires_grad_()
    y = load(source, "grouped_linear")(x, weight, ids)
    dy = draw(device, dtype, *y.shape, seed=3)
    got = y, *torch.autograd.grad(y, (x, weight), dy)
    for name, a, b in zip(("y", "dx", "dweight"), got, by_loops(x.detach(), weight.detach(), ids, dy)):
        same(name, a.double(), b.to(device), TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [3, 60], ids=["few", "many"])
def test_an_id_that_no_weight_has(rows, device):
    """Its result is NaN, whose gradient reaches nobody."""
    x, weight, ids = inputs(device, torch.bfloat16, rows, 2, 4, 8, 16)
    ids[0], ids[1, 1] = torch.tensor([4, -1], dtype=torch.int32), -7
    for source in ("triton", "reference"):
        own = [t.clone().requires_grad_() for t in (x, weight)]
        y = load(source, "grouped_linear")(*own, ids)
        assert y.isnan().all(-1).nonzero().tolist() == [[0, 0], [0, 1], [1, 1]]
        dx, dweight = torch.autograd.grad(y, own, torch.ones_like(y))
        assert dx.isfinite().all() and dweight.isfinite().all() and not dx[0].any()


def test_few_rows_read_their_weights_alone(device):
    weight = torch.full((5, 8, 16), float("nan"), device=device)
    weight[3] = 1.0
    y = load("triton", "grouped_linear")(torch.ones(2, 16, device=device), weight, torch.full((2, 1), 3, device=device))
    assert y.eq(16).all()


def test_the_weights_gradient_goes_to_its_accumulator(device):
    x, weight, ids = inputs(device, torch.bfloat16, 20, 2, 4, 8, 16)
    weight.requires_grad_().main_grad = torch.ones(weight.shape, device=device)
    fast.grouped_linear(x, weight, ids).sum().backward()
    want = by_loops(x, weight.detach(), ids, torch.ones(20, 2, 8))[2] + 1
    assert weight.grad is None
    same("main_grad", weight.main_grad, want.float().to(device), TOLERANCE[torch.bfloat16])


def test_reference_gradients_in_fp64():
    x, weight, ids = inputs(torch.device("cpu"), FP64, 3, 2, 3, 2, 4)
    x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: reference.grouped_linear(a, b, ids), (x, weight))


def test_what_cannot_be_grouped_is_a_fallback_with_its_reason(fresh, said, device):
    """Rows of 14 bytes: the definition runs, and says why."""
    x, weight, ids = inputs(device, torch.bfloat16, 60, 2, 4, 8, 7)
    y = kernels.grouped_linear(x, weight, ids)
    same("y", y.double(), by_loops(x, weight, ids, torch.ones(60, 2, 8))[0].to(device), TOLERANCE[torch.bfloat16])
    assert "grouped_linear" in (line := said()) and message("kernels/grouped_linear:what_cannot_be_grouped_i").within(line)


def test_wrong_arguments():
    x, weight, ids = torch.ones(2, 3), torch.ones(2, 4, 3), torch.ones(2, 1).int()
    refusals(
        "kernels/grouped_linear:wrong_arguments",
        lambda: kernels.grouped_linear(x, torch.ones(2, 4, 5), ids),
        lambda: kernels.grouped_linear(x, weight.half(), ids),
        lambda: kernels.grouped_linear(x, weight, torch.ones(2)),
    )
