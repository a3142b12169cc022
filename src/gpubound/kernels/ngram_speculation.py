"""Speculative decoding: draft tokens out of the row's own text, and accept those that turn out right.

A step runs T tokens of each row through the model at once: the last one, and T - 1 that are drafted to follow. The model's own
choice after each of them is drawn as ever (`pick`, `sample`), by a key that is the row's seed and the position. So what the
model would have said without a draft is known for every place up to the first where the draft differs, and that is what the row
gets: the same tokens, drawn or greedy, in fewer steps. What was wrong stays in the cache beyond the row's position, where
nothing reads it, and is written over.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import implementation, require
from .registry import definition, draw, ints
from .sampling import Rows, changed, check_embedding, embedding, example_rows

NGRAM = 3  # tokens at the end of a row that are looked for in it, at most


class Chunk(NamedTuple):
    """The tokens of each row that a step runs, int32 (B, T)."""

    token: Tensor  # the row's last, and T - 1 drafted ones
    position: Tensor  # their places, L - 1 at most
    alive: Tensor  # the row's `alive`, T times; as `pick` or `sample` leave it, whether the row goes on after the token


class Said(NamedTuple):
    """Tokens, int32, and float32 of the same shape."""

    token: Tensor
    logprob: Tensor | None = None


def propose(
    rows: Rows, text: Tensor, chunk: Chunk, embed: Tensor | None = None, x: Tensor | None = None, dependent: bool = False
) -> tuple[Tensor, ...]:
    """Write the next chunk of each row: its last token, and a draft of T - 1 tokens from the row's own text.

    The draft is what followed when the row's last tokens, three at most, stood in its text before. The longest match counts,
    and of equal ones the latest. A match close to the end counts as a period: "a b a b" goes on with "a b a". A row without
    a match repeats its last token.

    text       int32 (B, L): the tokens of each row, the last one at `rows.position`. Later places are not read
    embed, x   a weight (V, H) and float32 (B T, H): x becomes the embeddings of the chunk
    dependent  the kernel may start while the one before it still runs, see `pick`
    """
    _check_state("propose", rows, text, chunk)
    check_embedding("propose", chunk.token.view(-1), embed, x, None)
    return implementation("propose", _as_float(text))(rows, text, chunk, embed, x, dependent)


@definition(lambda g: (example_rows(), _text(), _chunk(), draw(g, 9, 40).detach(), draw(g, 12, 40).detach()))
def propose_reference(rows, text, chunk, embed=None, x=None, dependent=False):
    token, position, alive = chunk
    tokens, last = token.shape[1], rows.position[:, None].long().clamp(0, text.shape[1] - 1)
    period = last - _last_match(text, last)
    step = torch.arange(tokens, device=text.device)
    drafted = last - period + 1 + (step - 1) % period
    token.copy_(text.gather(1, torch.where(step == 0, last, drafted)))
    position.copy_((last + step).clamp(max=text.shape[1] - 1))
    alive.copy_(rows.alive[:, None])
    if embed is not None and x is not None:
        x.copy_(embedding(embed, token.view(-1)))
    return chunk if x is None else (*chunk, x)


def _last_match(text: Tensor, last: Tensor) -> Tensor:
    """Return the end (B, 1) of the earlier occurrence of a row's last tokens: the longest match, then the latest."""
    width = text.shape[1]
    place = torch.arange(width, device=text.device)
    same, length = torch.ones_like(text, dtype=torch.bool), torch.zeros_like(text, dtype=torch.int64)
    for back in range(NGRAM):
        before = text.gather(1, (place - back).clamp(min=0).expand_as(text))
        same = same & (place >= back) & (before == text.gather(1, (last - back).clamp(min=0)))
        length += same
    score = torch.where(place < last, length * width + place, -1).amax(1, keepdim=True)
    return torch.where(last > 0, score % width, -1)


def accept(
    chunk: Chunk, chosen: Said, rows: Rows, text: Tensor, emitted: Said, seen: Tensor | None = None, dependent: bool = False
) -> tuple[Tensor, ...]:
    """Give each row the model's choices, up to and including the first that differs from the draft.

    chosen    (B, T): what `pick` or `sample` emitted for the tokens of `chunk`; -1: its logits were not finite
    text      int32 (B, L): gets the new tokens after `rows.position`
    emitted   (T, B), or T rows of a larger block: the new tokens, then -1; their log-probabilities, then NaN
    seen      uint8 (B, V): marked at the new tokens

    Returns what it changed: emitted, token, position, alive, bad, text, then seen and logprob where given.
    """
    _check_state("accept", rows, text, chunk)
    shape, device = tuple(chunk.token.shape), text.device
    require("accept", "chosen.token", chosen.token, torch.int32, shape, device)
    _check_block("emitted.token", emitted.token, torch.int32, chunk.token)
    if seen is not None:
        require("accept", "seen", seen, torch.uint8, (len(text), "V"), device)
    if (chosen.logprob is None) != (emitted.logprob is None):
        raise ValueError("accept: chosen.logprob and emitted.logprob go together; pass both or neither.")
    if chosen.logprob is not None and emitted.logprob is not None:
        require("accept", "chosen.logprob", chosen.logprob, torch.float32, shape, device)
        _check_block("emitted.logprob", emitted.logprob, torch.float32, chunk.token)
    return implementation("accept", _as_float(text))(chunk, chosen, rows, text, emitted, seen, dependent)


@definition(lambda g: (*_verified(), example_rows(), _text(), Said(ints(*[0] * 12).view(3, 4))))
def accept_reference(chunk, chosen, rows, text, emitted, seen=None, dependent=False):
    token, position, alive, _, bad, _ = rows
    (ran, _, going), (new_tokens, logprob) = chunk, chosen
    live, tokens = alive != 0, ran.shape[1]
    foreseen = (going[:, :-1] != 0) & (new_tokens[:, :-1] == ran[:, 1:])
    end = foreseen.long().cumprod(1).sum(1, keepdim=True)  # the last that the row gets
    accepted = (torch.arange(tokens, device=text.device) <= end) & live[:, None] & (new_tokens >= 0)
    emitted.token.copy_(torch.where(accepted, new_tokens, -1).t())
    if logprob is not None and emitted.logprob is not None:
        emitted.logprob.copy_(torch.where(accepted, logprob, torch.nan).t())
    place = torch.arange(text.shape[1], device=text.device)
    for t in range(tokens):
        here = (place == position[:, None] + 1 + t) & accepted[:, t, None]
        text.copy_(torch.where(here, new_tokens[:, t, None], text))
        if seen is not None:
            word = torch.arange(seen.shape[1], device=text.device)
            seen.copy_(torch.where((word == new_tokens[:, t, None]) & accepted[:, t, None], 1, seen))
    final, drafted, goes_on = (t.gather(1, end)[:, 0] for t in (new_tokens, ran, going))
    bad.copy_(torch.where(live & (final < 0) & (bad == 0), position + end[:, 0] + 1, bad))
    token.copy_(torch.where(live, torch.where(final >= 0, final, drafted), token))
    position.add_(torch.where(live, end[:, 0] + goes_on, 0))
    alive.copy_(live & (goes_on != 0))
    return changed(rows, emitted.token, text, seen, emitted.logprob)


def _as_float(t: Tensor) -> Tensor:
    """Kernels are tested and chosen for a floating dtype; these have none, and are right in all or in none."""
    return t.view(torch.float32)


def _check_state(op: str, rows: Rows, text: Tensor, chunk: Chunk) -> None:
    batch, device = len(rows.token), rows.token.device
    for name in ("token", "position", "alive", "bad"):
        require(op, f"rows.{name}", getattr(rows, name), torch.int32, tuple(rows.token.shape), device)
    require(op, "text", text, torch.int32, (batch, "L"), device)
    require(op, "chunk.token", chunk.token, torch.int32, (batch, "T"), device)
    for name in ("position", "alive"):
        require(op, f"chunk.{name}", getattr(chunk, name), torch.int32, tuple(chunk.token.shape), device)


def _check_block(name: str, t: Tensor, dtype: torch.dtype, like: Tensor) -> None:
    batch, tokens = like.shape
    apart = t.dim() == 2 and t.stride(1) == 1 and (tokens == 1 or t.stride(0) >= batch)
    if t.shape != (tokens, batch) or t.dtype != dtype or not apart or t.device != like.device:
        raise ValueError(
            f"accept: {name} must be {dtype} ({tokens}, {batch}) with dense rows on {like.device}, got {t.dtype} "
            f"{tuple(t.shape)} with strides {t.stride()} on {t.device}; a line for each token that a row may get."
        )


def _text() -> Tensor:
    """Four texts of ten places, with threes, twos and ones that come again."""
    return ints(1, 2, 3, 1, 2, 3, 1, 2, 3, 1).repeat(4, 1)


def _chunk() -> Chunk:
    return Chunk(*(ints(*[0] * 12).view(4, 3) for _ in range(3)))


def _verified() -> tuple[Chunk, Said]:
    """The chunk and what was chosen: all foreseen, none, a dead row, an end in the middle."""
    token, going = ints(1, 5, 6, 1, 6, 7, 1, 5, 6, 1, 5, 6), ints(1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0)
    return _chunk()._replace(token=token.view(4, 3), alive=going.view(4, 3)), Said(ints(5, 6, 7).repeat(4, 1))
