"""What rounding costs, of weights or of keys and values: the rounded model beside the one it was made of, on a given text.

Both in plain fp32, so that nothing but the rounding tells them apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import plain

if TYPE_CHECKING:
    from .fused import FusedBody

PIECE = 512  # tokens of the text read at a time, each piece from its own beginning


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
    """Compare on the token ids of a text; the decoder's table shows the result from then on."""
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
    original = plain.logits(body.original, ids[:-1]).log_softmax(-1)
    rounded = plain.logits(exact, ids[:-1], rounded=body.cache.rounded).log_softmax(-1)
    divergence = (original.exp() * (original - rounded)).sum(-1)
    losses = [-x.gather(-1, ids[1:, None])[:, 0] for x in (rounded, original)]
    return torch.stack([divergence, (original.argmax(-1) == rounded.argmax(-1)).float(), *losses], 1)
