"""Drafts from a row's own text, and which of them the model's own choices bear out, in plain torch."""

import torch
from torch import Tensor

from ..sampling import Rows
from ..speculation import NGRAM
from .sampling import _embedding


@torch.no_grad()
def propose(
    rows: Rows, text: Tensor, chunk: Tensor, position: Tensor, alive: Tensor, embed: Tensor | None = None,
    x: Tensor | None = None, dependent: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    tokens, last = chunk.shape[1], rows.position[:, None].long().clamp(0, text.shape[1] - 1)
    period = last - _found(text, last)
    step = torch.arange(tokens, device=text.device)
    drafted = last - period + 1 + (step - 1) % period
    chunk.copy_(text.gather(1, torch.where(step == 0, last, drafted)))
    position.copy_((last + step).clamp(max=text.shape[1] - 1))
    alive.copy_(rows.alive[:, None])
    if embed is not None and x is not None:
        x.copy_(_embedding(embed, chunk.view(-1)))
    return tuple(t for t in (chunk, position, alive, x) if t is not None)


def _found(text: Tensor, last: Tensor) -> Tensor:
    """Where a row's last tokens end when they stood there before (B, 1): the longest match, then the latest."""
    width = text.shape[1]
    place = torch.arange(width, device=text.device)
    same, length = torch.ones_like(text, dtype=torch.bool), torch.zeros_like(text, dtype=torch.int64)
    for back in range(NGRAM):
        before = text.gather(1, (place - back).clamp(min=0).expand_as(text))
        same = same & (place >= back) & (before == text.gather(1, (last - back).clamp(min=0)))
        length += same
    score = torch.where(place < last, length * width + place, -1).amax(1, keepdim=True)
    return torch.where(last > 0, score % width, -1)


@torch.no_grad()
def accept(
    chosen: Tensor, going: Tensor, chunk: Tensor, rows: Rows, text: Tensor, emitted: Tensor, seen: Tensor | None = None,
    chosen_logprob: Tensor | None = None, logprob: Tensor | None = None, dependent: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    token, position, alive, _, bad, _ = rows
    live, tokens = alive != 0, chunk.shape[1]
    foreseen = (going[:, :-1] != 0) & (chosen[:, :-1] == chunk[:, 1:])
    end = foreseen.long().cumprod(1).sum(1, keepdim=True)  # the last that the row gets
    taken = (torch.arange(tokens, device=chunk.device) <= end) & live[:, None] & (chosen >= 0)
    emitted.copy_(torch.where(taken, chosen, -1).t())
    if logprob is not None and chosen_logprob is not None:
        logprob.copy_(torch.where(taken, chosen_logprob, torch.nan).t())
    place = torch.arange(text.shape[1], device=text.device)
    for t in range(tokens):
        here = (place == position[:, None] + 1 + t) & taken[:, t, None]
        text.copy_(torch.where(here, chosen[:, t, None], text))
        if seen is not None:
            word = torch.arange(seen.shape[1], device=text.device)
            seen.copy_(torch.where((word == chosen[:, t, None]) & taken[:, t, None], 1, seen))
    final, drafted, goes_on = (t.gather(1, end)[:, 0] for t in (chosen, chunk, going))
    bad.copy_(torch.where(live & (final < 0) & (bad == 0), position + end[:, 0] + 1, bad))
    token.copy_(torch.where(live, torch.where(final >= 0, final, drafted), token))
    position.add_(torch.where(live, end[:, 0] + goes_on, 0))
    alive.copy_(live & (goes_on != 0))
    return tuple(t for t in (emitted, token, position, alive, bad, text, seen, logprob) if t is not None)
