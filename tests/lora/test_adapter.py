"""The low-rank adapter as a part of a linear site: gradients, joining, accumulators, dropout, what it keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubound.kernels import lora as lora_ops
from gpubound.layers import Stacked, linear_product
from gpubound.lora import adapter, add, parameters
from gpubound.lora.adapter import LowRank, LowRankGroup
from gpubound.train import Accumulators

from ..layers import adapted
from ..layers.adapted import Adapted, draw, gradients

K, RANK = 24, 4


def frozen(outputs, dtype=torch.float32, bias=True):
    torch.manual_seed(outputs)
    return Adapted(nn.Linear(K, outputs, bias=bias, dtype=dtype).requires_grad_(False))


def low_rank(layer, seed=1, rank=RANK, scale=0.5, dropout=0.0, dtype=None):
    """Add one more adapter to the layer."""
    dtype, (outputs, inputs) = dtype or layer.weight.dtype, layer.weight.shape
    layer.adapters.append(adapted.low_rank(inputs, outputs, rank, seed, dtype, scale, dropout))
    return layer.adapters[-1]


def formula(layer, x, *lows):
    """PEFT's form, by autograd."""
    y = F.linear(x, layer.weight, layer.bias)
    for low in lows:
        y = y + (x @ low.a.to(x.dtype).t()) @ low.b.to(x.dtype).t() * low.scale
    return y


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (2, 2, 2, K), (0, K), (1, K)], ids=str)
@pytest.mark.parametrize("outputs", [8, K, 40])
@pytest.mark.parametrize("rank", [1, RANK])
def test_it_is_the_formula(shape, outputs, rank):
    layer, x = frozen(outputs), draw(*shape).requires_grad_()
    low = low_rank(layer, rank=rank)
    leaves = [x, low.a, low.b]
    got, want = layer(x), formula(layer, x, low)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (0, K)], ids=str)
def test_where_one_kernel_multiplies_and_adds(shape, dropout, monkeypatch):
    """In the interpreter: y's and dx's products take the narrow ones in, the numbers stay, and dropout's mask."""
    layers, x = nn.ModuleList(frozen(outputs) for outputs in (8, 16)), draw(*shape).requires_grad_()
    lows, stacked = [low_rank(layer, i, dropout=dropout) for i, layer in enumerate(layers)], Stacked()
    leaves = [x, *(p for low in lows for p in low.parameters)]
    products, product = [], linear_product.lora_product

    monkeypatch.setattr(
        linear_product, "lora_product", lambda *given, rows: products.append(rows) or product(*given, rows=rows)
    )
    found = []
    for interpret in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        torch.manual_seed(3)
        y = torch.cat([layers[0](x), stacked.product(x, layers)], -1)
        with torch.no_grad():
            torch.manual_seed(3)
            without = layers[0](x)
        found.append([y, without, *gradients(y, leaves)])
        assert len(products) == (4 if interpret == "1" else 0), "y of one weight, with and without gradients, and dx of both"
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_gradients_in_fp64():
    layer = frozen(6, torch.float64)
    low = low_rank(layer)
    x = draw(3, K, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, b: layer(x), (x, low.a, low.b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapters", [torch.float32, None], ids=["fp32 adapter", "16-bit adapter"])
def test_sixteen_bits(dtype, adapters):
    layer, x = frozen(16, dtype), draw(12, K, dtype=dtype).requires_grad_()
    low = low_rank(layer, dtype=adapters)
    got = layer(x)
    leaves = [x, low.a, low.b]
    assert got.dtype == dtype
    wide, exact = frozen(16, dtype).float(), x.detach().float().requires_grad_()
    a, b = (p.detach().float().requires_grad_() for p in low.parameters)
    want = formula(wide, exact, LowRank(a, b, low.scale))
    torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)
    for p, gradient, truth in zip(leaves, gradients(got, leaves), gradients(want, [exact, a, b])):
        assert gradient.dtype == p.dtype
        assert (gradient.float() - truth).norm() <= 2e-2 * truth.norm()


def test_several_on_one_weight():
    layer, x = frozen(8), draw(5, K).requires_grad_()
    lows = [low_rank(layer, 1), low_rank(layer, 2, rank=2), low_rank(layer, 3, scale=2.0)]
    leaves = [x, *(p for low in lows for p in low.parameters)]
    got, want = layer(x), formula(layer, x, *lows)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves), rtol=1e-5, atol=1e-5)


def test_weights_that_are_multiplied_as_one_read_x_once(monkeypatch):
    """q, k and v: two of them adapted, one of those twice, with one scale; and one with another scale, apart."""
    layers = nn.ModuleList(frozen(outputs) for outputs in (16, 8, 8))
    lows = [low_rank(layers[0], 1), low_rank(layers[2], 2, rank=2), low_rank(layers[2], 3), low_rank(layers[1], 4, scale=3.0)]
    x = draw(2, 3, K).requires_grad_()
    want = torch.cat([formula(layers[0], x, lows[0]), formula(layers[1], x, lows[3]), formula(layers[2], x, *lows[1:3])], -1)
    leaves = [x, *(p for low in lows for p in low.parameters)]
    groups, init = [], LowRankGroup.__init__
    monkeypatch.setattr(LowRankGroup, "__init__", lambda self, members: groups.append(len(members)) or init(self, members))
    got = Stacked().product(x, layers)
    assert sorted(groups) == [1, 3]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves), rtol=1e-5, atol=1e-5)


def test_what_is_frozen_gets_no_gradient():
    layers = nn.ModuleList(frozen(8) for _ in range(2))
    lows = [low_rank(layer, i) for i, layer in enumerate(layers)]
    lows[0].a.requires_grad_(False)
    lows[1].b.requires_grad_(False)
    x = draw(5, K)
    want = torch.cat([formula(layer, x, low) for layer, low in zip(layers, lows)], -1)
    leaves = [lows[0].b, lows[1].a]
    torch.testing.assert_close(gradients(Stacked().product(x, layers), leaves), gradients(want, leaves), rtol=1e-5, atol=1e-5)
    Stacked().product(x, layers).sum().backward()
    assert lows[0].a.grad is None and lows[1].b.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_sum_in_fp32_to_one_batch(dtype):
    """main_grad, which the first delivery writes and the others add to."""
    layers = nn.ModuleList(frozen(outputs, dtype) for outputs in (8, 16))
    lows = [low_rank(layer, i) for i, layer in enumerate(layers)]
    x, g = draw(16, K, dtype=dtype), draw(16, 24, seed=9, dtype=dtype)
    parameters = [p for low in lows for p in low.parameters]
    sums = Accumulators([(str(i), p) for i, p in enumerate(parameters)])
    stacked, found = Stacked(), []
    for micro in (16, 4):
        sums.gradient.fill_(float("nan"))  # a delivery that adds where it should write shows
        sums.begin()
        for rows, gradient in zip(x.split(micro), g.split(micro)):
            stacked.product(rows, layers).backward(gradient)
        sums.finish()
        found.append([p.main_grad.clone() for p in parameters])
    assert all(p.grad is None and p.main_grad.any() for p in parameters)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_neighbours_are_one_adapter(dropout, monkeypatch):
    """q, k and v: one h, one product for all gradients; the same numbers as one by one."""
    model = nn.ModuleDict({name: frozen(outputs).base_layer for name, outputs in (("q", 32), ("k", 16), ("v", 16))})
    add(model, 4, dropout=dropout, init=False)
    stacked, x, found, written = Stacked(), draw(2, 3, K), [], []
    stacked.product(x, list(model.values()))
    sums = Accumulators(model.named_parameters())
    count = lora_ops.lora_gradients
    monkeypatch.setattr(lora_ops, "lora_gradients", lambda *given: written.append(given[5].shape) or count(*given))
    for known in (lora_ops.blocks_of, lambda b: None):
        for room in (adapter, lora_ops):
            monkeypatch.setattr(room, "blocks_of", known)
        torch.manual_seed(3)
        sums.gradient.fill_(float("nan"))
        sums.begin()
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            y = stacked.product(leaf, list(model.values()))
            y.square().sum().backward()
        sums.finish()
        found.append([y.detach(), leaf.grad, *(p.main_grad.clone() for p in parameters(model))])
    assert written == [(64, 4)] * 2 + [(32, 4), (16, 4), (16, 4)] * 2
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_it_keeps_x_and_the_narrow_product():
    layer, x, kept = frozen(40), draw(16, K).requires_grad_(), []
    low_rank(layer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert sorted(t.numel() for t in kept) == [16 * RANK, 16 * K]


def dropping(layer, x):
    """y and the mask: with b the identity and a all ones in one place, what was added shows which elements were kept."""
    (low,) = layer.adapters
    with torch.no_grad():
        low.a.copy_(torch.eye(K))
        low.b.copy_(torch.eye(K))
    y = layer(x)
    return y, (y - F.linear(x, layer.weight, layer.bias)).detach() != 0


def test_dropout_has_one_mask_in_forward_and_backward():
    layer, x = frozen(K), draw(64, K).requires_grad_()
    low = low_rank(layer, rank=K, scale=1.0, dropout=0.25)
    torch.manual_seed(3)
    y, keep = dropping(layer, x)
    assert 0.65 < keep.float().mean() < 0.85
    want = F.linear(x, layer.weight, layer.bias) + (x * keep / 0.75) @ low.a.t() @ low.b.t()
    leaves = [x, low.a, low.b]
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(gradients(y, leaves), gradients(want, leaves), rtol=1e-5, atol=1e-5)
    _, again = dropping(layer, x)
    assert not torch.equal(again, keep), "each call draws its own"
    low.dropout.eval()
    assert dropping(layer, x)[1].all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_a_checkpoint(reentrant):
    layer, x = frozen(K), draw(64, K).requires_grad_()
    low = low_rank(layer, dropout=0.25)
    leaves = [x, low.a, low.b]
    found = []
    for call in (lambda layer, x: layer(x), lambda layer, x: checkpoint(lambda t: layer(t), x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        y = call(layer, x)
        for leaf in leaves:
            leaf.grad = None
        y.backward(draw(*y.shape, seed=9))
        found.append([y.detach(), *(leaf.grad.clone() for leaf in leaves)])
    torch.testing.assert_close(*found)
