"""Attention, MLP, block loop, head, lookup and angles against plain torch, forward and every gradient."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from gpubound import layers, trace
from gpubound.errors import FallbackError
from gpubound.kernels.norms import rms_norm_reference as rms_norm
from gpubound.layers import embedding_and_head, linear, look_up
from gpubound.layers.embedding_and_head import table_rows
from gpubound.models.richards.layers import RichardsGLU
from gpubound.train.accumulate import Accumulators
from tests.messages import refusals

B, T, HIDDEN, HEADS, KV, D = 2, 7, 12, 4, 2, 6


def x_of(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def agree(got, want, module, x):
    """Same output, and same gradients of x and every parameter."""
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    leaves = [x, *module.parameters()]
    upstream = x_of(*got.shape, seed=9).detach()
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def turned(t_BTHD, cos, sin):
    cos, sin = (torch.cat([a, a], -1).unsqueeze(-2) for a in (cos, sin))
    half = t_BTHD.shape[-1] // 2
    return t_BTHD * cos + torch.cat([-t_BTHD[..., half:], t_BTHD[..., :half]], -1) * sin


def plain_attention(a, x, rope, mask=None):
    q, k, v = (p(x).unflatten(-1, (-1, D)) for p in (a.q_proj, a.k_proj, a.v_proj))
    if hasattr(a, "q_norm"):
        q, k = (rms_norm(t, n.weight, n.eps) for t, n in ((q, a.q_norm), (k, a.k_norm)))
    if rope is not None:
        q, k = turned(q, *rope), turned(k, *rope)
    k, v = (t.repeat_interleave(HEADS // KV, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    allowed = torch.ones(T, T).tril().bool() if mask is None else mask
    scores = scores.masked_fill(~allowed, -torch.inf)
    return a.o_proj(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(-2))


def attention(**options):
    torch.manual_seed(0)
    module = layers.Attention(HIDDEN, HEADS, KV, D, dtype=torch.float64, **options)
    for name, p in module.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p)
    return module


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"qk_norm": 1e-5}], ids=["plain", "bias", "qk_norm"])
@pytest.mark.parametrize("own_positions", [False, True])
def test_attention(options, own_positions):
    module, x = attention(**options), x_of(B, T, HIDDEN)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]) if own_positions else torch.arange(T)
    rope = layers.RotaryAngles(D)(positions)
    agree(module(x, rope), plain_attention(module, x, rope), module, x)


def test_attention_without_positions_and_with_a_mask():
    module, x = attention(), x_of(B, T, HIDDEN)
    agree(module(x, None), plain_attention(module, x, None), module, x)
    mask = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    mask[1, :, :, -3:] = False
    agree(module(x, None, mask), plain_attention(module, x, None, mask), module, x)


def test_attention_is_causal():
    module, x = attention(), x_of(B, T, HIDDEN).detach()
    rope = layers.RotaryAngles(D)(torch.arange(T))
    changed = x.clone()
    changed[:, 4] += 1
    before, after = module(x, rope), module(changed, rope)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.allclose(before[:, 4:], after[:, 4:])


def test_attention_calls_a_hooked_projection():
    module, x = attention(), x_of(B, T, HIDDEN)
    rope, seen = layers.RotaryAngles(D)(torch.arange(T)), []
    module.q_proj.register_forward_hook(lambda m, a, y: seen.append(y.shape))
    agree(module(x, rope), plain_attention(module, x, rope), module, x)
    assert len(seen) == 2 and module.stacked.fallbacks.total() == 1


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(activation, bias):
    torch.manual_seed(0)
    module, x = layers.MLP(5, 8, bias, activation, dtype=torch.float64), x_of(B, T, 5)
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}[activation]
    agree(module(x), module.down_proj(act(module.gate_proj(x)) * module.up_proj(x)), module, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_own_their_weights(copied):
    module, x = attention(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    want = module(x, rope)
    other = copied(module)
    torch.testing.assert_close(other(x, rope), want)
    assert not other.stacked.fallbacks
    whole = other.q_proj.weight.untyped_storage()
    assert whole.nbytes() == sum(p.weight.nbytes for p in (other.q_proj, other.k_proj, other.v_proj))
    with torch.no_grad():
        other.q_proj.weight.zero_()
    assert torch.equal(module(x, rope), want)


def blocks(count=3):
    torch.manual_seed(0)
    where = {"dtype": torch.float64}
    made = nn.ModuleList(
        layers.Block(layers.Attention(HIDDEN, HEADS, KV, D, **where), layers.MLP(HIDDEN, 16, **where), HIDDEN, **where)
        for _ in range(count)
    )
    made.append(layers.RMSNorm(HIDDEN, **where))
    for p in made.parameters():
        if p.ndim == 1:
            nn.init.uniform_(p)
    return made


def plain_blocks(stack, x, rope):
    for block in stack[:-1]:
        a, b = block.input_layernorm, block.post_attention_layernorm
        x = x + plain_attention(block.self_attn, rms_norm(x, a.weight, a.eps), rope)
        m, y = block.mlp, rms_norm(x, b.weight, b.eps)
        x = x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))
    return rms_norm(x, stack[-1].weight, stack[-1].eps)


def test_run_blocks_is_the_plain_loop():
    stack, x = blocks(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    agree(layers.run_blocks(stack[:-1], stack[-1], x, rope), plain_blocks(stack, x, rope), stack, x)
    one_by_one = x
    for block in stack[:-1]:
        one_by_one = block(one_by_one, rope)
    torch.testing.assert_close(stack[-1](one_by_one), plain_blocks(stack, x, rope))


def called_blocks(stack, x, rope):
    for block in stack[:-1]:
        inside = x + block.self_attn(block.input_layernorm(x), rope)
        inside = inside + block.mlp(block.post_attention_layernorm(inside))
        x = 2 * inside if block._forward_hooks or type(block) is not layers.Block else inside
    return stack[-1](x)


@pytest.mark.parametrize("name", ["1", "1.input_layernorm", "1.self_attn", "1.post_attention_layernorm", "1.mlp", "3"])
def test_the_loop_calls_what_carries_hooks(name):
    """It steps past blocks and their parts; a hook that nobody ran would be a silence, and what it gives counts."""
    stack, x = blocks(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    stack.get_submodule(name).register_forward_hook(lambda module, inputs, output: 2 * output)
    agree(layers.run_blocks(stack[:-1], stack[-1], x, rope), called_blocks(stack, x, rope), stack, x)


@pytest.mark.parametrize("name", ["1", "1.input_layernorm", "1.self_attn", "1.post_attention_layernorm", "1.mlp", "3"])
def test_the_loop_calls_what_has_a_class_of_somebodys(name):
    """With a forward below ours, given to it at any time."""
    stack, x = blocks(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    module = stack.get_submodule(name)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, *given: 2 * kind.forward(self, *given)})
    agree(layers.run_blocks(stack[:-1], stack[-1], x, rope), called_blocks(stack, x, rope), stack, x)


def test_the_loop_takes_a_class_of_somebodys_at_its_word():
    """One that says what the loop calls is not called itself."""
    stack, x = blocks(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    before = layers.run_blocks(stack[:-1], stack[-1], x, rope)
    ways = {"forward": lambda self, x: 2 * x, "mix": lambda self, x: layers.MLP.mix(self, x)}
    stack[0].mlp.__class__ = type("Mine", (layers.MLP,), ways)
    torch.testing.assert_close(layers.run_blocks(stack[:-1], stack[-1], x, rope), before)


@pytest.mark.parametrize("name", ["0.input_layernorm", "3"])
def test_a_norm_whose_weight_is_computed(name):
    stack, x = blocks(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    norm = stack.get_submodule(name)
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    agree(layers.run_blocks(stack[:-1], stack[-1], x, rope), called_blocks(stack, x, rope), stack, x)
    parametrize.remove_parametrizations(norm, "weight")
    prune.l1_unstructured(norm, "weight", 0.5)
    agree(layers.run_blocks(stack[:-1], stack[-1], x, rope), called_blocks(stack, x, rope), stack, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_run_blocks_checkpointed(reentrant):
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    stack, x = blocks(), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T))
    want = plain_blocks(stack, x, rope)
    want_gradients = torch.autograd.grad(want.square().sum(), [x, *stack.parameters()])
    for block in stack[:-1]:
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, partial(checkpoint, use_reentrant=reentrant)
    layers.run_blocks(stack[:-1], stack[-1], x, rope).square().sum().backward()
    for leaf, g in zip([x, *stack.parameters()], want_gradients):
        torch.testing.assert_close(leaf.grad, g, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("total", [None, 5.0])
def test_lm_loss(total):
    head, x = layers.LMLoss(5, 11, bias=True, dtype=torch.float64), x_of(B, T, 5)
    labels = torch.randint(11, (B, T), generator=torch.Generator().manual_seed(0))
    labels[0, :3] = -100
    got = head.loss(x, labels, total=total)
    z, y = head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    want = F.cross_entropy(z, y) if total is None else F.cross_entropy(z, y, reduction="sum") / total
    got, want = got.double(), want.double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(got, [x, head.weight]), torch.autograd.grad(want, [x, head.weight])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    shifted = head.loss(x, layers.shift(labels), shifted=True, total=total)
    torch.testing.assert_close(shifted.double(), want, rtol=1e-6, atol=0)


def test_rope_table_computes_once_and_follows_its_frequencies():
    calls = []

    class Counted(layers.RotaryAngles):
        def __call__(self, positions):
            calls.append(positions.shape[-1])
            return super().__call__(positions)

    table, cpu = layers.RopeTable(Counted(D)), torch.device("cpu")
    cos, sin = table.first(8, cpu)
    shorter, _ = table.first(5, cpu)
    assert calls == [8] and shorter.shape == (5, D // 2) and shorter.is_contiguous() and torch.equal(shorter, cos[:5])
    assert torch.equal(table.first(9, cpu)[0][:8], cos) and torch.equal(table.first(14, cpu)[0][:8], cos)
    assert calls == [8, 16], "row by row longer, it is made anew each time that the length has doubled"
    table.angles.theta = 5.0
    changed, _ = table.first(9, cpu)
    assert calls == [8, 16, 9] and not torch.equal(changed[:8], cos)
    frequency = 5.0 ** (-torch.arange(0, D, 2) / D)
    torch.testing.assert_close(changed, (torch.arange(9.0)[:, None] * frequency).cos())
    copied = pickle.loads(pickle.dumps(layers.RopeTable(layers.RotaryAngles(D))))
    assert torch.equal(copied.first(8, cpu)[1], sin)


def test_wrong_sizes():
    refusals(
        "layers/parts:wrong_sizes",
        lambda: layers.Attention(12, 4, 3),
        lambda: layers.MLP(4, 8, activation="relu"),
        lambda: layers.RotaryAngles(5),
    )


def test_under_autocast_a_norm_gives_what_products_read(monkeypatch):
    """In 16 bits, with the same numbers as a norm in fp32 and a cast."""
    torch.manual_seed(0)

    def block():
        return layers.Block(layers.Attention(HIDDEN, HEADS, KV, D), RichardsGLU(HIDDEN, 2 * HIDDEN), HIDDEN)

    blocks, norm = nn.ModuleList([block(), block()]), layers.RMSNorm(HIDDEN)
    x, seen = x_of(B, T, HIDDEN, dtype=torch.float32), []
    for kind in (layers.Attention, RichardsGLU):
        mix = kind.mix
        monkeypatch.setattr(kind, "mix", lambda self, y, *rest, mix=mix: (seen.append(y.dtype), mix(self, y, *rest))[1])
    runs = []
    for rounds in (None, lambda part, x, pending: False):
        if rounds is not None:
            monkeypatch.setattr(layers.block, "rounds", rounds)
        with torch.autocast("cpu", torch.bfloat16):
            out = layers.run_blocks(blocks, norm, x, None)
        runs.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, *blocks.parameters(), *norm.parameters()])])
    assert seen == [torch.float32] + 3 * [torch.bfloat16] + 4 * [torch.float32]
    for got, want in zip(*runs):
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want)


IDS = torch.tensor([[1, 3, 1], [0, 1, 2]])


def table(dtype=torch.float32, **options) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(5, 8, dtype=dtype, **options)


@pytest.fixture
def deliveries(monkeypatch) -> list:
    made, own = [], embedding_and_head.deliver_rows
    monkeypatch.setattr(embedding_and_head, "deliver_rows", lambda *given: (made.append(given[0]), own(*given))[1])
    return made


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("around", [lambda f, ids: f(ids), lambda f, ids: checkpoint(f, ids, use_reentrant=False)])
def test_the_gradient_is_the_modules(around, padding, deliveries):
    ours, plain = table(padding_idx=padding), table(padding_idx=padding)
    sums, factors = Accumulators(ours.named_parameters()), torch.randn(2, 3, 8)
    for _ in range(2):  # the second adds to the first
        x = around(lambda ids: look_up(ours, ids), IDS)
        assert x.equal(plain(IDS))
        (x * factors).sum().backward()
        (plain(IDS) * factors).sum().backward()
    torch.testing.assert_close(ours.weight.main_grad, plain.weight.grad)
    assert len(deliveries) == 2 and ours.weight.grad is None
    sums.release()


def test_what_16_bits_would_lose():
    """256 + 1 of one id: 256 in a bf16 table."""
    ours = table(torch.bfloat16)
    Accumulators(ours.named_parameters())
    factors = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
    (look_up(ours, torch.tensor([4, 4])) * factors[:, None]).sum().backward()
    assert ours.weight.main_grad[4].eq(257).all() and not ours.weight.main_grad[:4].any()


@pytest.mark.parametrize("fresh", [True, False])
def test_a_tied_table(fresh):
    """The head's product and the lookup give to one accumulator; where a sum begins, whoever is first writes over the last."""
    ours, plain = table(), table()
    sums = Accumulators(ours.named_parameters())
    sums.gradient.fill_(float("nan"))
    sums.begin() if fresh else sums.zero()
    linear(look_up(ours, IDS), ours.weight).square().sum().backward()
    sums.finish()
    (plain(IDS) @ plain.weight.t()).square().sum().backward()
    torch.testing.assert_close(ours.weight.main_grad, plain.weight.grad)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def hooked() -> nn.Embedding:
    module = table()
    module.register_forward_hook(lambda module, args, out: 2 * out)
    return module


def strided() -> nn.Embedding:
    module = table()
    module.weight.data = torch.randn(8, 5).t()
    return module


MORE = {
    "a subclass": lambda: Scaled(5, 8),
    "a hook": hooked,
    "renormalised rows": lambda: table(max_norm=0.5),
    "scaled gradients": lambda: table(scale_grad_by_freq=True),
    "a strided table": strided,
    "no accumulator": None,
    "frozen": None,
    "no gradient": None,
}


@pytest.mark.parametrize("what", MORE)
def test_what_is_more_than_a_lookup_is_called(what, deliveries):
    module = (MORE[what] or table)()
    if what == "frozen":
        module.requires_grad_(False)
        module.weight.main_grad = torch.zeros(5, 8)
    elif what != "no accumulator":
        Accumulators(module.named_parameters())
    with torch.set_grad_enabled(what != "no gradient"):
        x = look_up(module, IDS)
    assert x.equal(module(IDS))
    if x.requires_grad:
        x.sum().backward()
    assert not deliveries


def test_a_lookup_into_a_main_grad_that_is_not_contiguous_is_counted():
    weight = torch.nn.Parameter(torch.ones(5, 3))
    weight.main_grad = torch.zeros(3, 5).t()
    with trace.strict(), pytest.raises(FallbackError, match="not contiguous"):
        table_rows(weight, torch.tensor([1]))
    table_rows(weight, torch.tensor([1])).sum().backward()
    assert weight.grad[1].tolist() == [1, 1, 1]
