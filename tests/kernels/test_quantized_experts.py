"""A sparse MLP over packed weights: parity with the reference, equal bits in any batch, ids that no expert has, sentences."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import Packed, pack
from gpubound.kernels.registry import load
from tests.messages import refusals

from .cases import SOURCES, agree, draw, pairwise, same
from .test_experts import some_ids
from .test_quantized_product import PARITY, ROUNDED, weight

KIND = pytest.mark.parametrize("kind", ROUNDED)
# (rows, slots, experts, hidden, width): one group each, groups cut short, widths that no program divides
SHAPES = [(1, 2, 4, 128, 32), (3, 2, 3, 200, 19)]


def experts(device, kind: str, count: int, rows: int, columns: int) -> Packed:
    if kind == "fp4":
        return weight(device, kind, count * rows, columns)
    return pack(draw(device, torch.float32, count * rows, columns, seed=1) * columns**-0.5, kind)


def fitting(kind: str, *sizes: int) -> list[int]:
    """Columns of packed weights: in fp4, 32 share a scale."""
    return [max(32, size // 32 * 32) if kind == "fp4" else size for size in sizes]


@pairwise
@KIND
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [float("inf"), 0.4])
def test_gate_and_up_agree_with_the_reference(device, kind, shape, dtype, limit):
    rows, slots, count, *sizes = shape
    hidden, width = fitting(kind, *sizes)
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, dtype, hidden, seed=2), 1e-5)
    gate_up, ids = experts(device, kind, count, 2 * width, hidden), some_ids(device, rows, slots, count)
    out = torch.empty(rows, slots, width, device=device, dtype=dtype)
    *_, gated, _, _ = agree("quantized_routed_gate_up", x, norm, gate_up, ids, out, 0, limit, limit=2 * PARITY[kind])
    assert limit > 1 or (gated.float().abs() >= 0.08).any(), "some reach the limit"


@pairwise
@KIND
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_product_agrees_with_the_reference(device, kind, shape, dtype):
    rows, slots, count, hidden, width = *shape[:4], *fitting(kind, shape[4])
    h, down = draw(device, dtype, rows, slots, width), experts(device, kind, count, hidden, width)
    ids = some_ids(device, rows, slots, count)
    weights = draw(device, torch.float32, rows, slots, seed=5).softmax(-1)
    x = draw(device, torch.float32, rows, hidden, seed=3)
    agree("quantized_add_routed", h, down, ids, weights, x, limit=2 * PARITY[kind])


@KIND
def test_slots_that_stay_apart_are_what_is_added(device, kind):
    rows, slots, count, hidden, width = 3, 2, 4, 72, 160
    h, down = draw(device, torch.bfloat16, rows, slots, width), experts(device, kind, count, hidden, width)
    ids, weights = some_ids(device, rows, slots, count), draw(device, torch.float32, rows, slots, seed=5).softmax(-1)
    x = load("reference", "quantized_add_routed")(h, down, ids, weights, torch.zeros(rows, hidden, device=device))
    empty = torch.empty(rows, slots, hidden, device=device)
    *_, out = agree("quantized_routed_down", h, down, ids, weights, empty, limit=2 * PARITY[kind])
    same("slots", out.sum(1), x, 2 * PARITY[kind])


@pytest.mark.slow
@KIND
def test_a_row_gets_the_same_bits_in_any_batch(device, kind):
    rows, slots, count, (hidden, width) = 3, 2, 3, fitting(kind, 72, 20)
    x, norm = draw(device, torch.float32, rows, hidden), Norm(draw(device, torch.float32, hidden, seed=2), 1e-5)
    gate_up, down = experts(device, kind, count, 2 * width, hidden), experts(device, kind, count, hidden, width)
    ids, shares = some_ids(device, rows, slots, count), torch.full((rows, slots), 0.5, device=device)

    def mlp(of: slice) -> torch.Tensor:
        stream, gated = x[of].clone(), x.new_zeros(len(x[of]), slots, width)
        load("triton", "quantized_routed_gate_up")(stream, norm, gate_up, ids[of], gated)
        return load("triton", "quantized_add_routed")(gated, down, ids[of], shares[of], stream)

    together = mlp(slice(None))
    for row in range(rows):
        assert torch.equal(mlp(slice(row, row + 1))[0], together[row])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("unknown", [-1, 3])
def test_an_id_that_no_expert_has_makes_its_row_nan(device, source, unknown):
    x, norm = draw(device, torch.float32, 2, 64), Norm(torch.ones(64, device=device), 1e-5)
    ids = torch.tensor([[0, 1], [2, unknown]], device=device, dtype=torch.int32)
    out, shares = torch.zeros(2, 2, 16, device=device), torch.full((2, 2), 0.5, device=device)
    load(source, "quantized_routed_gate_up")(x, norm, experts(device, "int8", 3, 32, 64), ids, out)
    assert out.isnan().flatten(2).all(2).tolist() == [[False, False], [False, True]]
    load(source, "quantized_add_routed")(torch.zeros_like(out), experts(device, "int8", 3, 64, 16), ids, shares, x)
    assert x.isnan().all(1).tolist() == x.isnan().any(1).tolist() == [False, True]


def test_wrong_arguments_are_named(device):
    x, norm, ids = torch.zeros(2, 64, device=device), Norm(torch.ones(64, device=device), 1e-5), some_ids(device, 2, 2, 3)
    gate_up, down = experts(device, "int8", 3, 32, 64), experts(device, "int8", 3, 64, 16)
    out, shares = torch.zeros(2, 2, 16, device=device), torch.zeros(2, 2, device=device)
    refusals(
        "kernels/quantized_experts:wrong_arguments_are_named",
        lambda: kernels.routed_gate_up(x, norm._replace(offset=1.0), gate_up, ids, out),
        lambda: kernels.routed_gate_up(x, norm, gate_up, ids, out[..., :5].contiguous()),
        lambda: kernels.add_routed(out, down, ids, shares, x[:, :50].contiguous()),
        lambda: kernels.add_routed(out, down, ids.long(), shares, x),
    )
