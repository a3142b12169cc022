"""A frozen weight in codes: y, dx and what trains beside it are those of the numbers it stands for, in plain torch."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubound import layers
from gpubound.kernels.accumulate import record_of
from gpubound.layers.fused_weights import run_linear
from gpubound.layers.linear_product import linear
from gpubound.layers.quantized_base import Base, InFp8, InInt8, InNf4, dequantised

from .adapted import Adapted, low_rank
from .test_linear_product import draw, gradients

KINDS = [InNf4, InInt8, InFp8]
BY_DEFINITION = [InNf4, InInt8]  # they change the weight alone; fp8 rounds x and g too
OUTPUTS, INPUTS = 48, 128
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
exact = pytest.mark.parametrize("kind", BY_DEFINITION, ids=lambda kind: kind.name)


def layer_in(kind, outputs=OUTPUTS, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(INPUTS, outputs, bias=bias, dtype=dtype)
    Base(layer, kind)
    return layer


def numbers(*layers, dtype=torch.float32):
    return dequantised([layer.weight for layer in layers], dtype)


def run(layer, x):
    return linear(x, layer.weight, layer.bias)


@kinds
def test_codes_stand_for_the_weight(kind):
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS)
    before = layer.weight.detach().clone()
    Base(layer, kind)
    error = (numbers(layer) - before).norm() / before.norm()
    assert error < {"nf4": 0.1, "int8": 0.01, "fp8": 0.03}[kind.name]
    held = layer.weight.nbytes + sum(b.nbytes for b in layer.base.buffers())
    # of a weight this small, NF4's one offset and half-filled group of scales are a tenth of a bit; fp8 has a scale a row
    assert held * 8 / before.numel() < {"nf4": 4.2, "int8": 8.2, "fp8": 8.3}[kind.name]
    assert not layer.weight.requires_grad and not layer.weight.is_floating_point()


@exact
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_trains_on_top(kind, bias, shape):
    layer, x = layer_in(kind, bias=bias), draw(*shape, INPUTS).requires_grad_()
    adapter = low_rank(INPUTS, OUTPUTS)
    leaves = [x, *adapter.parameters]
    want = F.linear(x, numbers(layer), layer.bias) + adapter.plain(x)
    got = Adapted(layer, adapter)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(Adapted(layer, adapter)(x), want)


def in_8_bits(t, factor=1.0):
    """Each row over its own scale, in e4m3, as fp64 numbers."""
    t = t.double() * factor
    scale = t.abs().amax(1, keepdim=True) / 448
    return (t / scale).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_rounds_x_and_g_by_rows(bias):
    """Beside the formula in fp64, and not far from the product without that rounding: 2^-4 an element at most, at random."""
    layer, x = layer_in(InFp8, bias=bias), draw(7, INPUTS).requires_grad_()
    g, weight = draw(7, OUTPUTS, seed=9), numbers(layer, dtype=torch.float64)
    y = run(layer, x)
    (dx,) = torch.autograd.grad(y, [x], g)
    added = 0 if layer.bias is None else layer.bias.double()
    scale = layer.base.buffer("scale").double()
    assert torch.allclose(y.double(), in_8_bits(x) @ weight.t() + added, rtol=1e-4, atol=1e-4)
    assert torch.allclose(dx.double(), in_8_bits(g, scale) @ (weight / scale[:, None]), rtol=1e-4, atol=1e-4)
    assert (dx.double() - g.double() @ weight).norm() < 0.04 * dx.norm()
    assert (y.double() - x.double() @ weight.t() - added).norm() < 0.04 * y.norm()


def test_fp8_under_an_adapter():
    layer, x = layer_in(InFp8), draw(7, INPUTS).requires_grad_()
    alone = run(layer, x)
    (dx,) = gradients(alone, [x])
    adapter = low_rank(INPUTS, OUTPUTS)
    added = adapter.plain(x)
    more, *wanted = gradients(added, [x, *adapter.parameters])
    got = Adapted(layer, adapter)(x)
    torch.testing.assert_close(got, alone + added)
    torch.testing.assert_close(gradients(got, [x, *adapter.parameters]), [dx + more, *wanted], rtol=1e-5, atol=1e-5)


@kinds
def test_several_that_are_multiplied_as_one(kind):
    modules = nn.ModuleList(layer_in(kind, outputs, seed=outputs) for outputs in (48, 16, 32))
    x = draw(2, 3, INPUTS).requires_grad_()
    adapter = low_rank(INPUTS, 16)
    modules[1] = Adapted(modules[1], adapter)
    each = torch.cat([run_linear(module, x) for module in modules], -1)
    leaves = [x, *adapter.parameters]
    wanted = gradients(each, leaves)
    stacked = layers.Stacked()
    y = stacked.product(x, modules)
    assert y is not None and not stacked.fallbacks
    assert modules[0].weight.untyped_storage().data_ptr() == modules[2].weight.untyped_storage().data_ptr()
    torch.testing.assert_close(y, each)
    for i, (a, b) in enumerate(zip(gradients(y, leaves), wanted)):
        # fp8's g has one scale for all of a token's columns then, so that it is rounded otherwise
        limit = 0.05 * b.norm() if kind is InFp8 and i == 0 else 1e-5 * b.norm()
        assert (a - b).norm() <= limit


@kinds
def test_nothing_is_kept_but_what_an_adapter_needs(kind):
    layer, x, saved = layer_in(kind), draw(5, INPUTS).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(layer, x)
    assert not saved


@kinds
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_by_a_checkpoint(kind, reentrant):
    layer, x = layer_in(kind), draw(5, INPUTS).requires_grad_()
    wanted = gradients(run(layer, x), [x])
    y = checkpoint(lambda t: run(layer, t), x, use_reentrant=reentrant)
    y.backward(draw(*y.shape, seed=9))
    assert torch.equal(x.grad, wanted[0])


@kinds
@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits(kind, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    layer, x = layer_in(kind, dtype=dtype), draw(5, INPUTS, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = run(layer, x)
    want = F.linear(x.float(), numbers(layer), layer.bias.float())
    assert y.dtype == torch.bfloat16
    assert (y.float() - want).norm() < 0.05 * want.norm()
    (a,), (b,) = gradients(y.float(), [x]), gradients(want, [x])
    assert a.dtype == dtype and (a.float() - b.float()).norm() < 0.05 * b.float().norm()


@pytest.mark.slow
@kinds
def test_compiled_and_transformed_code_sees_the_numbers(kind):
    layer, x = layer_in(kind), draw(5, INPUTS).requires_grad_()
    want = F.linear(x, numbers(layer), layer.bias)
    compiled = torch.compile(lambda t: linear(t, layer.weight, layer.bias), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(*gradients(compiled, [x]), *gradients(want, [x]))
    torch.testing.assert_close(torch.func.vmap(lambda row: linear(row, layer.weight, layer.bias))(x), want)


@kinds
def test_codes_are_moved_copied_and_loaded_as_they_are(kind):
    layer, other, x = layer_in(kind), layer_in(kind, seed=1), draw(5, INPUTS)
    want = run(layer, x)
    copied, buffer = copy.deepcopy(layer), io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for one in (copied, torch.load(buffer, weights_only=False)):
        assert record_of(one.weight).format.base is one.base
        assert torch.equal(run(one, x), want)
    bits = [t.clone() for t in (layer.weight, *layer.base.buffers())]
    layer.to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(bits, (layer.weight, *layer.base.buffers())))
    for assign in (False, True):
        target = copy.deepcopy(other)
        target.load_state_dict(copied.state_dict(), assign=assign)
        assert torch.equal(run(target, x), want)
    assert not torch.equal(run(other, x), want)


@kinds
def test_what_holds_numbers_is_not_loaded_into_codes(kind):
    layer = layer_in(kind)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer.load_state_dict(nn.Linear(INPUTS, OUTPUTS).state_dict(), strict=strict)


@kinds
def test_what_does_not_ask_for_the_format_ends_in_an_error(kind):
    with pytest.raises(RuntimeError):
        F.linear(draw(5, INPUTS), layer_in(kind).weight)


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("tokens", [1, 37, 512])
def test_on_a_gpu(kind, tokens, device):
    """Any number of tokens, in bf16 and in fp16, which fp8's product does not give; eager and captured alike."""
    for dtype in (torch.bfloat16, torch.float16):
        layer = layer_in(kind, dtype=dtype).to(device)
        x = draw(tokens, INPUTS, dtype=dtype).to(device)
        g = draw(tokens, OUTPUTS, seed=9, dtype=dtype).to(device)

        def run_both():
            leaf = x.detach().requires_grad_()  # noqa: B023 (of the stream that captures)
            y = run(layer, leaf)  # noqa: B023
            return y.detach(), *torch.autograd.grad(y, [leaf], g)  # noqa: B023

        y, dx = run_both()
        weight = numbers(layer)
        want, wanted = F.linear(x.float(), weight, layer.bias.float()), g.float() @ weight
        limit = 0.04 if kind is InFp8 and dtype == torch.bfloat16 else 5e-3
        assert (y.float() - want).norm() < limit * want.norm() and (dx.float() - wanted).norm() < limit * wanted.norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_both()
        graph.replay()
        assert torch.equal(captured[0], y) and torch.equal(captured[1], dx)


@pytest.mark.gpu
def test_written_out_numbers_live_for_one_product(device):
    layers_there = [layer_in(InNf4, 4096, bias=False, dtype=torch.bfloat16).to(device) for _ in range(4)]
    x = torch.randn(8, INPUTS, device=device, dtype=torch.bfloat16, requires_grad=True)
    sum(run(layer, x).sum() for layer in layers_there).backward()  # the kernels are there
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sum(run(layer, x).sum() for layer in layers_there).backward()
    one = 2 * 4096 * INPUTS
    assert torch.cuda.max_memory_allocated() - before < 1.5 * one


def test_a_weight_as_numbers_again():
    layer, x = layer_in(InNf4), draw(5, INPUTS)
    want, weight = run(layer, x), layer.weight
    layer.base.dissolve()
    assert (
        layer.weight is weight and weight.dtype == torch.float32 and record_of(weight) is None and "base" not in layer._modules
    )
    torch.testing.assert_close(layer(x), want)
    again = layer_in(InNf4).to(torch.bfloat16)
    again.base.dissolve()
    assert again.weight.dtype == again.bias.dtype == torch.bfloat16, "as the model is now"
