"""The layer of polynomial attention: hidden keys, a token at a time, dtypes. test_model.py has its formula."""

import re

import pytest
import torch

from gpubound import layers
from gpubound.models.richards.layers import PolyAttention, poly_calls
from tests.layers.test_parts import x_of

B, T, HIDDEN, HEADS, KV, D = 2, 9, 12, 4, 2, 6


def layer(dtype=torch.float64, **options) -> PolyAttention:
    torch.manual_seed(0)
    module = PolyAttention(HIDDEN, HEADS, KV, D, positions=T, dtype=dtype, **options)
    with torch.no_grad():
        module.coefficients += torch.tensor([0.3, 0.2, 0.1])
        for name, p in module.named_parameters():
            if name == "gate_curve.free":
                p += 0.3 * torch.randn_like(p)
    return module


FORMS = {
    "plain": {"soft_clip": 0.0},
    "all of it": {"soft_clip": 2.0, "window": 4, "gates": True},
    "both ways": {"causal": False, "degree": 1, "soft_clip": 2.0, "gates": True},
}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_hidden_keys_are_as_if_they_were_not_there(options):
    module, x = layer(**options), x_of(B, T, HIDDEN)
    keys = torch.ones(B, T, dtype=torch.bool)
    keys[1, -3:] = False
    y, want = module(x, None, keys), module(x[1:, :-3], None)[0]
    torch.testing.assert_close(y[1, :-3], want)
    assert torch.equal(y, module(x, None, keys[:, None, None])) and torch.equal(y[0], module(x, None)[0])
    leaves, upstream = [x, *module.parameters()], x_of(*want.shape, seed=2)
    got, expected = (torch.autograd.grad(t, leaves, upstream, allow_unused=True) for t in (y[1, :-3], want))
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other)


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
    module = PolyAttention(HIDDEN, HEADS, KV, D, gates=True, positions=64, dtype=torch.bfloat16)
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
    assert asked == [poly_calls(HEADS, KV, D, 3, 2.0, 4, True, True)[0]]


@pytest.mark.parametrize("mask", [torch.ones(T, T, dtype=torch.bool), torch.ones(B, T), torch.ones(B, 1, T, T).bool()])
def test_other_masks_are_refused(mask):
    with pytest.raises(
        ValueError, match=f"PolyAttention: mask must be bool .* got {mask.dtype} {re.escape(str(tuple(mask.shape)))}"
    ):
        layer()(x_of(B, T, HIDDEN), None, mask)
