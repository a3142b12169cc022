"""What a Llama-shaped model computes, said once more in plain fp32: the judge of the certificate, and who finds a NaN."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .choices import Choices
from .live import Block, Layer, Live, SparseLayer

Rounding = Callable[[Tensor], Tensor] | None  # of keys (T, K, D) in their places, and of values


@torch.no_grad()
def logits(live: Live, ids: Tensor, choices: Choices | None = None, rounded: Rounding = None) -> Tensor:
    """(T, V) for one sequence (T,). Weights are widened one by one. With `choices`, experts are taken as chosen there; with
    `rounded`, keys and values are what it makes of them."""
    *_, (_, result) = stages(live, ids, choices, rounded)
    return result


def stages(
    live: Live, ids: Tensor, choices: Choices | None = None, rounded: Rounding = None
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """(name, what it computed) of every stage, in order; the last are the logits."""
    T = ids.shape[0]
    cos, sin = (table[:, None] for table in live.rope(T))
    x = live.embed[ids].float()
    yield "model.embed_tokens", x
    for number, layer in enumerate(live.layers):
        x = x + _attention(live, layer, x, cos, sin, rounded)
        yield f"model.layers.{number}.self_attn", x
        h = _norm(x, layer.mlp_norm, live.shape.eps)
        x = x + (_experts(live, layer, h, choices, number) if isinstance(layer, SparseLayer) else _mlp(layer, h))
        yield f"model.layers.{number}.mlp", x
    yield "lm_head", _linear(_norm(x, live.norm, live.shape.eps), live.head, None)


def first_not_finite(live: Live, ids: Tensor) -> str:
    """The stage that first computes a NaN or infinity for this sequence, for an error message."""
    with torch.no_grad():
        for name, value in stages(live, ids):
            if not value.isfinite().all():
                return name
    return "none in fp32: the 16-bit range was left"


def _attention(live: Live, layer: Block, x: Tensor, cos: Tensor, sin: Tensor, rounded: Rounding) -> Tensor:
    shape, T = live.shape, x.shape[0]
    h = _norm(x, layer.norm, shape.eps)
    q = _linear(h, layer.q, layer.q_bias).view(T, shape.heads, -1)
    k, v = (_linear(h, w, b).view(T, shape.kv_heads, -1) for w, b in ((layer.k, layer.k_bias), (layer.v, layer.v_bias)))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, shape.head_eps), _norm(k, layer.k_norm, shape.head_eps)
    if layer.turned:
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    if rounded is not None:
        k, v = rounded(k), rounded(v)
    groups = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * shape.scale
    age = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
    hidden = (age < 0) | (age >= (layer.window or T))
    y = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    return _linear(y.flatten(1), layer.o, layer.o_bias)


def _mlp(layer: Layer, h: Tensor) -> Tensor:
    gated = F.silu(_linear(h, layer.gate, layer.gate_bias)) * _linear(h, layer.up, layer.up_bias)
    return _linear(gated, layer.down, layer.down_bias)


def _experts(live: Live, layer: SparseLayer, h: Tensor, choices: Choices | None, number: int) -> Tensor:
    """Token by token, whose experts alone are widened."""
    routing = live.shape.routing
    assert routing is not None
    scores = _linear(h, layer.router, None)
    shares, ids = scores.softmax(-1).topk(routing.slots)
    if choices:
        ids = choices.judged(number, scores)
        shares = scores.softmax(-1).gather(-1, ids)
    if routing.normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    found = []
    for x, chosen, share in zip(h, ids, shares):
        gate, up = (layer.gate_up.index_select(0, chosen).float() @ x).chunk(2, -1)
        products = torch.bmm(layer.expert_down.index_select(0, chosen).float(), (F.silu(gate) * up)[..., None])
        found.append(share @ products[..., 0])
    return torch.stack(found)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
