"""What a model computes, said once more in plain fp32: the judge of the certificate, of rounding, and of NaNs.

Experts are a choice by comparison: where two experts' scores lie within rounding, one that rounds otherwise takes the other
expert and gets something else altogether, and neither is wrong. So a computation's logits are compared with what fp32 makes of
the choice that the computation made (`RoutingTrace`), and the
choice by itself: how far below the best ones the chosen scores are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.decode_product import capped_
from ..models.decoding import LayerWeights, Linear, Rounding, plain_linear, plain_norm

if TYPE_CHECKING:
    from .transformer import FusedRunner

PIECE = 512  # tokens that `accuracy` reads at a time, each piece from its own beginning


class RoutingTrace:
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
        ids = self.ids[number].long().to(scores.device)
        chosen, best = scores.gather(-1, ids).sort(-1, descending=True).values, scores.topk(ids.shape[1]).values
        spread = scores.std(-1, correction=0).clamp_min(1e-30)  # 0 if the router is all zeros
        self._missed.append((best - chosen).mean(-1) / spread)
        return ids

    @property
    def missed(self) -> float:
        """How far the chosen scores lie below the best ones, in deviations of a token's scores: the mean of all judged."""
        return float(torch.cat([t.cpu() for t in self._missed]).mean()) if self._missed else 0.0


@contextmanager
def record_routing(routers: Mapping[int, Any]) -> Iterator[RoutingTrace]:
    """What a model's own routers choose in the one forward that runs meanwhile."""
    found = RoutingTrace()

    def note(number: int) -> Any:
        return lambda router, inputs, outputs: found.add(number, outputs[2])

    handles = [router.register_forward_hook(note(number)) for number, router in routers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logits(model: Any, ids: Tensor, choices: RoutingTrace | None = None, rounded: Rounding = None) -> Tensor:
    """(T, V) for one sequence (T,). Weights are widened one by one. With `choices`, experts are taken as chosen there; with
    `rounded`, keys and values are what it makes of them."""
    *_, (_, result) = stages(model, ids, choices, rounded)
    return result.to(ids.device)


def stages(
    model: Any, ids: Tensor, choices: RoutingTrace | None = None, rounded: Rounding = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, what it computed) of every stage, in order; the last are the logits."""
    shape, home = model.shape, model.embed.device
    tables = {home: model.tables(ids.shape[0])}
    x = model.embed[ids.to(home)].float() * shape.embedded
    yield "model.embed_tokens", x
    for number, layer in enumerate(model.layers):
        x = x.to(there := layer.attention.o.weight.device)  # layers may lie on several devices
        if there not in tables:
            tables[there] = [(cos.to(there), sin.to(there)) for cos, sin in tables[home]]
        x = x + layer.attention.define(shape, x, tables[there], rounded)
        yield f"model.layers.{number}.self_attn", x
        x = x + layer.mlp.define(x, number, choices)
        yield f"model.layers.{number}.mlp", x
    x = plain_norm(x.to(home), model.norm)
    yield "model.norm", x
    yield "lm_head", capped_(plain_linear(x, Linear(model.head)), shape.logit_cap)


class RoundedModel:
    """The numbers that a body's rounded weights stand for, in fp32: it reads as a WeightView, layer by layer."""

    def __init__(self, body: "FusedRunner") -> None:
        self.body, self.shape, self.embed, self.norm = body, body.live.shape, body.live.embed, body.live.norm

    @property
    def layers(self) -> Iterator[LayerWeights]:
        return (LayerWeights(attention.exact(), mlp.exact()) for attention, mlp in self.body.layers)

    @property
    def head(self) -> Tensor:
        (head,) = self.body.head.exact()
        return head.weight

    def tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        return self.body.live.tables(length)


def first_not_finite(model: Any, ids: Tensor) -> str:
    """The stage that first computes a NaN or infinity for this sequence, for an error message."""
    with torch.no_grad():
        for name, value in stages(model, ids):
            if not value.isfinite().all():
                return name
    return "none in fp32: the 16-bit range was left"


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
def accuracy(body: Any, ids: Sequence[int] | Tensor) -> Accuracy:
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


def _compare(body: Any, exact: Any, ids: Tensor) -> Tensor:
    """(T - 1, 4): divergence, same best, and both losses of every next token."""
    original = logits(body.live, ids[:-1]).log_softmax(-1)
    rounded = logits(exact, ids[:-1], rounded=body.cache.rounded).log_softmax(-1)
    divergence = (original.exp() * (original - rounded)).sum(-1)
    losses = [-x.gather(-1, ids[1:, None])[:, 0] for x in (rounded, original)]
    return torch.stack([divergence, (original.argmax(-1) == rounded.argmax(-1)).float(), *losses], 1)
