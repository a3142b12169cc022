"""A model of the family in plain torch: what its parts are, written down a second time, from its weights by name."""

import math

import torch
import torch.nn.functional as F


def logits(model, ids):
    """Of ids (B, T), by the weights of `model`; in the dtype that they have."""
    c, w = model.config, dict(model.named_parameters())
    x = w["model.embed_tokens.weight"][ids] * (1 if c.norm == "rms" else c.hidden**0.5)
    for n in range(c.layers):
        own = {name.removeprefix(f"model.layers.{n}."): p for name, p in w.items() if name.startswith(f"model.layers.{n}.")}
        x = x + MIXERS[c.attention](c, own, NORMS[c.norm](c, own, "input_layernorm.", x))
        x = x + MLPS[c.mlp](c, own, NORMS[c.norm](c, own, "post_attention_layernorm.", x))
    return NORMS[c.norm](c, w, "model.norm.", x) @ w["lm_head.weight" if not c.tied else "model.embed_tokens.weight"].T


def rms(c, w, name, x):
    return x / (x.square().mean(-1, keepdim=True) + c.eps).sqrt() * w[name + "weight"]


def softmax(c, w, x):
    B, T, d = *x.shape[:2], c.head_dim
    q, k, v = ((x @ w[f"self_attn.{n}_proj.weight"].T).view(B, T, -1, d).transpose(1, 2) for n in "qkv")
    if c.rope:
        q, k = turned(q, c), turned(k, c)
    k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    if c.causal:
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T


def poly(c, w, x):
    """Pair by pair of tokens."""
    B, T, d = *x.shape[:2], c.head_dim
    q, k, v = ((x @ w[f"self_attn.{n}_proj.weight"].T).view(B, T, -1, d).transpose(1, 2) for n in "qkv")
    if c.rope:
        q, k = turned(q, c), turned(k, c)
    k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
    a, b, scale = w["self_attn.coefficients"]
    y = torch.zeros_like(q)
    for i in range(T):
        for j in range(T):
            apart = i - j
            if (c.causal and apart < 0) or (c.window and abs(apart) >= c.window):
                continue
            score = (q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(d)
            if c.soft_clip:
                score = c.soft_clip * torch.tanh(score / c.soft_clip)
            term = (scale * (a * score**c.degree + b))[..., None] * v[:, :, j]
            y = y + F.one_hot(torch.tensor(i), T).to(y.dtype)[:, None] * term[:, :, None]
    if c.gates:
        z = x @ w["self_attn.head_gate.weight"].T + w["self_attn.head_gate.bias"]
        y = y * curve(z, *w["self_attn.gate_curve.free"]).transpose(1, 2)[..., None]
    return y.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T


def rg_lru(c, w, x):
    unit, r, i = (x @ w[f"self_attn.{n}_proj.weight"].T + w[f"self_attn.{n}_proj.bias"] for n in "xri")
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        a = w["self_attn.decay"].sigmoid() ** (8 * r[:, t].sigmoid())
        h = a * h + (1 - a * a).sqrt() * i[:, t].sigmoid() * unit[:, t]
        states.append(h)
    return torch.stack(states, 1) @ w["self_attn.o_proj.weight"].T


def turned(x, c):
    """The pair (i, i + D/2) as one complex number, times e^(i p f)."""
    T, half = x.shape[2], c.head_dim // 2
    frequency = c.rope_theta ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones(T, half).double(), torch.arange(T).double()[:, None] * frequency)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def swiglu(c, w, x):
    gate, up = (x @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def moe(c, w, x):
    """Token by token, expert by expert."""
    y = torch.zeros_like(x).flatten(0, 1)
    for row, token in enumerate(x.flatten(0, 1)):
        odds = (w["mlp.router.weight"] @ token).softmax(0)
        best = sorted(range(c.experts), key=lambda e: -odds[e].item())[: c.slots]
        for e in best:
            gate, up = (w["mlp.gate_up_proj"][e] @ token).chunk(2)
            y[row] = y[row] + odds[e] / sum(odds[b] for b in best) * (w["mlp.down_proj"][e] @ (F.silu(gate) * up))
    return y.view(x.shape)


def positive(p):
    return F.softplus(p) + 1e-6


def curve(x, nu, k, m):
    """The logistic curve whose left tail is e^(k x)."""
    nu, k = positive(nu), positive(k)
    return (1 + torch.exp(-k * nu * (x - m))).pow(-1 / nu)


def richards_glu(c, w, x):
    (nu, k, m, bias), gate_free = w["mlp.value.free"], w["mlp.gate.free"]
    x1, x2 = (x @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return (x1 * (curve(x1, nu, k, m) + bias) * curve(x2, *gate_free)) @ w["mlp.down_proj.weight"].T


def dyt(c, w, name, x):
    return torch.tanh(w[name + "alpha"] * x) * w[name + "weight"] + w[name + "bias"]


MIXERS = {"softmax": softmax, "poly": poly, "rg_lru": rg_lru}
MLPS = {"swiglu": swiglu, "richards_glu": richards_glu, "moe": moe}
NORMS = {"rms": rms, "dyt": dyt}
