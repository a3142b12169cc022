"""One product for several weights: the same numbers as one each, gradients on the parameters, the buffer kept whole."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubound import layers, trace
from gpubound.errors import FallbackError
from gpubound.layers.embedding_and_head import look_up
from gpubound.layers.linear_product import fused_linear, linear
from tests.messages import message, refusals

ROWS = (6, 4, 4)


def linears(bias=False, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(5, rows, bias=bias, dtype=dtype) for rows in ROWS)


def x_of(dtype=torch.float64):
    return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).requires_grad_()


def gradients(y, tensors):
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y)
    return torch.autograd.grad(y, tensors, upstream)


def apart(x, modules):
    return torch.cat([m(x) for m in modules], -1)


def one_behind_the_other(parameters):
    return all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parameters))


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_equals_apart(bias):
    modules, x = linears(bias), x_of()
    parameters = [x, *modules.parameters()]
    want = apart(x, modules)
    want_gradients = gradients(want, parameters)
    got = layers.Stacked().product(x, modules)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(got, parameters), want_gradients, rtol=1e-12, atol=1e-14)
    assert one_behind_the_other([m.weight for m in modules])


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear_equals_apart_packed_or_not(bias):
    modules, x = linears(bias), x_of()
    weights, biases = [m.weight for m in modules], [m.bias for m in modules] if bias else None
    want = apart(x, modules)
    want_gradients = gradients(want, [x, *modules.parameters()])
    for _ in ("one each", "one product"):
        got = layers.fused_linear(x, weights, biases)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients(got, [x, *modules.parameters()]), want_gradients, rtol=1e-12, atol=1e-14)
        layers.Stacked().product(x, modules)  # packs them
    assert layers.fused_linear(x, weights, biases).grad_fn.name() == "_ProductBackward"


def test_parameters_stay_themselves():
    modules = linears(bias=True)
    before = {name: (p, p.detach().clone()) for name, p in modules.named_parameters()}
    layers.Stacked().product(x_of(), modules)
    for name, p in modules.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])


def test_frozen_weights_get_no_gradient_and_no_product():
    modules, x = linears(bias=True), x_of()
    modules[1].weight.requires_grad_(False)
    modules[2].bias.requires_grad_(False)
    want = apart(x, modules)
    trained = [p for p in modules.parameters() if p.requires_grad]
    want_gradients = gradients(want, [x, *trained])
    got = layers.Stacked().product(x, modules)
    torch.testing.assert_close(gradients(got, [x, *trained]), want_gradients, rtol=1e-12, atol=1e-14)
    layers.Stacked().product(x, modules).sum().backward()
    assert modules[1].weight.grad is None and modules[2].bias.grad is None


MOVES = {
    "deepcopy": copy.deepcopy,
    "to": lambda m: m.to(torch.float32).to(torch.float64),
    "assign": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True) and m,
    "one assigned": lambda m: m[1].load_state_dict({"weight": m[1].weight.detach().clone()}, assign=True) and m,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_repacks_after(move):
    modules, x, stacked = linears(), x_of(), layers.Stacked()
    stacked.product(x, modules)
    modules = move(modules)
    with torch.no_grad():
        for p in modules.parameters():
            p.mul_(2)  # a stale buffer would not see this
        torch.testing.assert_close(stacked.product(x, modules), apart(x, modules), rtol=1e-6, atol=0)
    assert one_behind_the_other([m.weight for m in modules])
    assert not stacked.fallbacks


def test_copies_share_nothing():
    modules, x = linears(), x_of()
    stacked = layers.Stacked()
    stacked.product(x, modules)
    other, other_stacked = copy.deepcopy(modules), copy.deepcopy(stacked)
    other_stacked.product(x, other)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not torch.equal(stacked.product(x, modules), other_stacked.product(x, other))


def refused(modules):
    stacked = layers.Stacked()
    assert stacked.product(x_of(), modules) is None
    return list(stacked.fallbacks)


def test_refuses_what_it_may_not_move():
    hooked = linears()
    hooked[0].register_forward_hook(lambda *_: None)
    assert refused(hooked) == [message("layers/stacked:refuses_what_it_may_not")]

    subclass = linears()
    subclass[2] = type("Odd", (nn.Linear,), {})(5, 4, dtype=torch.float64)
    assert refused(subclass) == [message("layers/stacked:refuses_what_it_may_not.2")]

    mixed = linears()
    mixed[1].to(torch.float32)
    assert refused(mixed) == [message("layers/stacked:refuses_what_it_may_not.3")]

    half = linears(bias=True)
    half[1].bias = None
    assert refused(half) == [message("layers/stacked:refuses_what_it_may_not.4")]

    flat, buffer = linears(), torch.zeros(200, dtype=torch.float64)
    for i, m in enumerate(flat):
        m.weight.data = buffer[i * 40 : i * 40 + m.weight.numel()].view_as(m.weight)
    (why,) = refused(flat)
    assert why.startswith("the weights are slices of a buffer that something else owns")

    part = linears()
    part[0].weight.data = torch.zeros(200, dtype=torch.float64)[:30].view(
        6, 5
    )  # one trains in a flat buffer, the others are frozen
    assert refused(part) == [why]

    tied = linears()
    tied[2].weight = tied[1].weight
    (shared,) = refused(tied)
    assert shared.startswith("two of the layers share one parameter") and tied[2].weight is tied[1].weight

    sharded = linears()
    sharded[0]._is_fsdp_managed_module = True
    assert refused(sharded) == [message("layers/stacked:refuses_what_it_may_not.5")]


def test_two_tensors_over_the_same_memory_stay_together():
    """In blocks of one model or of two: to the user they are one weight. It had moved away from the other in the first call."""
    first, second, third = (layers.Attention(8, 2) for _ in range(3))
    second.k_proj.weight = nn.Parameter(first.q_proj.weight.data)
    copied = copy.deepcopy(second)
    x, rope = torch.randn(1, 3, 8), None
    with torch.no_grad():
        for attention in (first, second, third, copied):
            attention(x, rope)
        second.k_proj.weight.fill_(2.0)
    assert torch.equal(first.q_proj.weight, second.k_proj.weight)
    (why,) = first.stacked.fallbacks
    assert (
        why.startswith("a weight and another layer's are two tensors over the same memory") and why in second.stacked.fallbacks
    )
    assert not third.stacked.fallbacks and not copied.stacked.fallbacks


def test_one_by_one_equals_apart_and_adds_a_tied_weight_up():
    modules, x = linears(bias=True, dtype=torch.float32), x_of(torch.float32)
    modules[2].weight = modules[1].weight
    parameters = list(modules.parameters())
    want = gradients(apart(x, modules), parameters)
    for p in parameters:
        p.main_grad = torch.ones_like(p)
    y = torch.cat([layers.fused_weights.run_linear(module, x) for module in modules], -1)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y))
    for p, gradient in zip(parameters, want):
        torch.testing.assert_close(p.main_grad, 1 + gradient)


def test_strict_forbids_separate_products():
    modules = linears()
    modules[0].register_forward_hook(lambda *_: None)
    with trace.strict(), pytest.raises(FallbackError):
        layers.Stacked().product(x_of(), modules)


def test_gradients_go_to_main_grad():
    modules, x = linears(bias=True, dtype=torch.float32), x_of(torch.float32)
    want = gradients(apart(x, modules), list(modules.parameters()))
    for p in modules.parameters():
        p.main_grad = torch.ones_like(p)
    y = layers.Stacked().product(x, modules)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y))
    for p, g in zip(modules.parameters(), want):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, 1 + g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_main_grad_survives_checkpointing(reentrant):
    modules, x, stacked = linears(dtype=torch.float32), x_of(torch.float32), layers.Stacked()
    for p in modules.parameters():
        p.main_grad = torch.zeros_like(p)
    checkpoint(lambda t: stacked.product(t, modules), x, use_reentrant=reentrant).sum().backward()
    assert all(p.grad is None and p.main_grad.abs().sum() > 0 for p in modules.parameters())


def test_autocast_as_torch_does():
    modules, x = linears(bias=True, dtype=torch.float32), x_of(torch.float32)
    leaves = [x, *modules.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = apart(x, modules), layers.Stacked().product(x, modules)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=8e-3, atol=8e-3)
    # Outside autocast, as trainers call backward.
    torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves), rtol=2e-2, atol=2e-2)


def test_weight_changed_before_backward_raises():
    modules = linears()
    y = layers.Stacked().product(x_of(), modules)
    with torch.no_grad():
        modules[1].weight.mul_(2)
    with pytest.raises(RuntimeError, check=message("layers/stacked:weight_changed_before_ba")):
        y.sum().backward()


def test_no_grad_and_empty_input():
    modules, stacked = linears(), layers.Stacked()
    with torch.no_grad():
        assert not stacked.product(x_of(), modules).requires_grad
    empty = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    stacked.product(empty, modules).sum().backward()
    assert empty.grad.shape == (0, 5) and modules[0].weight.grad.abs().sum() == 0


def test_wrong_weights():
    x = torch.ones(2, 5)
    refusals(
        "layers/stacked:wrong_weights",
        lambda: layers.fused_linear(x, [torch.ones(3, 5), torch.ones(3, 4)]),
        lambda: layers.fused_linear(x, []),
        lambda: layers.fused_linear(x, [torch.ones(3, 5)], [torch.ones(2)]),
    )


@pytest.mark.gpu
# the refusal ends the capture before its first kernel, and torch's warning of that would take the place of the GraphError
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_repack_inside_a_capture_raises():
    from gpubound.errors import GraphError

    modules = linears(dtype=torch.float32).cuda()
    stacked, x = layers.Stacked(), torch.randn(4, 5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(GraphError, check=message("layers/stacked:repack_inside_a_capture")),
        torch.cuda.graph(graph),
        torch.no_grad(),
    ):
        stacked.product(x, modules)


@pytest.mark.gpu
def test_16_bit_main_grad_on_the_gpu():
    modules = linears(dtype=torch.bfloat16).cuda()
    x = torch.randn(64, 5, device="cuda", dtype=torch.bfloat16)
    want = [F.linear(torch.ones(m.out_features, 64, device="cuda"), x.float().t()) for m in modules]
    for p in modules.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    stacked = layers.Stacked()
    stacked.product(x, modules).sum().backward()
    for p, g in zip(modules.parameters(), want):
        torch.testing.assert_close(p.main_grad, g, rtol=1e-3, atol=1e-3)


def test_torch_func_takes_plain_products():
    """Gradients of each row, of weights whose own gradients go to main_grad: it sees into no Function of ours."""
    weights = [nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(i))) for i in range(2)]
    table = nn.Embedding(7, 5)
    for weight in (*weights, table.weight):
        weight.main_grad = torch.zeros_like(weight)
    ids, want = torch.tensor([[1, 2], [3, 3]]), torch.cat([w.detach() for w in weights]).sum(0)

    def loss(x, ids):
        y = fused_linear(x + look_up(table, ids), weights).sum()
        return y + linear(x, weights[0]).sum() * 0

    got = torch.func.vmap(torch.func.grad(loss))(torch.randn(2, 2, 5), ids)
    torch.testing.assert_close(got, want.expand(2, 2, 5))
    assert not any(weight.main_grad.any() for weight in (*weights, table.weight))


def test_weights_that_were_pruned_in_place_are_read_as_they_are():
    """Their first rows keep their addresses, and were multiplied by with all the rows that had been there."""
    mlp, x = layers.MLP(8, 12), torch.ones(2, 8)
    mlp(x)
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.weight.data = layer.weight.data[:6]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :6].contiguous()
    want = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), want)
