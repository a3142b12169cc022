"""The layer of polynomial attention beside plain torch in fp64: forward, every gradient, who sees whom, a token at a time."""

import re
from itertools import product

import pytest
import torch

from gpubound import layers
from gpubound.models.richards.kernels.richards import Curve
from gpubound.models.richards.layers import PolyAttention, poly_calls
from tests.layers.test_parts import agree, turned, x_of

B, T, HIDDEN, HEADS, KV, D = 2, 9, 12, 4, 2, 6


def layer(dtype=torch.float64, **options) -> PolyAttention:
    torch.manual_seed(0)
    module = PolyAttention(HIDDEN, HEADS, KV, D, positions=T, dtype=dtype, **options)
    with torch.no_grad():
        module.coefficients += torch.tensor([0.3, 0.2, 0.1])
        for name, p in module.named_parameters():
            if name in ("relative", "gate_curve.free"):
                p += 0.3 * torch.randn_like(p)
    return module


def plain(m: PolyAttention, x, rope, keys=None):
    q, k, v = (p(x).unflatten(-1, (-1, D)) for p in (m.q_proj, m.k_proj, m.v_proj))
    if rope is not None:
        q, k = turned(q, *rope), turned(k, *rope)
    k, v = (t.repeat_interleave(HEADS // KV, 2) for t in (k, v))
    (a, b, scale), length = m.coefficients, x.shape[1]
    rows = []
    for i, j in product(range(length), range(length)):
        score = (q[:, i] * k[:, j]).sum(-1) / D**0.5
        at = i - j + (0 if m.causal else m.max_pos)
        if m.max_pos and 0 <= at < len(m.relative):
            score = score + q[:, i] @ m.relative[at]
        if m.soft_clip:
            score = m.soft_clip * torch.tanh(score / m.soft_clip)
        hidden = (m.causal and j > i) or (m.window and abs(i - j) >= m.window)
        weight = scale * (a * score**m.degree + b) * (0.0 if hidden else 1.0)
        rows.append(weight if keys is None else weight * keys[:, j, None])
    weights = torch.stack(rows, -1).unflatten(-1, (length, length))  # (B, H, T, T)
    y = torch.einsum("bhij,bjhd->bihd", weights, v)
    if hasattr(m, "head_gate"):
        nu, k_, m_ = m.gate_curve.free
        curve = Curve(tail=True)
        assert (curve.nu, curve.k, curve.m, curve.beta, curve.temperature, curve.scale) == (1, 1, 0, 1, 1, 1)
        nu, rate = torch.nn.functional.softplus(nu) + 1e-6, torch.nn.functional.softplus(k_) + 1e-6
        z = m.head_gate(x)
        y = y * (1 + torch.exp(-rate * nu * (z - m_))).pow(-1 / nu)[..., None]
    return m.o_proj(y.flatten(-2))


FORMS = {
    "plain": {"soft_clip": 0.0},
    "all of it": {"soft_clip": 2.0, "window": 4, "max_pos": 2, "gates": True},
    "both ways": {"causal": False, "degree": 1, "soft_clip": 2.0, "max_pos": 3, "gates": True},
}


@pytest.mark.parametrize("positions", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_it_is_the_formula(options, positions):
    module, x = layer(**options), x_of(B, T, HIDDEN)
    rope = layers.RotaryAngles(D)(torch.arange(T)) if positions else None
    agree(module(x, rope), plain(module, x, rope), module, x)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_a_token_changes_those_that_see_it(options):
    """And, with gates and projections from x itself, no other."""
    module, x = layer(**options), x_of(B, T, HIDDEN).detach()
    changed = x.clone()
    changed[:, 4] += 1
    moved = (module(x, None) != module(changed, None)).any(-1)[0].tolist()
    sees = [(not module.causal or i >= 4) and (not module.window or abs(i - 4) < module.window) for i in range(T)]
    assert moved == sees


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_hidden_keys_are_as_if_they_were_not_there(options):
    module, x = layer(**options), x_of(B, T, HIDDEN)
    keys = torch.ones(B, T, dtype=torch.bool)
    keys[1, -3:] = False
    agree(module(x, None, keys), plain(module, x, None, keys), module, x)
    assert torch.equal(module(x, None, keys), module(x, None, keys[:, None, None]))
    if module.causal:
        torch.testing.assert_close(module(x, None, keys)[1, :-3], module(x[1:, :-3], None)[0])


@pytest.mark.parametrize(
    "options", [FORMS["plain"], FORMS["all of it"], {"qk_norm": 1e-6}], ids=["plain", "all of it", "normed"]
)
def test_a_token_at_a_time(options):
    module, x = layer(torch.float32, **options), x_of(B, T, HIDDEN, dtype=torch.float32).detach()
    cos, sin = layers.RotaryAngles(D)(torch.arange(T))
    caches = torch.zeros(2, B, T + 2, KV, D)
    want = module(x, (cos, sin))
    for i in range(T):
        at = torch.full((B,), i, dtype=torch.int32)
        got = module.step(x[:, i : i + 1], (cos[i : i + 1], sin[i : i + 1]), at, *caches)
        torch.testing.assert_close(got[:, 0], want[:, i], rtol=1e-4, atol=1e-5)


def test_its_numbers_are_kept_in_fp32_and_the_rest_in_16_bits():
    module = PolyAttention(HIDDEN, HEADS, KV, D, max_pos=2, gates=True, positions=64, dtype=torch.bfloat16)
    kinds = {name: p.dtype for name, p in module.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {"coefficients", "gate_curve.free"}
    torch.testing.assert_close(module.coefficients.detach(), torch.tensor([1.0, 0.0, 0.125]))
    x = x_of(B, T, HIDDEN, dtype=torch.bfloat16)
    module(x, None).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_what_it_calls_is_what_it_said(monkeypatch):
    from gpubound.models.richards.kernels import poly_attention as door

    asked = []
    chosen = door.__globals__["implementation"]
    monkeypatch.setitem(
        door.__globals__, "implementation", lambda op, x, why, s: asked.append((op, s)) or chosen(op, x, why, s)
    )
    layer(torch.float32, **FORMS["all of it"])(x_of(B, 16, HIDDEN, dtype=torch.float32), None)
    assert asked == [poly_calls(HEADS, KV, D, 3, 2.0, 4, 2, True, True)[0]]


@pytest.mark.parametrize("mask", [torch.ones(T, T, dtype=torch.bool), torch.ones(B, T), torch.ones(B, 1, T, T).bool()])
def test_other_masks_are_refused(mask):
    sentence = (
        f"PolyAttention: mask must be bool (batch, tokens) or (batch, 1, 1, tokens), True where there is a key, for a batch "
        f"(2, 9), got {mask.dtype} {tuple(mask.shape)}; what each token sees is said by causal and window."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        layer()(x_of(B, T, HIDDEN), None, mask)
