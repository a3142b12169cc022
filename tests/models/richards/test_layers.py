"""The gated MLP of two Richards curves, and what stands in a norm's place: against plain torch, kept or computed again, in a
step's accumulators."""

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.layers.linear_product import linear
from gpubound.models.richards.kernels.richards import GATE, VALUE, Curve
from gpubound.models.richards.layers import DynamicTanh, RichardsCurve, RichardsGLU, richards_glu_calls
from gpubound.train import Accumulators
from tests.layers.adapted import recomputing

from . import plain

FP64 = torch.float64
HIDDEN, WIDTH = 6, 10
MOVED = 0.3  # added to every learned number, so that none is at its default


def x_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def moved(module):
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim == 1:
                p.add_(MOVED)
    return module


def glu() -> RichardsGLU:
    torch.manual_seed(0)
    return moved(RichardsGLU(HIDDEN, WIDTH, dtype=FP64))


def plain_glu(module, x):
    return plain.richards_glu(None, {f"mlp.{name}": p for name, p in module.named_parameters()}, x)


def plain_norm(module, x):
    return plain.dyt(None, dict(module.named_parameters()), "", x)


def agree(got, want, module, x):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    leaves, upstream = [x, *module.parameters()], x_of(*got.shape, seed=9)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("least, function", [(float("inf"), "MmBackward0"), (0, "_GatedDownBackward")], ids=["kept", "again"])
def test_the_mlp_is_the_formula_with_all_gradients(least, function):
    module, x = glu(), x_of(5, HIDDEN).requires_grad_()
    with recomputing(module, least):
        y = module(x)
    assert y.grad_fn.name() == function
    agree(y, plain_glu(module, x), module, x)


def test_one_layer_by_itself_and_a_frozen_one_behave_alike():
    """A hook on a layer ends the common product, and a curve that is frozen gets no gradient while the rest trains."""
    module, x = glu(), x_of(2, 3, HIDDEN).requires_grad_()
    want = plain_glu(module, x)
    module.up_proj.register_forward_hook(lambda *a: None)
    agree(module(x), want, module, x)
    module.gate.free.requires_grad_(False)
    for least in (0, float("inf")):
        with recomputing(module, least):
            module(x).sum().backward()
        assert module.gate.free.grad is None and module.value.free.grad.abs().min() > 0


@pytest.mark.parametrize("least", [float("inf"), 0], ids=["kept", "again"])
def test_the_numbers_of_curves_are_summed_in_fp32_accumulators(least):
    """Two micro-batches, of which the first writes over what is there."""
    module = glu().float()
    batches = [x_of(4, HIDDEN, seed=i).float() for i in range(2)]
    (torch.stack([plain_glu(module, x).sum() for x in batches]).sum()).backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    sums = Accumulators(list(module.named_parameters()))
    sums.gradient.fill_(float("nan"))
    sums.begin()
    with recomputing(module, least):
        for x in batches:
            module(x).sum().backward()
    sums.finish()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.main_grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_a_step_trains_the_numbers():
    """AdamW's first step moves each parameter by the learning rate, against the sign of its gradient."""
    torch.manual_seed(0)
    model, x = nn.Sequential(DynamicTanh(8), RichardsGLU(8, 16), DynamicTanh(8)), x_of(4, 8).float()
    norm, mlp, tanh = model
    y = plain_glu(mlp, plain_norm(norm, x))
    plain_norm(tanh, y).square().sum().backward()
    signs = {name: (p.detach().clone(), p.grad.sign()) for name, p in model.named_parameters()}
    model.zero_grad()
    step = gb.TrainStep(
        model, lambda m, b: (m(b["x"]).square().sum(), 1), gb.train.AdamW(lr=1e-3, weight_decay=0.0), precision="fp32"
    )
    step({"x": x})
    for name, p in model.named_parameters():
        before, sign = signs[name]
        torch.testing.assert_close(p.detach(), before - 1e-3 * sign, rtol=0, atol=2e-5, msg=name)


def test_values_are_those_in_use():
    curve = RichardsCurve(Curve(("nu", "m"), nu=0.7, m=0.2, k=1.5))
    assert curve.values() == pytest.approx({"nu": 0.7, "k": 1.5, "m": 0.2, "gain": 1, "bias": 0}, abs=1e-6)
    assert repr(curve) == "RichardsCurve(learns nu, m)"
    assert curve.bfloat16().values()["nu"] == pytest.approx(0.7, abs=4e-3)
    nothing = RichardsCurve(Curve())
    assert not list(nothing.parameters()) and nothing.values()["nu"] == 1
    x = x_of(3, 4)
    torch.testing.assert_close(nothing(x), x.sigmoid())


def test_numbers_stay_in_fp32_beside_16_bit_weights():
    module = RichardsGLU(8, 16, dtype=torch.bfloat16)
    assert {p.dtype for p in (module.value.free, module.gate.free)} == {torch.float32}
    assert DynamicTanh(8, dtype=torch.bfloat16).alpha.dtype == torch.float32
    assert module(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_norms_two_methods():
    module = moved(DynamicTanh(HIDDEN, dtype=FP64))
    x, pending = x_of(2, 3, HIDDEN).requires_grad_(), x_of(2, 3, HIDDEN, seed=2)
    agree(module(x), plain_norm(module, x), module, x)
    assert module.add(x, None)[1] is x
    y, stream = module.add(x, pending)
    agree(y, plain_norm(module, x + pending), module, x)
    torch.testing.assert_close(stream, x + pending)
    assert module.add(x.float(), pending.bfloat16())[1].dtype == torch.float32


def test_a_product_behind_one_has_its_result_again():
    """What it keeps is the stream, not the norm's result; and the weight's gradient is the same to the last bit."""
    torch.manual_seed(0)
    module, x, pending = moved(DynamicTanh(HIDDEN, dtype=FP64)), x_of(4, HIDDEN).requires_grad_(), x_of(4, HIDDEN, seed=2)
    layer, found = nn.Linear(HIDDEN, 5, dtype=FP64), []
    layer.weight.main_grad = torch.zeros(5, HIDDEN)  # so that the product is ours
    for least in (float("inf"), 0):
        with recomputing(module, least):
            y, stream = module.add(x, pending)
        z = linear(y, layer.weight)
        kept = {t.data_ptr() for t in z.grad_fn.saved_tensors if t is not None}
        assert (stream.data_ptr() in kept, y.data_ptr() in kept) == ((False, True) if least else (True, False))
        layer.weight.main_grad.zero_()
        z.square().sum().backward()
        found.append(layer.weight.main_grad.clone())
    assert found[0].any() and torch.equal(*found)


def test_a_placement_names_what_runs():
    """One row a layer: the numbers of a curve inside one have none, for no kernel is theirs alone."""
    model = nn.Sequential(DynamicTanh(8), RichardsGLU(8, 16), DynamicTanh(8), RichardsCurve(Curve(("nu",))))
    assert [(row.module, row.kernel) for row in gb.place(model, device="cpu").rows] == [
        ("0", "reference dynamic_tanh, add_dynamic_tanh"),
        ("1", "gate and up as one product; reference richards_glu"),
        ("2", "reference dynamic_tanh, add_dynamic_tanh"),
        ("3", "reference richards"),
    ]


def test_what_a_first_step_will_call():
    (forward, shape), (backward, again) = richards_glu_calls(WIDTH)
    assert (forward, backward) == ("richards_glu", "richards_glu_backward")
    assert shape == again == (WIDTH, VALUE, GATE)
