"""Norms of any class are recognised by what they compute; weights that are one stay one, whichever way they are tied."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpubound as gb
from gpubound.place import candidates
from gpubound.place.candidates import Fused, recognise

from .models import assert_close, batch, place, rows, tiny, twin

WIDTH = 24


class LayerNorm(nn.Module):
    """nanoGPT's: an optional bias, and an eps that only its forward names."""

    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class HandWritten(nn.Module):
    """Llama's formula under other names."""

    offset = 0.0

    def __init__(self, eps=3e-6):
        super().__init__()
        self.scale, self.little = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x):
        y = x.float() if x.dtype != torch.float64 else x
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.little)
        return (y * (self.scale.to(y.dtype) + self.offset)).to(x.dtype)


class Shifted(HandWritten):
    """Gemma's gain."""

    offset = 1.0


class Fp32LayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH, eps=1e-6)

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype) if x.dtype != torch.float64 else super().forward(x)


KINDS = {
    "layer_norm": (LayerNorm, "layer_norm", 1e-5),
    "layer_norm without bias": (lambda: LayerNorm(False), "layer_norm", 1e-5),
    "rms_norm": (HandWritten, "rms_norm", 3e-6),
    "rms_norm large eps": (lambda: HandWritten(1e-3), "rms_norm", 1e-3),
    "rms_norm shifted": (Shifted, "rms_norm", 3e-6),
}


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.norm, self.out = nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, WIDTH)
        for p in self.norm.parameters():
            nn.init.normal_(p, 1.0, 0.3)

    def forward(self, x):
        return self.out(self.norm(self.inside(x)))


def drawn(dtype=torch.float32, scale=1.0, shape=(2, 5, WIDTH)):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


def results(net, x):
    y = net(x)
    return dict(enumerate([y.detach(), *torch.autograd.grad(y.float().square().sum(), list(net.parameters()))]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_custom_class_is_swapped_for_what_it_computes(kind, dtype):
    make, op, eps = KINDS[kind]
    net = Net(make).to(dtype)
    plain = copy.deepcopy(net)
    placement = place(net, example=drawn(dtype))
    assert placement.verified and (placement.swapped, placement.refused) == (1, 0)
    assert (net.norm.norm_formula.op, net.norm.norm_formula.eps) == (op, eps)
    assert rows(placement)["norm"].kernel == f"reference {op}" and rows(placement)["norm"].error is not None
    tolerance = {8: 1e-6, 4: 2e-5, 2: 2e-2}[dtype.itemsize]
    for scale in (1.0, 1e-3):  # the square of the smaller one is below eps
        assert_close(results(net, drawn(dtype, scale)), results(plain, drawn(dtype, scale)), tolerance)
    assert placement.fallbacks == 0
    placement.undo()
    assert type(net.norm) is type(plain.norm)


class Doubled(HandWritten):
    def forward(self, x):
        return 2 * super().forward(x)


class SquaredGain(HandWritten):
    """At a gain of 1 only its gradient differs."""

    def forward(self, x):
        return super().forward(x) * self.scale


class Buffered(HandWritten):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


class Noisy(HandWritten):
    def forward(self, x):
        y = super().forward(x)
        return F.dropout(y, 0.5, self.training)


class Counting(HandWritten):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class TwoInputs(HandWritten):
    def forward(self, x, residual):
        return super().forward(x + residual)


class OverChannels(nn.Module):
    """ConvNeXt's, over the second dimension."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - u) / torch.sqrt(s + 1e-6)) + self.bias[:, None, None]


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("kind", [Doubled, SquaredGain, Buffered, Noisy, Counting, TwoInputs, OverChannels, Gain, nn.PReLU])
def test_another_formula_is_no_candidate(kind):
    net = nn.ModuleDict({"norm": kind()})
    placement = place(net)
    assert (placement.swapped, placement.refused) == (0, 0) and type(net.norm) is kind
    assert "norm" in rows(placement) or kind is nn.PReLU
    if kind is Counting:
        assert net.norm.calls == 0


class _Lying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.5 * dy


class WrongBackward(HandWritten):
    """The formula's outputs with other gradients."""

    def forward(self, x):
        return _Lying.apply(super().forward(x))


def test_gradients_are_compared():
    net = nn.Sequential(WrongBackward())
    placement = place(net, example=drawn())
    assert (placement.swapped, placement.refused) == (0, 1)
    assert "gradient" in placement.rows[0].why and not hasattr(net[0], "_added")
    with pytest.raises(gb.PlaceError, match="WrongBackward"):
        place(nn.Sequential(WrongBackward()), strict=True)


class PerRank(HandWritten):
    """Images have their channels first."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else super().forward(x)


def test_calls_outside_the_formula_take_the_modules_own_forward():
    net = nn.Sequential(PerRank())
    plain = copy.deepcopy(net)
    placement = place(net, example=drawn())
    assert placement.swapped == 1 and recognise(plain[0]).ranks == {2, 3}
    image = drawn(shape=(2, WIDTH, 5, 6))
    torch.testing.assert_close(net(image), plain(image))
    assert placement.fallbacks == 1

    net[0].little = plain[0].little = 0.5
    torch.testing.assert_close(net(drawn()), plain(drawn()))
    assert placement.fallbacks == 2 and net[0].delegated["an attribute was changed after it was placed"] == 1

    torch.testing.assert_close(net(drawn(torch.bfloat16)), plain(drawn(torch.bfloat16)))
    assert placement.fallbacks == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_modules_own_dtypes(dtype):
    net = Net(LayerNorm).to(dtype)
    plain = copy.deepcopy(net)
    place(net)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = net.norm(drawn(dtype)), plain.norm(drawn(dtype))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_the_callers_random_state_and_parameters_stay():
    net = Net(LayerNorm)
    before, state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    place(net)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_a_subclass_of_torchs_norm():
    placement = place(net := Net(Fp32LayerNorm), example=drawn())
    assert isinstance(net.norm, Fused) and placement.verified


def test_the_last_line_says_what_was_not_gained():
    names_the_page = "docs/models.md#your-own-model"
    only_norms = place(Net(LayerNorm))
    nothing = place(nn.Sequential(nn.Linear(4, 4)))
    assert names_the_page in only_norms.summary and "Only norms" in only_norms.summary
    assert names_the_page in nothing.summary and "Nothing was swapped" in nothing.summary
    own = place(gb.Decoder(gb.DecoderConfig(16, 24, 1, 2, 1, 50)))
    assert names_the_page not in own.summary
    unfused = place(nn.Sequential(nn.Linear(4, 4)), fuse=False)
    assert names_the_page not in unfused.summary


def attention(model, layer=0):
    return model.model.layers[layer].self_attn


def mlp(model, layer=0):
    return model.model.layers[layer].mlp


def tie(one, other, *names):
    for name in names or ("weight",):
        setattr(one, name, getattr(other, name))


def tie_every_projection(m):
    for name in ("q_proj", "k_proj", "v_proj"):
        tie(getattr(attention(m, 1), name), getattr(attention(m, 0), name), "weight", "bias")


INSIDE = {
    "k = v": lambda m: tie(attention(m).k_proj, attention(m).v_proj),
    "q = k = v": lambda m: [tie(p, attention(m).v_proj) for p in (attention(m).q_proj, attention(m).k_proj)],
    "k and v one module": lambda m: setattr(attention(m), "k_proj", attention(m).v_proj),
    "bias of k = v": lambda m: tie(attention(m).k_proj, attention(m).v_proj, "bias"),
    "gate = up": lambda m: tie(mlp(m).gate_proj, mlp(m).up_proj),
    "gate and up one module": lambda m: setattr(mlp(m), "gate_proj", mlp(m).up_proj),
    "bias of gate = up": lambda m: tie(mlp(m).gate_proj, mlp(m).up_proj, "bias"),
}
BETWEEN = {
    "q of two layers": lambda m: tie(attention(m, 1).q_proj, attention(m, 0).q_proj),
    "q, k, v of two layers": tie_every_projection,
    "q of one, k of another": lambda m: tie(attention(m, 1).k_proj, attention(m, 0).q_proj),
    "q and o": lambda m: tie(attention(m).o_proj, attention(m).q_proj),
    "gate of one, up of another": lambda m: tie(mlp(m, 0).gate_proj, mlp(m, 1).up_proj),
    "an MLP in two layers": lambda m: setattr(m.model.layers[1], "mlp", mlp(m, 0)),
    "a norm in two layers": lambda m: setattr(m.model.layers[1], "input_layernorm", m.model.norm),
    "gains of two norms": lambda m: tie(m.model.layers[1].input_layernorm, m.model.norm),
    "head and table": lambda m: tie(m.lm_head, m.model.embed_tokens),
}
ALIASED = {  # torch has no word for these: two Parameters, or a buffer, over one memory
    "k over v": lambda m: setattr(attention(m).k_proj.weight, "data", attention(m).v_proj.weight.data),
    "q over another layer's": lambda m: setattr(attention(m, 1).q_proj.weight, "data", attention(m, 0).q_proj.weight.data),
    "o over q": lambda m: setattr(attention(m).o_proj.weight, "data", attention(m).q_proj.weight.data),
    "a buffer over q": lambda m: mlp(m).register_buffer("seen", attention(m).q_proj.weight.data),
}


def made(how):
    model = tiny("llama biased", num_key_value_heads=4)
    how(model)
    return model


def stepped(model):
    """Two steps of SGD: a tie that was torn shows in the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = {}
    for number in range(2):
        loss = model.train()(**batch(seed=number)).loss
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("name", [*INSIDE, *BETWEEN, *ALIASED])
def test_a_tie_trains_as_it_did(name):
    """Layers of a group that share a parameter are called one by one, and tensors over one memory are not moved; the table has
    the reason."""
    how = (INSIDE | BETWEEN | ALIASED)[name]
    model, other = made(how), made(how)
    shared = candidates.shared_memory(model)
    placement = place(model)
    assert placement.verified and placement.swapped >= 8
    table = rows(placement)
    if name in INSIDE:
        (row,) = [r for r in table.values() if "share one parameter" in r.why]
        assert row.module in ("model.layers.0.self_attn", "model.layers.0.mlp")
        assert row.kernel.startswith("separate projections")
        assert isinstance(model.get_submodule(row.module), Fused) and "as one product" in table["model.layers.1.mlp"].kernel
    if name in ALIASED:
        why = {row.why for row in table.values() if "over the same memory" in row.why}
        assert shared and why and all(any(name in reason for name in shared) for reason in why)
        assert candidates.shared_memory(model) == shared
    assert_close(stepped(model), stepped(other))


def test_what_is_no_tie():
    model = tiny("llama tied")
    first = place(model)
    assert not candidates.shared_memory(model), (
        "one Parameter in two modules is one tensor; neighbours in a buffer do not overlap"
    )
    first.undo()
    assert place(model).refused == 0


def test_copies_of_a_placed_model_keep_its_ties():
    model = made(INSIDE["k = v"])
    place(model)
    copied = twin(model)
    assert attention(copied).k_proj.weight is attention(copied).v_proj.weight
    assert_close(stepped(copied), stepped(model))
