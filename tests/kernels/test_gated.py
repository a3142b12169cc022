"""SwiGLU and GeGLU: both mirrors agree, packed and apart, views are read in place, large gates stay finite, errors read as
written. SwiGLU's backward with h again: both mirrors agree, both are autograd's. So for both with the product before them."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels.triton import gated as fast
from tests.messages import refusals

from .cases import ROW_SHAPES, TOLERANCE, definitions, draw, no_copies, pairwise, parity, same

reference = definitions("gated")

FP32, CPU = torch.float32, torch.device("cpu")
FORMS = {"silu": ("swiglu",), "tanh": ("geglu", "tanh"), "erf": ("geglu", "none")}
FORM = pytest.mark.parametrize("form", FORMS)


def call(f, options, gate, up):
    return f(gate, up, *options)


def both(form):
    """The kernel's function and the definition, of (gate, up)."""
    name, *options = FORMS[form]
    return [partial(call, getattr(of, name), options) for of in (fast, reference)]


@pairwise
@FORM
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(7,), *ROW_SHAPES], ids=str)
def test_it_matches(shape, dtype, form, device):
    gate, up = draw(device, dtype, *shape), draw(device, dtype, *shape, seed=1)
    parity(*both(form), (gate, up), TOLERANCE[dtype])
    parity(*both(form), (torch.cat([gate, up], -1), None), TOLERANCE[dtype])


@FORM
def test_reference_gradients_in_fp64(form):
    _, definition = both(form)
    gate, up = (draw(CPU, torch.float64, 3, 4, seed=i).requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(definition, (gate, up))
    assert torch.autograd.gradcheck(lambda packed: definition(packed, None), gate)
    if form == "silu":
        assert torch.autograd.gradcheck(lambda g, u: reference.swiglu(g, u, 0.5), (gate, up))


@FORM
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_stay_finite(form, device):
    """Exponentials, and gelu's cube, overflow to infinity on the way: the value must still be 0 on the left and the gate on the
    right, its slope 0 and 1."""
    gate = torch.tensor([-1e4, -100.0, -20.0, -5.0, 0.0, 5.0, 20.0, 100.0, 1e4], device=device)
    parity(*both(form), (gate, torch.ones_like(gate)), TOLERANCE[FP32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2,), (3, 126), (2, 5, 64), (3, 1400)], ids=str)
def test_pairs_of_gate_and_up(shape, dtype, device):
    """Values within, at and beyond the limit, which both mirrors clamp before all else."""
    packed = draw(device, dtype, *shape)
    packed.flatten()[:2] = 0.75
    parity(*(partial(of.clamped_glu, alpha=1.702, limit=0.75) for of in (fast, reference)), (packed,), TOLERANCE[dtype])


def test_pairs_by_their_formula():
    packed = (2 * draw(CPU, torch.float64, 3, 8)).requires_grad_()
    gate, up = packed.detach().unflatten(-1, (4, 2)).unbind(-1)
    gate, up = gate.minimum(torch.tensor(1.5)), up.maximum(torch.tensor(-1.5)).minimum(torch.tensor(1.5))
    same("y", reference.clamped_glu(packed, 1.7, 1.5), (up + 1) * gate / (1 + (-1.7 * gate).exp()), 1e-15)
    assert torch.autograd.gradcheck(lambda packed: reference.clamped_glu(packed, 1.7, 1.5), packed)


def test_rows_wider_than_a_program(device):
    parity(fast.swiglu, reference.swiglu, (draw(device, FP32, 2, 2 * 2100), None), TOLERANCE[FP32])


def test_dense_rows_that_fill_tiles_together(device):
    """Three rows of 2048 are twelve tiles of 512, whatever their width: no tile is half empty."""
    arguments = draw(device, FP32, 3, 2048), draw(device, FP32, 3, 2048, seed=1)
    assert [x.shape for x in fast._even(list(arguments), 512)] == [(12, 512)] * 2
    parity(fast.swiglu, reference.swiglu, arguments, TOLERANCE[FP32])


def test_reference_is_the_formula():
    gate, up = draw(torch.device("cpu"), torch.float64, 40), draw(torch.device("cpu"), torch.float64, 40, seed=1)
    want = gate / (1 + (-gate).exp()) * up
    same("apart", reference.swiglu(gate, up), want, 1e-15)
    same("packed", reference.swiglu(torch.cat([gate, up])), want, 1e-15)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_limited(packed, dtype, device):
    """A gate from above alone, up from both sides; what lies beyond the limit gets no gradient. A NaN stays one."""
    gate, up = draw(device, dtype, 5, 24), draw(device, dtype, 5, 24, seed=1)
    given = (torch.cat([gate, up], -1), None) if packed else (gate, up)
    parity(fast.swiglu, reference.swiglu, (*given, 0.6), TOLERANCE[dtype])
    gate, up = gate.double(), up.double()
    assert (gate < -0.6).any() and (gate > 0.6).any() and (up < -0.6).any() and (up > 0.6).any()
    low, within = torch.where(gate > 0.6, 0.6, gate), torch.where(up.abs() > 0.6, 0.6 * up.sign(), up)
    want = low / (1 + (-low).exp()) * within
    same("formula", fast.swiglu(*given, 0.6).double(), want, TOLERANCE[dtype])
    assert fast.swiglu(torch.full((1, 2), float("nan"), device=device), None, 0.6).isnan().all()


def test_views_are_read_where_they_lie(device):
    wide = draw(device, FP32, 2, 3, 40)
    gate, up = wide[..., 3:12].requires_grad_(), wide[..., 20:29].requires_grad_()
    want = reference.swiglu(gate, up)
    upstream = draw(device, FP32, 2, 3, 18, seed=2)[..., 9:]
    wanted = (want, *torch.autograd.grad(want, (gate, up), upstream))

    with no_copies():
        got = fast.swiglu(gate, up)
        gradients = torch.autograd.grad(got, (gate, up), upstream)
    for name, a, b in zip(("out", "dgate", "dup"), (got, *gradients), wanted):
        same(name, a, b, TOLERANCE[FP32])


def test_other_strides(device):
    parity(fast.swiglu, reference.swiglu, (draw(device, FP32, 8, 5).t(), None), TOLERANCE[FP32])
    packed = draw(device, FP32, 4, 6).requires_grad_()
    (got,) = torch.autograd.grad(fast.swiglu(packed).sum(), packed)  # sum's gradient is one number, expanded
    same("dpacked", got, torch.autograd.grad(reference.swiglu(packed).sum(), packed)[0], TOLERANCE[FP32])


def test_backward_twice(device):
    packed = draw(device, FP32, 3, 8).requires_grad_()
    before = packed.detach().clone()
    out = fast.swiglu(packed)
    first, second = (torch.autograd.grad(out.sum(), packed, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second) and packed.equal(before), "backward must not write into what it saved"


def test_wrong_arguments():
    x = torch.ones(2, 4)
    refusals(
        "kernels/gated:wrong_arguments",
        lambda: kernels.swiglu(x, None, 0.0),
        lambda: kernels.swiglu(x.long()),
        lambda: kernels.swiglu(torch.ones(2, 5)),
        lambda: kernels.swiglu(x, torch.ones(2, 3)),
        lambda: kernels.swiglu(x, x.half()),
        lambda: kernels.swiglu_backward(torch.ones(2, 3), x),
        lambda: kernels.swiglu_product(x, torch.ones(6, 3)),
        lambda: kernels.swiglu_product_backward(x, torch.ones(4, 3), torch.ones(2, 4)),
        lambda: kernels.geglu(x, approximate="erf"),
        lambda: kernels.geglu(torch.ones(3)),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 5, 128), (3, 1500), (0, 64)], ids=str)
def test_backward_with_h_matches(shape, dtype, device):
    dh, gate_up = draw(device, dtype, *shape), draw(device, dtype, *shape[:-1], 2 * shape[-1], seed=1)
    op = fast if dh.numel() else kernels
    for name, got, want in zip(("gradient", "h"), op.swiglu_backward(dh, gate_up), reference.swiglu_backward(dh, gate_up)):
        same(name, got, want, TOLERANCE[dtype])


def test_backward_with_h_reference_is_autograds_in_fp64():
    dh, gate_up = draw("cpu", torch.float64, 3, 7), draw("cpu", torch.float64, 3, 14, seed=1).requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    h = F.silu(gate) * up
    gradient, again = reference.swiglu_backward(dh, gate_up.detach())
    same("gradient", gradient, torch.autograd.grad(h, gate_up, dh)[0], 1e-14)
    same("h", again, h.detach(), 1e-14)


def test_backward_with_h_h_is_the_forwards_bit_for_bit(device):
    """So nothing changes for a product whose h is computed again instead of kept."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gate_up = draw(device, dtype, 5, 200)
        assert torch.equal(kernels.swiglu_backward(draw(device, dtype, 5, 100), gate_up)[1], kernels.swiglu(gate_up))


def test_backward_with_h_in_the_memory_of_its_arguments(device):
    """A program has read its tiles before it writes others in their place: the bits of new memory. Rows with gaps stay."""
    for dtype, shape in ((torch.bfloat16, (3, 1500)), (torch.float32, (7, 63)), (torch.bfloat16, (2048, 4096))):
        if device.type == "cpu" and shape[0] > 7:
            continue
        dh, gate_up = draw(device, dtype, *shape), draw(device, dtype, shape[0], 2 * shape[1], seed=1)
        before, want = [dh.clone(), gate_up.clone()], fast.swiglu_backward(dh, gate_up)
        assert torch.equal(dh, before[0]) and torch.equal(gate_up, before[1])
        got = fast.swiglu_backward(dh, gate_up, overwrite=True)
        assert all(map(torch.equal, got, want)) and [t.data_ptr() for t in got] == [gate_up.data_ptr(), dh.data_ptr()]
    apart, wide = draw(device, torch.float32, 6, 100)[:, :50], draw(device, torch.float32, 6, 200)[:, :100]
    before = apart.clone(), wide.clone()
    fast.swiglu_backward(apart, wide, overwrite=True)
    assert torch.equal(apart, before[0]) and torch.equal(wide, before[1])


def test_backward_with_h_rows_with_gaps(device):
    wide = draw(device, torch.float32, 6, 300)
    dh, gate_up = wide[:, 7:57], wide[:, 100:200]
    for got, want in zip(fast.swiglu_backward(dh, gate_up), reference.swiglu_backward(dh, gate_up)):
        same("result", got, want, 2e-6)


PRODUCTS = [(7, 24, 40), (16, 64, 128), (4096, 128, 256), (4099, 64, 128), (4200, 192, 640)]
"""Rows, inputs, and columns of h: of 4,096 rows or more Hopper has a kernel."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_product_and_unit_match(sizes, dtype, device):
    rows, width, cols = sizes
    if device.type == "cpu" and rows >= 4096:
        pytest.skip("the kernel that these are for is a GPU's")
    scale = width**-0.5
    x, weight = draw(device, dtype, rows, width), scale * draw(device, dtype, 2 * cols, width, seed=1)
    g, down = draw(device, dtype, rows, width, seed=2), scale * draw(device, dtype, width, cols, seed=3)
    results = {of: [*of.swiglu_product(x, weight)] for of in (fast, reference)}
    packed = results[reference][0]
    for of, found in results.items():
        found += of.swiglu_product_backward(g, down, packed.clone())
    for name, got, want in zip(("gate_up", "h", "gradient", "h again"), results[fast], results[reference]):
        same(name, got, want, 3 * TOLERANCE[dtype])
    kept, again = packed.clone(), packed.clone()
    overwritten = fast.swiglu_product_backward(g, down, again, overwrite=True)
    assert overwritten[0].data_ptr() == again.data_ptr() and torch.equal(packed, kept)
    assert all(map(torch.equal, overwritten, results[fast][2:]))


@pytest.mark.gpu
def test_hopper_takes_its_kernels(device, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper")
    from gpubound.kernels.triton import _gated_product

    taken = []
    for name in ("swiglu_product", "swiglu_product_backward"):
        kernel = getattr(_gated_product, name)
        monkeypatch.setattr(_gated_product, name, lambda *a, name=name, kernel=kernel: taken.append(name) or kernel(*a))
    x, weight = draw(device, torch.bfloat16, 4096, 128), draw(device, torch.bfloat16, 512, 128, seed=1)
    packed, h = kernels.swiglu_product(x, weight)
    kernels.swiglu_product_backward(x, weight[:256].t().contiguous(), packed)
    assert {*taken} == {"swiglu_product", "swiglu_product_backward"}
    assert torch.equal(h, kernels.swiglu(packed))


def test_product_references_are_autograds_in_fp64():
    x, g = (draw("cpu", torch.float64, 3, 5, seed=i) for i in range(2))
    weight, down = draw("cpu", torch.float64, 14, 5, seed=2), draw("cpu", torch.float64, 5, 7, seed=3)
    packed = (x @ weight.t()).requires_grad_()
    h = F.silu(packed[:, :7]) * packed[:, 7:]
    same("packed", reference.swiglu_product(x, weight)[0], packed.detach(), 1e-14)
    same("h", reference.swiglu_product(x, weight)[1], h.detach(), 1e-14)
    gradient, again = reference.swiglu_product_backward(g, down, packed.detach())
    same("gradient", gradient, torch.autograd.grad(h @ down.t(), packed, g)[0], 1e-14)
    same("h again", again, h.detach(), 1e-14)


def test_reference_is_the_formula_geglu():
    gate, up = draw(CPU, torch.float64, 40), draw(CPU, torch.float64, 40, seed=1)
    normal = torch.tensor([0.5 * (1 + math.erf(g / math.sqrt(2))) for g in gate.tolist()], dtype=torch.float64)
    same("none", reference.geglu(gate, up, "none"), gate * normal * up, 1e-15)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    same("tanh", reference.geglu(torch.cat([gate, up])), gate * (1 + tanh) / 2 * up, 1e-15)


def test_door(device):
    packed = draw(device, FP32, 4, 10)
    same("packed", kernels.geglu(packed, approximate="none"), reference.geglu(packed, None, "none"), TOLERANCE[FP32])
    same("apart", kernels.geglu(packed, packed), reference.geglu(packed, packed), TOLERANCE[FP32])
