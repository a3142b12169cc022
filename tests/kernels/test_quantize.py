"""Rounding to 8 bits: both mirrors agree in both layouts, the numbers are fp8's, infinity shows, errors read as written."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.triton import quantize as fast
from tests.messages import refusals

from .cases import definitions, draw, pairwise, same

reference = definitions("quantize")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 2), (16, 48), (130, 70), (33, 258)]  # beyond a tile's edge in rows, in columns
FP32 = torch.float32


def state(device, scale=0.02):
    return torch.tensor([scale, 0.0, 0.0, 0.0], device=device)


def agree(got, want):
    """Bit for bit, NaN for NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype
    a, b = got.float(), want.float()
    wrong = (a != b) & ~(a.isnan() & b.isnan())
    assert not wrong.any(), f"{a[wrong][:5]}, wanted {b[wrong][:5]}"


def pair(op, device, *arguments):
    """(q, q_t, seen) of both mirrors."""
    results = []
    for by in (fast, reference):
        own = state(device)
        results.append([*getattr(by, op)(*arguments[:-1], own, arguments[-1]), own])
    return results


@pairwise
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kind", [FP32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_matches(shape, kind, dtype, device):
    (q, q_t, now), (want, want_t, wanted) = pair("quantize", device, draw(device, kind, *shape), dtype)
    assert q.dtype == q_t.dtype == dtype
    agree(q, want)
    agree(q_t, want_t)
    assert torch.equal(now, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_matches(shape, device):
    """exp differs in the last bit of fp32, and a value on the border between two 8-bit numbers may go either way."""
    (q, q_t, now), (want, want_t, wanted) = pair("quantize_swiglu", device, draw(device, torch.float16, *shape), E4M3)
    assert torch.equal(q.float().t(), q_t.float()) and torch.equal(want.float().t(), want_t.float())
    same("q", q.float(), want.float(), 1e-2)
    same("seen", now, wanted, 1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_backward_matches(shape, device):
    dh, gate_up = draw(device, torch.float16, shape[0], shape[1] // 2, seed=1), draw(device, torch.float16, *shape)
    (q, q_t, now), (want, want_t, wanted) = pair("quantize_swiglu_backward", device, dh, gate_up, E5M2)
    assert q.shape == shape and torch.equal(q.float().t(), q_t.float()) and torch.equal(want.float().t(), want_t.float())
    same("q", q.float(), want.float(), 1e-2)
    same("seen", now, wanted, 1e-6)


def test_the_values_are_right(device):
    """Within half a step of fp8 of x / scale: 2^-4 of it in e4m3, 2^-3 in e5m2, wherever the format is not subnormal."""
    x = draw(device, FP32, 40, 50)
    for dtype, step in ((E4M3, 2**-4), (E5M2, 2**-3)):
        q, _ = reference.quantize(x, state(device), dtype)
        assert ((q.float() * 0.02 - x).abs() <= step * x.abs() + 0.02 * 2**-10).all()


def test_swiglu_and_its_backward_are_torchs(device):
    gate_up, dh = draw(device, FP32, 20, 60).requires_grad_(), draw(device, FP32, 20, 30, seed=1)
    gate, up = gate_up.chunk(2, 1)
    h = torch.nn.functional.silu(gate) * up
    (want,) = torch.autograd.grad(h, gate_up, dh)
    plain = gate_up.detach()
    same("h", reference.quantize_swiglu(plain, state(device), E4M3)[0].float() * 0.02, h.detach(), 4e-2)
    same("dgu", reference.quantize_swiglu_backward(dh, plain, state(device), E5M2)[0].float() * 0.02, want, 8e-2)


# The interpreter has no cast from NaN to fp8.
@pytest.mark.parametrize(
    "by", [pytest.param(fast, id="triton", marks=pytest.mark.gpu), pytest.param(reference, id="reference")]
)
def test_beyond_the_largest_is_the_largest_and_what_is_not_finite_is_nan(by, device):
    x = torch.tensor([[1e4, -1e4, float("inf"), float("-inf"), float("nan"), 448.0]], device=device)
    q, q_t = by.quantize(x, state(device, 1.0), E4M3)
    assert q.float()[0, [0, 1, 5]].tolist() == [448.0, -448.0, 448.0]
    assert q.float()[0, 2:5].isnan().all() and q_t.float()[2:5, 0].isnan().all()


def test_seen_is_the_largest_of_all_calls(device):
    own = state(device)
    for factor in (1.0, 3.0, 2.0):
        kernels.quantize(factor * draw(device, FP32, 200, 150), own, E4M3)
    assert own[1] == 3 * draw(device, FP32, 200, 150).abs().max()
    assert own[0] == torch.tensor(0.02)


@pairwise
@pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
@pytest.mark.parametrize("kind", [FP32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_rounded_over_a_scale_of_their_own(shape, scaled, kind, by, device):
    """Within half a step of x · factor, 2^-4 of it or 2^-10 of 1/448 of its row's largest; rows of very different sizes."""
    x = draw(device, FP32, *shape) * torch.logspace(-4, 4, shape[0], device=device)[:, None]
    x = x.to(kind)
    factor = draw(device, FP32, shape[1], seed=1) if scaled else None
    q, scale = by.quantize_rows(x, factor)
    want = x.double() * (1 if factor is None else factor.double())
    largest = want.abs().amax(1, keepdim=True)
    assert q.dtype == E4M3 and scale.shape == (shape[0], 1)
    torch.testing.assert_close(scale.double(), largest / 448, rtol=1e-6, atol=0)
    assert ((q.double() * scale.double() - want).abs() <= (2**-4 + 1e-6) * want.abs() + 2**-10 / 448 * largest).all()


def test_a_row_of_zeros_and_rows_that_are_not_finite(device):
    x = torch.zeros(3, 20, device=device)
    q, scale = fast.quantize_rows(x)
    assert not q.float().any() and (scale > 0).all()
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    q, scale = reference.quantize_rows(x)
    assert (q.float() * scale).sum(1).isnan().tolist() == [False, True, True]


def test_rows_with_gaps_over_their_own_scales(device):
    wide = draw(device, FP32, 20, 64)
    for x in (wide[:, 8:40], wide.t()):
        (got, scale), (want, wanted) = fast.quantize_rows(x), reference.quantize_rows(x)
        same("q", got.float(), want.float(), 1e-2)
        same("scale", scale, wanted, 1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (130, 70), (128, 256), (33, 258)], ids=str)
def test_transpose(shape, device):
    x = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    for by in (fast, reference, kernels):
        got = by.transpose(x)
        assert got.is_contiguous() and torch.equal(got, x.t())


def test_without_the_transpose(device):
    for by in (fast, reference):
        q, q_t = by.quantize(draw(device, FP32, 17, 33), state(device), E4M3, False)
        assert q_t is None
        agree(q, reference.quantize(draw(device, FP32, 17, 33), state(device), E4M3)[0])


def test_rows_with_gaps(device):
    """A slice of a wider matrix, and a transposed one, are read where they lie or copied, not misread."""
    wide = draw(device, FP32, 20, 64)
    for x in (wide[:, 8:40], wide.t()):
        got, want = fast.quantize(x, state(device), E4M3), reference.quantize(x, state(device), E4M3)
        agree(got[0], want[0])
        agree(got[1], want[1])


def test_wrong_arguments():
    x, own = torch.ones(2, 3), state("cpu")
    refusals(
        "kernels/quantize:wrong",
        lambda: kernels.quantize(torch.ones(3), own, E4M3),
        lambda: kernels.quantize(torch.ones(0, 3), own, E4M3),
        lambda: kernels.quantize_swiglu(x, own, E4M3),
        lambda: kernels.quantize(x, own, torch.int8),
        lambda: kernels.quantize(x, own.double(), E4M3),
        lambda: kernels.quantize_rows(x.long()),
        lambda: kernels.transpose(x),
        lambda: kernels.quantize_swiglu_backward(x, torch.ones(2, 4), own, E4M3),
    )
