"""Speculative decoding: draft tokens out of the row's own text, and accept those that turn out right.

A step runs T tokens of each row through the model at once: the last one, and T - 1 that are drafted to follow. The model's own
choice after each of them is drawn as ever (`pick`, `sample`), by a key that is the row's seed and the position. So what the
model would have said without a draft is known for every place up to the first where the draft differs, and that is what the row
gets: the same tokens, drawn or greedy, in fewer steps. What was wrong stays in the cache beyond the row's position, where
nothing reads it, and is written over.
"""

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .ops import definition
from .sampling import Rows, check_embedding, embedding, example_rows
from .selftest import draw, ints

NGRAM = 3  # tokens at the end of a row that are looked for in it, at most


def propose(
    rows: Rows,
    text: Tensor,
    chunk: Tensor,
    position: Tensor,
    alive: Tensor,
    embed: Tensor | None = None,
    x: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor, ...]:
    """Write the next chunk of each row: its last token, and a draft of T - 1 tokens from the row's own text.

    The draft is what followed when the row's last tokens, three at most, stood in its text before. The longest match counts,
    and of equal ones the latest. A match close to the end counts as a period: "a b a b" goes on with "a b a". A row without
    a match repeats its last token.

    text       int32 (B, L): the tokens of each row, the last one at `rows.position`. Later places are not read
    chunk      int32 (B, T): becomes the last token and the T - 1 drafted ones
    position   int32 (B, T): becomes their places, L - 1 at most
    alive      int32 (B, T): becomes the row's `alive`, T times
    embed, x   a weight (V, H) and float32 (B T, H): x becomes the embeddings of the chunk
    dependent  the kernel may start while the one before it still runs, see `pick`
    """
    batch, device = len(rows.token), rows.token.device
    _check_state("propose", rows)
    require("propose", "text", text, torch.int32, (batch, "L"), device)
    require("propose", "chunk", chunk, torch.int32, (batch, "T"), device)
    for name, t in (("position", position), ("alive", alive)):
        require("propose", name, t, torch.int32, tuple(chunk.shape), device)
    check_embedding("propose", chunk.view(-1), embed, x, None)
    return implementation("propose", _as_float(text))(rows, text, chunk, position, alive, embed, x, dependent)


@definition(lambda g: (example_rows(), _text(), *_chunks(), draw(g, 9, 40).detach(), draw(g, 12, 40).detach()))
@torch.no_grad()
def propose_reference(
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
        x.copy_(embedding(embed, chunk.view(-1)))
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


def accept(
    chosen: Tensor,
    going: Tensor,
    chunk: Tensor,
    rows: Rows,
    text: Tensor,
    emitted: Tensor,
    seen: Tensor | None = None,
    chosen_logprob: Tensor | None = None,
    logprob: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor, ...]:
    """Give each row the model's choices, up to and including the first that differs from the draft.

    chosen    int32 (B, T): what `pick` or `sample` emitted for the tokens of `chunk`; -1: its logits were not finite
    going     int32 (B, T): whether the row goes on after it, as they left it in `alive`
    text      int32 (B, L): gets the new tokens after `rows.position`
    emitted   int32 (T, B), or T rows of a larger block: the new tokens, then -1
    seen      uint8 (B, V): marked at the new tokens
    logprob   float32 (T, B): of the new tokens, taken from `chosen_logprob` (B, T); then NaN

    Returns what it changed: emitted, token, position, alive, bad, text, then seen and logprob where given.
    """
    batch, device = len(rows.token), rows.token.device
    _check_state("accept", rows)
    require("accept", "chunk", chunk, torch.int32, (batch, "T"), device)
    for name, t in (("chosen", chosen), ("going", going)):
        require("accept", name, t, torch.int32, tuple(chunk.shape), device)
    require("accept", "text", text, torch.int32, (batch, "L"), device)
    _check_block("emitted", emitted, torch.int32, chunk)
    if seen is not None:
        require("accept", "seen", seen, torch.uint8, (batch, "V"), device)
    if (chosen_logprob is None) != (logprob is None):
        raise ValueError("accept: chosen_logprob and logprob go together; pass both or neither.")
    if chosen_logprob is not None and logprob is not None:
        require("accept", "chosen_logprob", chosen_logprob, torch.float32, tuple(chunk.shape), device)
        _check_block("logprob", logprob, torch.float32, chunk)
    return implementation("accept", _as_float(text))(
        chosen, going, chunk, rows, text, emitted, seen, chosen_logprob, logprob, dependent
    )


@definition(lambda g: (*_verified(), example_rows(), _text(), ints(*[0] * 12).view(3, 4)))
@torch.no_grad()
def accept_reference(
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


def _as_float(t: Tensor) -> Tensor:
    """Kernels are tested and chosen for a floating dtype; these have none, and are right in all or in none."""
    return t.view(torch.float32)


def _check_state(op: str, rows: Rows) -> None:
    for name in ("token", "position", "alive", "bad"):
        require(op, f"rows.{name}", getattr(rows, name), torch.int32, tuple(rows.token.shape), rows.token.device)


def _check_block(name: str, t: Tensor, dtype: torch.dtype, chunk: Tensor) -> None:
    batch, tokens = chunk.shape
    apart = t.dim() == 2 and t.stride(1) == 1 and (tokens == 1 or t.stride(0) >= batch)
    if t.shape != (tokens, batch) or t.dtype != dtype or not apart or t.device != chunk.device:
        raise ValueError(
            f"accept: {name} must be {dtype} ({tokens}, {batch}) with dense rows on {chunk.device}, got {t.dtype} "
            f"{tuple(t.shape)} with strides {t.stride()} on {t.device}; a line for each token that a row may get."
        )


def _text() -> Tensor:
    """Four texts of ten places, with threes, twos and ones that come again."""
    return ints(1, 2, 3, 1, 2, 3, 1, 2, 3, 1).repeat(4, 1)


def _chunks() -> list[Tensor]:
    return [ints(*[0] * 12).view(4, 3) for _ in range(3)]


def _verified() -> tuple[Tensor, ...]:
    """Chosen, going, and the chunk: all foreseen, none, a dead row, an end in the middle."""
    chosen, going = ints(5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7), ints(1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0)
    return chosen.view(4, 3), going.view(4, 3), ints(1, 5, 6, 1, 6, 7, 1, 5, 6, 1, 5, 6).view(4, 3)
