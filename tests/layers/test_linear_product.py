"""A product's parts compose: an adapter trains over every format and accumulator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubound import layers
from gpubound.kernels.accumulate import ensure_record
from gpubound.layers.fp8 import Fp8, new_states
from gpubound.layers.fused_weights import run_linear
from gpubound.layers.linear_product import Format, linear, multiply_by_records, recipe_of
from gpubound.train import Accumulators

from .adapted import Adapted, draw, gradients, low_rank, recomputing

TOKENS, INPUTS, OUTPUTS, RANK = 16, 32, 48, 4


class Halved(Format):
    """The weight counts half."""

    def forward(self, x, joined):
        return F.linear(x, joined.weight / 2, joined.bias), ()

    def backward(self, g, x, kept, joined, wants_dx, wanted):
        return g @ joined.weight / 2 if wants_dx else None, [g.t() @ x / 2]


def low_rank_of(layer):
    return low_rank(layer.in_features, layer.out_features, dtype=layer.weight.dtype)


def layer_of(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype)


@pytest.mark.parametrize("base", ["frozen", "trains", "main_grad"])
def test_an_adapter_trains(base):
    layer, x = layer_of(), draw(2, 3, INPUTS).requires_grad_()
    layer.requires_grad_(base != "frozen")
    adapter = low_rank_of(layer)
    trained = [x, *adapter.parameters, *(layer.parameters() if base != "frozen" else ())]
    want = F.linear(x, layer.weight, layer.bias) + adapter.plain(x)
    wanted = gradients(want, trained)
    parameters = [*adapter.parameters, *(layer.parameters() if base == "main_grad" else ())]
    sums = Accumulators([(str(i), p) for i, p in enumerate(parameters)])
    for begin in (sums.begin, sums.zero):
        sums.gradient.fill_(float("nan"))  # a delivery that adds, where it should write, shows
        begin()
        y = linear(x, layer.weight, layer.bias, [adapter])
        assert y.grad_fn.name() == "_ProductBackward"
        torch.testing.assert_close(y, want)
        y.backward(draw(*y.shape, seed=9))
        sums.finish()
        for parameter, gradient in zip(trained, wanted):
            got = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
            torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)
            parameter.grad = None
    assert base != "frozen" or layer.weight.grad is None


def test_over_a_norms_result_that_is_computed_again():
    norm, layer, x = layers.RMSNorm(INPUTS), layer_of(), draw(TOKENS, INPUTS).requires_grad_()
    layer.requires_grad_(False)
    adapter = low_rank_of(layer)
    leaves = [x, norm.weight, *adapter.parameters]
    y = norm(x)
    wanted = gradients(F.linear(y, layer.weight, layer.bias) + adapter.plain(y), leaves)
    with recomputing(norm, 0):
        y = norm(x)
    assert recipe_of(y) is not None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = linear(y, layer.weight, layer.bias, [adapter])
    assert saved[0].data_ptr() == x.data_ptr() and saved[1].data_ptr() == norm.weight.data_ptr(), "kept for x: its origin"
    torch.testing.assert_close(gradients(got, leaves), wanted, rtol=1e-5, atol=1e-5)


def test_a_frozen_site_keeps_nothing():
    layer, x, saved = layer_of(), draw(TOKENS, INPUTS).requires_grad_(), []
    layer.requires_grad_(False)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x, layer.weight, layer.bias)
    assert not saved
    torch.testing.assert_close(*gradients(y, [x]), *gradients(layer(x), [x]))
    assert not layer.weight.main_grad.any()


@pytest.mark.parametrize("bias", [False, True])
def test_over_8_bits(bias):
    """The base in fp8, the adapter in 16 bits: what it adds is what it adds alone."""
    layer, x = layer_of(torch.bfloat16, bias), draw(TOKENS, INPUTS, dtype=torch.bfloat16).requires_grad_()
    (states,) = new_states(1, torch.device("cpu"))
    ensure_record(layer.weight).format = Fp8(states, lambda: True)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    g = draw(TOKENS, OUTPUTS, seed=9, dtype=torch.bfloat16)
    alone = linear(x, layer.weight, layer.bias)
    (dx,) = torch.autograd.grad(alone, [x], g)
    main = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    adapter = low_rank_of(layer)
    added = adapter.plain(x)
    more, *wanted = torch.autograd.grad(added, [x, *adapter.parameters], g)
    y = linear(x, layer.weight, layer.bias, [adapter])
    got, *theirs = torch.autograd.grad(y, [x, *adapter.parameters], g)
    torch.testing.assert_close(y, alone + added, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, dx + more, rtol=2e-2, atol=2e-2)
    assert torch.equal(layer.weight.main_grad, main)
    torch.testing.assert_close(theirs, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("where", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("eight", [False, True], ids=["16 bits", "8 bits"])
def test_no_fused_form_of_an_mlp_passes_an_adapter_by(where, eight):
    torch.manual_seed(0)
    mlp, x = layers.MLP(INPUTS, OUTPUTS, dtype=torch.bfloat16), draw(TOKENS, INPUTS, dtype=torch.bfloat16).requires_grad_()
    weights = [m.weight for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    for weight, states in zip(weights, new_states(3, torch.device("cpu"))):
        weight.main_grad = torch.zeros(weight.shape)
        ensure_record(weight).format = Fp8(states, lambda: True) if eight else None
    with recomputing(mlp, 0):
        assert mlp(x).grad_fn.name() == ("_GatedBackward" if eight else "_GatedDownBackward")
        adapter = low_rank_of(getattr(mlp, where))
        setattr(mlp, where, Adapted(getattr(mlp, where), adapter))
        y = mlp(x)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_by_a_checkpoint(reentrant):
    layer, x = layer_of(), draw(TOKENS, INPUTS).requires_grad_()
    layer.requires_grad_(False)
    adapter = low_rank_of(layer)
    sums = Accumulators([("a", adapter.a), ("b", adapter.b)])
    wanted = gradients(linear(x, layer.weight, layer.bias, [adapter]), [x])
    checkpoint(lambda t: linear(t, layer.weight, layer.bias, [adapter]), x, use_reentrant=reentrant).backward(
        draw(TOKENS, OUTPUTS, seed=9)
    )
    torch.testing.assert_close(x.grad, wanted[0])
    assert all(p.grad is None and p.main_grad.any() for p in adapter.parameters)
    sums.release()


def test_plain_layers_multiply_by_their_records_while_they_have_a_format():
    """Two callers ask for one nn.Linear of a model that is not ours: it gets its forward back when the format is gone."""
    layer, other, own = layer_of(), layer_of(), layer_of()
    own.forward = changed = lambda x: x
    model, x = nn.Sequential(layer, nn.ReLU(), own), draw(4, INPUTS)
    bare = layer(x)
    ensure_record(layer.weight).format = ensure_record(own.weight).format = Halved()
    first, second = multiply_by_records(model), multiply_by_records(model)
    first()
    assert torch.allclose(layer(x), (bare - layer.bias) / 2 + layer.bias, atol=1e-6) and "forward" not in vars(other)
    ensure_record(layer.weight).format = ensure_record(own.weight).format = None
    second()
    assert "forward" not in vars(layer) and torch.equal(layer(x), bare) and own.forward is changed


@pytest.mark.slow
def test_compiled_and_transformed_code_sees_the_adapter():
    layer, x = layer_of(), draw(TOKENS, INPUTS).requires_grad_()
    adapter = low_rank_of(layer)
    want = linear(x, layer.weight, layer.bias, [adapter])
    leaves = [x, layer.weight, *adapter.parameters]
    wanted = gradients(want, leaves)

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return linear(x, self.layer.weight, self.layer.bias, [adapter])

    compiled = torch.compile(Calls(), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(gradients(compiled, leaves), wanted, rtol=1e-5, atol=1e-5)
    each = torch.func.vmap(lambda row: linear(row, layer.weight, layer.bias, [adapter]))(x)
    torch.testing.assert_close(each, want)


def test_in_autocast():
    layer, x = layer_of(), draw(TOKENS, INPUTS).requires_grad_()
    adapter = low_rank_of(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, layer.weight, layer.bias, [adapter])
        want = layer(x) + adapter.plain(x)
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
    leaves = [x, layer.weight, *adapter.parameters]
    torch.testing.assert_close(gradients(y, leaves), gradients(want, leaves), rtol=3e-2, atol=1e-1)


@pytest.mark.parametrize("owner", ["plain", "main_grad", "adapter"])
@pytest.mark.parametrize("call", ["linear", "stacked", "mlp"])
def test_an_input_of_another_dtype_is_refused_without_autocast(owner, call):
    """With a main_grad the weight was silently cast, without one torch raised."""
    layer = {
        "linear": nn.ModuleDict({"only": layer_of()}),
        "stacked": layers.Attention(INPUTS, 2),
        "mlp": layers.MLP(INPUTS, OUTPUTS),
    }[call]
    for name, projection in list(layer.named_children()):
        if owner == "main_grad":
            projection.weight.main_grad = torch.zeros_like(projection.weight)
        elif owner == "adapter":
            setattr(layer, name, Adapted(projection, low_rank_of(projection)))
    run = {"linear": lambda x: run_linear(layer.only, x), "stacked": lambda x: layer(x, None), "mlp": layer}[call]
    x = draw(1, 3, INPUTS, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        run(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.bfloat16
    assert run(x.float()).dtype == torch.float32
