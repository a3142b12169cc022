"""What a Llama-shaped model computes, said once more in plain fp32: the judge of the certificate, of rounding, and of NaNs.

Experts are a choice by comparison: where two experts' scores lie within rounding, one that rounds otherwise takes the other
expert and gets something else altogether, and neither is wrong. So a computation's logits are compared with what fp32 makes of
the choice that the computation made (`Choices`), and the choice by itself: how far below the best ones the scores of the chosen
experts lie.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .live import Block, BoundModel, Layer, SparseLayer
from .live_experts import sparse_mlps

if TYPE_CHECKING:
    from .fused import FusedBody

PIECE = 512  # tokens that `accuracy` reads at a time, each piece from its own beginning

Rounding = Callable[[Tensor], Tensor] | None  # of keys (T, K, D) in their places, and of values


class Choices:
    """Which experts the tokens of a sequence were given.

    `ids`: the experts (T, S) by the number of the layer; none for a model whose layers are dense.
    """

    def __init__(self) -> None:
        self.ids: dict[int, Tensor] = {}
        self._missed: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self.ids)

    def add(self, number: int, ids: Tensor) -> None:
        """Those of the next tokens (T, S)."""
        self.ids[number] = torch.cat([self.ids[number], ids]) if number in self.ids else ids.clone()

    def judged(self, number: int, scores: Tensor) -> Tensor:
        """The choice in layer `number`, (T, S) int64, after it was compared with what the scores (T, E) would choose."""
        ids = self.ids[number].long()
        chosen, best = scores.gather(-1, ids).sort(-1, descending=True).values, scores.topk(ids.shape[1]).values
        spread = scores.std(-1, correction=0).clamp_min(1e-30)  # 0 if the router is all zeros
        self._missed.append((best - chosen).mean(-1) / spread)
        return ids

    @property
    def missed(self) -> float:
        """How far the chosen scores lie below the best ones, in deviations of a token's scores: the mean of all judged."""
        return float(torch.cat(self._missed).mean()) if self._missed else 0.0


@contextmanager
def listening(model: Any, sparse: bool) -> Iterator[Choices]:
    """What a model's own routers choose in the one forward that runs meanwhile."""
    found = Choices()

    def note(number: int) -> Any:
        return lambda router, inputs, outputs: found.add(number, outputs[2])

    blocks = sparse_mlps(model) if sparse else {}
    handles = [block.gate.register_forward_hook(note(number)) for number, block in blocks.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logits(live: BoundModel, ids: Tensor, choices: Choices | None = None, rounded: Rounding = None) -> Tensor:
    """(T, V) for one sequence (T,). Weights are widened one by one. With `choices`, experts are taken as chosen there; with
    `rounded`, keys and values are what it makes of them."""
    *_, (_, result) = stages(live, ids, choices, rounded)
    return result


def stages(
    live: BoundModel, ids: Tensor, choices: Choices | None = None, rounded: Rounding = None
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


def first_not_finite(live: BoundModel, ids: Tensor) -> str:
    """The stage that first computes a NaN or infinity for this sequence, for an error message."""
    with torch.no_grad():
        for name, value in stages(live, ids):
            if not value.isfinite().all():
                return name
    return "none in fp32: the 16-bit range was left"


def _attention(live: BoundModel, layer: Block, x: Tensor, cos: Tensor, sin: Tensor, rounded: Rounding) -> Tensor:
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


def _experts(live: BoundModel, layer: SparseLayer, h: Tensor, choices: Choices | None, number: int) -> Tensor:
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


@dataclass(frozen=True)
class Accuracy:
    kind: str
    tokens: int  # whose next token was predicted
    kl_mean: float  # nats a token, of the rounded model's predictions from the original's
    kl_max: float
    same_best: float  # share of tokens where both would choose the same next one
    perplexity: float
    original_perplexity: float

    def __str__(self) -> str:
        return (
            f"over {self.tokens} tokens: KL {self.kl_mean:.1e} nats a token (at most {self.kl_max:.1e}), "
            f"{self.same_best:.1%} of the best tokens the same, "
            f"perplexity {self.perplexity:.4g} (the original's {self.original_perplexity:.4g})"
        )


@torch.no_grad()
def accuracy(body: "FusedBody", ids: Sequence[int] | Tensor) -> Accuracy:
    """What rounding costs, of weights or of keys and values: the rounded model beside the one it was made of, on a given text.

    Both in plain fp32, so that nothing but the rounding tells them apart. The decoder's table shows it from then on.
    """
    ids = torch.as_tensor(ids, device=body.device).long()
    if ids.dim() != 1 or len(ids) < 2:
        raise ValueError(f"accuracy: ids: got {tuple(ids.shape)}, wanted the ids of one text of at least two tokens.")
    if int(ids.min()) < 0 or int(ids.max()) >= body.vocab:
        raise ValueError(
            f"accuracy: ids: got {int(ids.min())} to {int(ids.max())}, wanted them in the vocabulary of {body.vocab}."
        )
    exact = body.exact()
    pieces = [ids[start : start + PIECE + 1] for start in range(0, len(ids) - 1, PIECE)]
    rows = torch.cat([_compare(body, exact, piece) for piece in pieces])
    divergence, same, loss, original_loss = rows.double().unbind(1)
    body.measured = Accuracy(
        body.rounds,
        len(rows),
        divergence.mean().item(),
        divergence.max().item(),
        same.mean().item(),
        loss.mean().exp().item(),
        original_loss.mean().exp().item(),
    )
    return body.measured


def _compare(body: "FusedBody", exact: Any, ids: Tensor) -> Tensor:
    """(T - 1, 4): divergence, same best, and both losses of every next token."""
    original = logits(body.original, ids[:-1]).log_softmax(-1)
    rounded = logits(exact, ids[:-1], rounded=body.cache.rounded).log_softmax(-1)
    divergence = (original.exp() * (original - rounded)).sum(-1)
    losses = [-x.gather(-1, ids[1:, None])[:, 0] for x in (rounded, original)]
    return torch.stack([divergence, (original.argmax(-1) == rounded.argmax(-1)).float(), *losses], 1)
