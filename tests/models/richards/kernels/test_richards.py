"""Richards curves: the formula by plain arithmetic, its five gradients, both mirrors, far numbers. And the
gated unit of two curves, with its backward as an op."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from gpubound.kernels import plans
from gpubound.models.richards import kernels
from gpubound.models.richards.kernels.plans import StridePlan
from gpubound.models.richards.kernels.richards import GATE, LEAST, NAMES, POSITIVE, VALUE, Curve
from gpubound.models.richards.kernels.triton import _curve, richards as fast
from tests.kernels.cases import ROW_SHAPES, TOLERANCE, definitions, draw, parity, same
from tests.messages import message, refusal

reference = definitions("richards")

FP32, FP64 = torch.float32, torch.float64
CPU = torch.device("cpu")

# Together they learn all five, with and without tail.
CURVES = {
    "fixed": Curve(),
    "fixed, bent": Curve(nu=0.5, m=0.3),
    "free": Curve(("bias", "nu", "k", "gain", "m"), nu=1.3, k=0.8, m=-0.2, gain=1.5, bias=0.1),
    "shifted": Curve(("nu", "k", "m"), nu=0.7, k=1.2, m=-0.3, gain=2.2, bias=-0.9),
    "tail": Curve(("nu", "k", "m"), tail=True, nu=0.6, k=0.7, m=0.1),
    "Gompertz": Curve(("k", "m"), nu=0.01, m=math.log(0.01)),  # nearly e^(−e^−x)
}


def free_of(curve, device=CPU, dtype=FP32):
    return torch.tensor(curve.start(), device=device, dtype=dtype) if curve.learned else None


def by_hand(x: float, curve: Curve) -> float:
    """f(x) from the power that defines it."""
    n = {name: getattr(curve, name) for name in NAMES}
    steepness = n["k"] * n["nu"] if curve.tail else n["k"]
    y = math.pow(1 + math.exp(-steepness * (x - n["m"])), -1 / n["nu"])
    return n["gain"] * y + n["bias"]


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_the_definition_is_the_formula(curve):
    x = torch.linspace(-6, 6, 41, dtype=FP64)
    want = torch.tensor([by_hand(v, curve) for v in x.tolist()], dtype=FP64)
    torch.testing.assert_close(reference.richards(x, free_of(curve, dtype=FP64), curve), want, rtol=1e-12, atol=1e-14)


def test_the_defaults_are_the_logistic_sigmoid_and_tanh():
    x = torch.linspace(-9, 9, 61, dtype=FP64)
    torch.testing.assert_close(reference.richards(x, None, Curve()), x.sigmoid(), rtol=1e-14, atol=0)
    torch.testing.assert_close(reference.richards(x, None, Curve(k=2.0, gain=2.0, bias=-1.0)), x.tanh(), rtol=0, atol=4e-16)
    learned = Curve(("nu", "k", "m"), tail=True)
    torch.testing.assert_close(reference.richards(x, free_of(learned, dtype=FP64), learned), x.sigmoid(), rtol=1e-12, atol=0)
    limit = torch.exp(-torch.exp(-x))
    torch.testing.assert_close(reference.richards(x, None, replace(CURVES["Gompertz"], learned=())), limit, rtol=0, atol=3e-3)


@pytest.mark.parametrize("curve", [c for c in CURVES.values() if c.learned], ids=[n for n, c in CURVES.items() if c.learned])
def test_gradients_in_fp64(curve):
    """Of x, and of every number through `free`: nu and k are softplus of theirs, and LEAST."""
    x, free = draw(CPU, FP64, 2, 5).requires_grad_(), free_of(curve, dtype=FP64).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: reference.richards(*a, curve), (x, free))
    stepped = free.detach() + 0.3
    values = {
        name: LEAST + math.log1p(math.exp(u)) if name in POSITIVE else u for name, u in zip(curve.learned, stepped.tolist())
    }
    moved = replace(curve, learned=(), **values)
    want = torch.tensor([by_hand(v, moved) for v in x.flatten().tolist()], dtype=FP64).view_as(x)
    torch.testing.assert_close(reference.richards(x, stepped, curve).detach(), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_matches(name, device):
    """A Gompertz curve's nu divides a length by 0.01: of fp32's digits two are gone in both mirrors."""
    curve = CURVES[name]
    tolerance = 2e-5 if name == "Gompertz" else 2 * TOLERANCE[FP32]
    arguments = draw(device, FP32, 3, 63), free_of(curve, device), curve
    parity(fast.richards, reference.richards, arguments, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes_match(dtype, device):
    parity(fast.richards, reference.richards, (draw(device, dtype, 2, 5, 24), free_of(VALUE, device), VALUE), TOLERANCE[dtype])
    packed, frees = draw(device, dtype, 2, 5, 48), (free_of(VALUE, device), free_of(GATE, device))
    parity(fast.richards_glu, reference.richards_glu, (packed, *frees, VALUE, GATE), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", ROW_SHAPES[:4], ids=str)
def test_shapes_match(shape, device):
    packed, frees = draw(device, FP32, *shape[:-1], 2 * shape[-1]), (free_of(VALUE, device), free_of(GATE, device))
    parity(fast.richards_glu, reference.richards_glu, (packed, *frees, VALUE, GATE), 2 * TOLERANCE[FP32])


def test_curves_of_other_kinds_match(device):
    """One that learns nothing beside one that does, and what no gate of ours is."""
    x = draw(device, FP32, 3, 62)
    for first, second in (("tail", "fixed"), ("fixed, bent", "shifted")):
        a, b = CURVES[first], CURVES[second]
        arguments = x, free_of(a, device), free_of(b, device), a, b
        parity(fast.richards_glu, reference.richards_glu, arguments, 2 * TOLERANCE[FP32])


def test_with_an_open_gate_it_is_silu(device):
    """The value's is logistic, and the gate's 0 · σ + 1, which leaves x2 out."""
    x = draw(device, FP64, 4, 20)
    got = reference.richards_glu(x, None, None, Curve(), Curve(gain=0.0, bias=1.0))
    torch.testing.assert_close(got, torch.nn.functional.silu(x[:, :10]))


def test_programs_stride_over_tiles(device, monkeypatch):
    """Two programs, more tiles than that, none of them whole."""
    for reads, way in ((2, "forward"), (3, "backward")):
        monkeypatch.setitem(plans.TRIED, ("richards", way, (reads,)), StridePlan(32, 1, 1))
    packed, frees = draw(device, FP32, 5, 2 * 37), (free_of(VALUE, device), free_of(GATE, device))
    parity(fast.richards_glu, reference.richards_glu, (packed, *frees, VALUE, GATE), 2 * TOLERANCE[FP32])


@triton.jit
def _sigma_kernel(x_ptr, s_ptr, r_ptr, l_ptr, bent, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    sigma, r, length = _curve.sigma_of(tl.load(x_ptr + i), 1.0, 0.0, bent, DTYPE)
    tl.store(s_ptr + i, sigma)
    tl.store(r_ptr + i, r)
    tl.store(l_ptr + i, length)


@pytest.mark.parametrize("dtype, digits", [(tl.float32, 1.5e-7), (tl.float16, 1.5e-6), (tl.bfloat16, 6e-5)], ids=str)
def test_the_digits_of_each_dtype(dtype, digits, device):
    """Each element by itself, from 1e-6 to 100 and both signs. σ and r are exponentials: of what they are taken of, up to 120
    and 40 here, a rounding of 2^-24 and the error of the length are theirs."""
    x = torch.logspace(-6, 2, 32, device=device).repeat(2)
    x[32:] *= -1
    sigma, r, length = (torch.empty_like(x) for _ in range(3))
    _sigma_kernel[(1,)](x, sigma, r, length, -0.4, 64, dtype)
    exact = x.double()
    want = torch.logaddexp2(exact, torch.zeros_like(exact))
    torch.testing.assert_close(length.double(), want, rtol=digits, atol=1e-37)
    torch.testing.assert_close(sigma.double(), torch.exp2(-0.4 * want), rtol=40 * (digits + 6e-8), atol=1e-37)
    torch.testing.assert_close(r.double(), torch.exp2(exact - want), rtol=2 * digits + 1e-5, atol=1e-37)


@pytest.mark.parametrize("nu", [0.01, 30.0])
@pytest.mark.parametrize("tail", [False, True])
def test_far_numbers_stay_finite(nu, tail, device):
    """To |x| = 1e4 and nu = 0.01, where e^t is infinite and 1 / nu² 10,000; then every value is an end of the curve."""
    x = torch.tensor([-1e4, -300.0, -20.0, 0.0, 20.0, 300.0, 1e4], device=device)
    curve = Curve(("nu", "k", "m", "gain", "bias"), tail=tail, nu=nu)
    free = free_of(curve, device)
    parity(fast.richards, reference.richards, (x, free, curve), 2e-5)
    packed = torch.cat([x, x.flip(0)])[None]
    h, small = torch.tensor(CURVES["free"].start()), CURVES["free"]
    for op in (fast.richards_glu, reference.richards_glu):
        leaves = [t.clone().requires_grad_() for t in (packed, free, h.to(device))]
        y = op(*leaves, curve, small)
        assert all(t.isfinite().all() for t in (y, *torch.autograd.grad(y.sum(), leaves)))
    ends = reference.richards(x[[0, -1]], free, curve)
    torch.testing.assert_close(ends, torch.tensor([0.0, 1.0], device=device), rtol=0, atol=2e-6 + 0.02 * (nu > 1))


def test_gradients_are_added_to_main_grad_and_frozen_curves_are_left_alone(device):
    packed = draw(device, FP32, 3, 80)
    value, gate = (torch.nn.Parameter(free_of(c, device)) for c in (VALUE, GATE))
    wide = [t.detach().clone().requires_grad_() for t in (value, gate)]
    reference.richards_glu(packed, *wide, VALUE, GATE).sum().backward()
    value.main_grad, gate.main_grad = torch.ones_like(value), torch.ones_like(gate)
    fast.richards_glu(packed, value, gate, VALUE, GATE).sum().backward()
    assert value.grad is None and gate.grad is None
    same("value", value.main_grad - 1, wide[0].grad, 5e-6)
    same("gate", gate.main_grad - 1, wide[1].grad, 5e-6)
    del value.main_grad
    before = gate.main_grad.clone()
    fast.richards_glu(packed, value, gate.requires_grad_(False), VALUE, GATE).sum().backward()
    same("value", value.grad, wide[0].grad, 5e-6)
    assert gate.grad is None and gate.main_grad.equal(before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_backward_with_h_matches(dtype, device):
    wide = draw(device, dtype, 6, 300)
    dh, packed = wide[:, 7:57], wide[:, 100:200]  # rows with gaps
    frees = free_of(VALUE, device), free_of(GATE, device)
    got, want = (m.richards_glu_backward(dh, packed, *frees, VALUE, GATE) for m in (fast, reference))
    for name, a, b in zip(("gradient", "h", "value", "gate"), got, want):
        same(name, a, b, TOLERANCE[dtype] if a.dtype == dtype else 2e-5)


def test_backward_with_h_is_autograds_in_fp64():
    dh, packed = draw(CPU, FP64, 3, 7), draw(CPU, FP64, 3, 14, seed=1).requires_grad_()
    value, gate = (free_of(c, dtype=FP64).requires_grad_() for c in (CURVES["free"], CURVES["tail"]))
    x1, x2 = packed.chunk(2, -1)
    h = x1 * reference.richards(x1, value, CURVES["free"]) * reference.richards(x2, gate, CURVES["tail"])
    want = torch.autograd.grad(h, (packed, value, gate), dh)
    plain = (t.detach() for t in (packed, value, gate))
    gradient, again, *scalars = reference.richards_glu_backward(dh, *plain, CURVES["free"], CURVES["tail"])
    for name, a, b in zip(("h", "packed", "value", "gate"), (again, gradient, *scalars), (h.detach(), *want)):
        same(name, a, b, 1e-13)


WRONG = {
    "a text": (lambda: Curve("nu"), message("kernels/richards:a_text")),
    "unknown": (lambda: Curve(("nu", "slope")), message("kernels/richards:unknown")),
    "negative": (lambda: Curve(nu=0.0), message("kernels/richards:negative")),
    "no free": (lambda: kernels.richards(torch.ones(2, 4), None, GATE), message("kernels/richards:no_free")),
    "too many": (lambda: kernels.richards(torch.ones(2, 4), torch.ones(4), GATE), message("kernels/richards:too_many")),
    "odd": (lambda: kernels.richards_glu(torch.ones(2, 5), None, None, Curve(), Curve()), message("kernels/richards:odd")),
    "half": (
        lambda: kernels.richards_glu_backward(torch.ones(2, 3), torch.ones(2, 4), None, None, Curve(), Curve()),
        message("kernels/richards:half"),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    call, sentence = WRONG[what]
    assert refusal(ValueError, lambda: call()) == sentence
