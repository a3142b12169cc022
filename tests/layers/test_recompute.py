"""What is computed again in backward: the same bits, in fewer bytes, for the weights that train."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import gpubound as gb
from gpubound import layers, trace
from gpubound.layers import linear_product
from gpubound.layers.block import Block, gated_down, run_block
from gpubound.layers.linear_product import KEEP_ALL, LEAST_BYTES, linear, recipe_of
from gpubound.models.richards.layers import DynamicTanh, RichardsGLU
from gpubound.train.offload import recompute_from
from tests.messages import message

from .adapted import recomputing

TOKENS, HIDDEN, WIDE = 16, 32, 64


def block(device):
    torch.manual_seed(0)
    where = {"dtype": torch.bfloat16, "device": device}
    return Block(layers.Attention(HIDDEN, 2, **where), layers.MLP(HIDDEN, WIDE, **where), HIDDEN, **where)


def draw(seed, device):
    return (
        torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
        .to(device, torch.bfloat16)
        .requires_grad_()
    )


def run(device, least, main=False, frozen=()):
    """(outputs and gradients, bytes of activations kept) of a block whose results of `least` bytes are computed again."""
    own, x, pending, kept = block(device), draw(1, device), draw(2, device), {}
    recompute_from(own, least)
    for name, p in own.named_parameters():
        p.requires_grad_(name not in frozen)
        if main:
            p.main_grad = torch.zeros(p.shape, device=device)
    with torch.no_grad():
        run_block(own, x, pending, None)  # moves weights together
    weights = {p.untyped_storage().data_ptr() for p in own.parameters()}

    def keep(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        outputs = run_block(own, x, pending, None)
    torch.autograd.backward(outputs, [draw(seed, device).detach() for seed in (3, 4)])
    gradients = [p.main_grad if main else p.grad for p in own.parameters() if p.requires_grad]
    return [*outputs, x.grad, pending.grad, *gradients], sum(s.nbytes() for s in kept.values())


def close(a, b):
    """Bit for bit; on a GPU attention's backward adds in another order at every run."""
    torch.testing.assert_close(a, b, rtol=2e-2 if a.is_cuda else 0, atol=1e-2 if a.is_cuda else 0)
    return True


@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("least, fewer", [(0, WIDE + 2 * HIDDEN), (2 * TOKENS * WIDE, WIDE), (2 * TOKENS * WIDE + 1, 0)])
def test_the_same_bits_in_fewer_bytes(least, fewer, main, device):
    want, all_of_it = run(device, float("inf"), main)
    got, less = run(device, least, main)
    for a, b in zip(got, want):
        close(a, b)
    if device.type == "cuda":  # on a CPU autograd keeps what it wants of the reference
        assert all_of_it - less == 2 * TOKENS * fewer


def test_a_gain_with_an_offset_is_computed_again_as_it_was(device, monkeypatch):
    want, _ = run(device, float("inf"))
    monkeypatch.setattr(layers.RMSNorm, "offset", 1.0)
    got, again = (run(device, least)[0] for least in (float("inf"), 0))
    assert all(close(a, b) for a, b in zip(got, again)) and not torch.equal(got[0], want[0])


def test_what_is_small_is_kept():
    norm = layers.RMSNorm(4)
    large, small = torch.ones(LEAST_BYTES // 16, 4), torch.ones(LEAST_BYTES // 16 - 1, 4)
    assert recipe_of(norm(large)) is not None and recipe_of(norm(small)) is None
    with recomputing(norm, KEEP_ALL):
        assert recipe_of(norm(large)) is None
    with recomputing(norm, 0):
        assert recipe_of(norm(small)) is not None
        with recomputing(norm, KEEP_ALL):
            assert recipe_of(norm(small)) is None
        assert recipe_of(norm(small)) is not None
    assert recipe_of(norm(small)) is None


def test_a_checkpoint_computes_again_as_its_forward_did():
    """The setting is the model's: a block that is run again in backward, outside of a step's forward, must keep the same."""
    own, x = Block(layers.Attention(HIDDEN, 2), layers.MLP(HIDDEN, WIDE), HIDDEN), torch.ones(1, 4, HIDDEN).requires_grad_()
    undo = recompute_from(own, 0)
    checkpoint(lambda t: own(t, None), x, use_reentrant=False).sum().backward()
    undo()
    assert all("recompute_bytes" not in vars(module) for module in own.modules())


def test_frozen_weights_keep_nothing_and_get_nothing(device):
    frozen = [name for name, _ in block(device).named_parameters() if "mlp" in name]
    want, _ = run(device, float("inf"), frozen=frozen)
    got, _ = run(device, 0, frozen=frozen)
    assert len(want) == len(got) and all(close(a, b) for a, b in zip(got, want))


def test_a_weight_changed_between_forward_and_backward_is_refused():
    mlp = layers.MLP(HIDDEN, WIDE)
    with recomputing(mlp, 0):
        y = mlp(torch.ones(2, HIDDEN))
    with torch.no_grad():
        mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, check=message("layers/recompute:a_weight_changed_between")):
        y.sum().backward()


def test_a_norms_weight_changed_meanwhile_is_refused():
    norm, mlp = layers.RMSNorm(HIDDEN), layers.MLP(HIDDEN, WIDE)
    with recomputing(norm, 0), recomputing(mlp, 0):
        y = mlp(norm(torch.ones(2, HIDDEN)))
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def adapted_mlp(device, activation="silu", **how):
    torch.manual_seed(0)
    mlp = layers.MLP(64, 128, activation=activation, dtype=torch.bfloat16, device=device)
    gb.lora.add(mlp, **{"rank": 4, "init": False} | how)
    return mlp


def trained_mlp(device):
    """GELU, whose product with down has no function of its own."""
    torch.manual_seed(0)
    mlp = layers.MLP(64, 128, activation="gelu", dtype=torch.bfloat16, device=device)
    for p in mlp.parameters():
        p.main_grad = torch.zeros(p.shape, device=device)
    return mlp


def adapted_richards(device):
    torch.manual_seed(0)
    mlp = RichardsGLU(64, 128, device=device)
    gb.lora.add(mlp, rank=4, init=False)
    return mlp


MLPS = {
    "adapters": adapted_mlp,
    "adapters, gelu": partial(adapted_mlp, activation="gelu"),
    "adapters of down alone": partial(adapted_mlp, targets=["down_proj"]),
    "over nf4": partial(adapted_mlp, base="nf4"),
    "gelu that trains": trained_mlp,
    "richards": adapted_richards,
}


@pytest.mark.parametrize("make", MLPS.values(), ids=MLPS)
def test_an_activation_whose_reader_would_keep_it_is_computed_again(make, device, monkeypatch):
    def run(least):
        mlp, read = make(device), []
        like = next(p for p in mlp.parameters() if p.is_floating_point())
        x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)).to(device, like.dtype).requires_grad_()
        was = linear_product.recipe_of
        monkeypatch.setattr(linear_product, "recipe_of", lambda y: read.append(was(y) is not None) or was(y))
        with recomputing(mlp, least):
            y = mlp(x)
        monkeypatch.setattr(linear_product, "recipe_of", was)
        y.backward(torch.ones_like(y))
        trained = [p for p in mlp.parameters() if p.requires_grad]
        return read, [y, x.grad, *(p.grad if (sums := getattr(p, "main_grad", None)) is None else sums for p in trained)]

    kept, again = run(float("inf")), run(0)
    assert not any(kept[0]) and again[0].count(True) == 1 and again[0][-1], "down's product, the last one, has it again"
    assert all(close(a, b) for a, b in zip(again[1], kept[1], strict=True))


def weight_gradients(kind, between):
    """A linear layer's weight gradient after a write in place, and that of the same calls on a copy, without a recipe."""
    norm, layer, found = kind(64), nn.Linear(64, 4, bias=False), []
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with recomputing(norm, 0):
        assert recipe_of(norm(x)) is not None
        for kept in (lambda y: y, torch.clone):
            y = kept(between(norm(x), x))
            found += torch.autograd.grad(linear(y, layer.weight).square().sum(), layer.weight)
    return found


@pytest.mark.parametrize("kind", [layers.RMSNorm, DynamicTanh])
@pytest.mark.parametrize(
    "between",
    [
        lambda y, x: y.relu_(),
        lambda y, x: y.detach().mul_(2) is None or y,
        lambda y, x: y[:7].mul_(3) is None or y,
    ],
    ids=["relu_", "a detached alias", "a view"],
)
def test_a_linear_layer_reads_what_was_written_into_a_norms_result(kind, between):
    torch.testing.assert_close(*weight_gradients(kind, between))


def test_a_linear_layer_reads_a_norm_whose_input_was_written_since():
    got, want = weight_gradients(layers.RMSNorm, lambda y, x: x.detach().mul_(-5) is None or y)
    # The second call's x is -5 times the first's: so is its norm, whose square has the same gradient but for eps.
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm"])
def test_a_forward_hook_that_writes_into_a_norms_result_of_a_block(norm):
    def gradients(hook):
        torch.manual_seed(0)
        own, x = Block(layers.Attention(HIDDEN, 2), layers.MLP(HIDDEN, WIDE), HIDDEN), torch.ones(1, TOKENS, HIDDEN).cumsum(1)
        recompute_from(own, 0)
        getattr(own, norm).register_forward_hook(hook)
        own(x.requires_grad_(), None).square().mean().backward()
        return [p.grad for p in own.parameters()]

    got = gradients(lambda module, args, y: y.mul_(2) is None or None)
    want = gradients(lambda module, args, y: 2 * y)
    torch.testing.assert_close(got, want)


@pytest.mark.interpreted
def test_a_last_backward_writes_over_what_it_no_longer_needs(device):
    """Gradients of gate and up are in their memory, unless the graph is kept for another backward."""
    generator = torch.Generator(device).manual_seed(0)
    source, g = (torch.randn(6, size, generator=generator, device=device) for size in (64, 16))
    weight = nn.Parameter(torch.randn(16, 32, generator=generator, device=device))
    packed = source.clone().requires_grad_() * 1
    result = gated_down(packed, weight)
    kept, dw = torch.autograd.grad(result, (packed, weight), g, retain_graph=True)
    assert torch.equal(packed.detach(), source) and kept.data_ptr() != packed.data_ptr()
    last, again = torch.autograd.grad(result, (packed, weight), g)
    assert torch.equal(last, kept) and torch.equal(again, dw) and last.data_ptr() == packed.data_ptr()


@pytest.mark.interpreted
@pytest.mark.parametrize("frozen", [(), ("gate_proj", "up_proj"), ("down_proj",)], ids=str)
@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
def test_an_mlp_of_one_function(frozen, main, device, monkeypatch):
    """Its products compute the unit and its gradient; results and gradients are those of its parts, x's recipe is kept."""
    calls, product = [], linear_product.swiglu_product
    monkeypatch.setattr(linear_product, "swiglu_product", lambda *a: calls.append(a) or product(*a))
    found = {}
    for least in (0, KEEP_ALL):
        torch.manual_seed(0)
        mlp, norm = layers.MLP(HIDDEN, WIDE, device=device), layers.RMSNorm(HIDDEN, device=device)
        mlp.recompute_bytes = norm.recompute_bytes = least
        for name, p in mlp.named_parameters():
            p.requires_grad_(name.split(".")[0] not in frozen)
            if main:
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        x = torch.randn(3, 5, HIDDEN, device=device, requires_grad=True)
        with torch.no_grad():
            mlp(x)  # moves weights together
        y = mlp(norm(x))
        first, again = (torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=keep)[0] for keep in (True, False))
        assert torch.equal(first, again)
        mlp(norm(x)).backward(torch.ones_like(y))
        found[least] = [y, first, x.grad, *(p.main_grad if main else p.grad for p in mlp.parameters() if p.requires_grad)]
    assert bool(calls) == ("down_proj" not in frozen)
    for got, want in zip(found[0], found[KEEP_ALL]):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_an_mlp_of_one_function_whose_weight_changes_before_backward(device):
    mlp = layers.MLP(HIDDEN, WIDE, device=device)
    mlp.recompute_bytes = 0
    with torch.no_grad():
        mlp(torch.ones(2, HIDDEN, device=device))
    y = mlp(torch.ones(2, HIDDEN, device=device, requires_grad=True))
    with torch.no_grad():
        mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.sum().backward()


@pytest.mark.interpreted
def test_an_mlp_whose_kernel_fails_its_self_test_takes_its_parts(device, monkeypatch):
    failed = "swiglu_product_backward"
    monkeypatch.setattr(linear_product, "verdict", lambda op, *_: "its test failed" if op == failed else None)
    mlp = layers.MLP(HIDDEN, WIDE, device=device)
    mlp.recompute_bytes = 0
    with torch.no_grad():
        mlp(torch.ones(2, HIDDEN, device=device))
    with gb.strict(), pytest.raises(gb.errors.FallbackError, match="swiglu_product_backward: would fall back: its test failed"):
        mlp(torch.ones(2, HIDDEN, device=device))
    mlp(torch.ones(2, HIDDEN, device=device)).sum().backward()
    assert mlp.gate_proj.weight.grad is not None
    assert trace.fallbacks[failed, "its test failed; a product and a pass are taken"] == 1
