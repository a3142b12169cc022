"""Inputs of a draft head's layer while it drafts (decode/draft_head.py): the normed embedding of a token and the normed
feature of the position before it, and the tokens as they are drafted.

Between two products of a draft there is one launch: it takes the likeliest token from the head's partial maxima, writes it to
the chunk that the model will verify, and makes the layer's next input.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .decode_product import Norm, check_keep, rms_normed
from .dispatch import implementation, require
from .ngram_speculation import Chunk
from .registry import definition, draw, frozen, ints, zeros
from .sampling import Rows, check_embedding, embedding, example_rows


class Reads(NamedTuple):
    """The weights of a head's input: the embedding (V, H), and the norms of its rows and of the feature."""

    table: Tensor
    embedded: Norm
    feature: Norm


def keep_stream(
    x: Tensor, to: Tensor, dependent: int = 0, index: Tensor | None = None, position: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Copy the stream x, float32 (N, H), or the rows `index`, int64 (M,), of it, to `to`, float32 (N or M, H), such as columns
    of a wider tensor. And, where they are given, the first of each row's positions (B, T) to `first` (B,), both int32.

    Returns what it changed: `to`, then `first` where given.
    """
    require("keep_stream", "x", x, torch.float32, ("N", "H"), x.device)
    if index is not None:
        require("keep_stream", "index", index, torch.int64, ("M",), x.device)
    check_keep("keep_stream", "to", to, x if index is None else x[: len(index)])
    if position is not None and first is not None:
        require("keep_stream", "position", position, torch.int32, ("B", "T"), x.device)
        require("keep_stream", "first", first, torch.int32, (len(position),), x.device)
    return implementation("keep_stream", x)(x, to, dependent, index, position, first)


@definition(lambda g: (draw(g, 6, 40).detach(), zeros(6, 40), 0, None, ints(*range(6)).view(3, 2), ints(0, 0, 0)))
def keep_stream_reference(x, to, dependent=0, index=None, position=None, first=None):
    to.copy_(x if index is None else x[index])
    return (to,) if position is None or first is None else (to, first.copy_(position[:, 0]))


def begin_draft(
    rows: Rows,
    text: Tensor,
    first: Tensor,
    x: Tensor,
    reads: Reads,
    chunk: Chunk,
    place: Tensor,
    last: Tensor,
    both: Tensor,
    embed: Tensor | None = None,
    to: Tensor | None = None,
    dependent: int = 0,
) -> tuple[Tensor, ...]:
    """Begin the draft of each row: the layer's inputs at the T positions of the last verified step, and all of `chunk` but its
    drafted tokens.

    The entry at position p has the embedding of the token at p + 1. Which of a row's T entries is the last accepted one follows
    from its position, which the entry's is one below.

    text       int32 (B, L): the tokens of each row. Entries after the accepted ones are read, too
    first      int32 (B,): the position of a row's first entry
    x          float32 (B T, H): their features
    place      int32 (B, T): becomes the positions, L - 1 at most
    last       int64 (B,): becomes the number in x of the row's last accepted entry
    both       float32 (B T, 2 H): becomes [normed embedding, normed feature]
    embed, to  the model's embedding and float32 (B T, width): of each row's T rows the first, its last token's, is written

    Returns what it changed: token, position and alive of the chunk, place, last, both, then `to` where given.
    """
    batch, tokens = _check("begin_draft", x, reads, chunk, both, embed, to, chunk.token.numel())
    for name, t, dtype, shape in (
        ("text", text, torch.int32, (batch, "L")),
        ("first", first, torch.int32, (batch,)),
        ("place", place, torch.int32, (batch, tokens)),
        ("last", last, torch.int64, (batch,)),
        *((f"rows.{name}", getattr(rows, name), torch.int32, (batch,)) for name in ("token", "position", "alive")),
    ):
        require("begin_draft", name, t, dtype, shape, x.device)
    run = implementation("begin_draft", reads.table)
    return run(rows, text, first, x, reads, chunk, place, last, both, embed, to, dependent)


@definition(lambda g: (
    example_rows(), ints(*range(40)).view(4, 10) % 7, ints(1, 3, 5, 9), draw(g, 12, 40).detach(), _reads(g), _chunk(),
    ints(*[0] * 12).view(4, 3), ints(0, 0, 0, 0).long(), zeros(12, 80), draw(g, 7, 24).detach(), zeros(12, 24),
))  # fmt: skip
def begin_draft_reference(rows, text, first, x, reads, chunk, place, last, both, embed=None, to=None, dependent=0):
    (batch, tokens), end = chunk.token.shape, text.shape[1] - 1
    step = torch.arange(tokens, device=x.device)
    place.copy_((first[:, None] + step).clamp(0, end))
    accepted = (rows.position - first - 1).clamp(0, tokens - 1)
    last.copy_(torch.arange(batch, device=x.device) * tokens + accepted)
    following = text.gather(1, (place + 1).clamp(max=end).long())
    both.copy_(torch.cat([rms_normed(embedding(reads.table, following.flatten()).float(), reads.embedded),
                          rms_normed(x, reads.feature)], 1))  # fmt: skip
    chunk.token[:, 0] = rows.token
    chunk.position.copy_((rows.position[:, None] + step).clamp(0, end))
    chunk.alive.copy_(rows.alive[:, None])
    if embed is None or to is None:
        return *chunk, place, last, both
    to.view(batch, tokens, -1)[:, 0] = embedding(embed, rows.token).float()
    return *chunk, place, last, both, to


def extend_draft(
    best: Tensor | None,
    arg: Tensor | None,
    targets: Tensor,
    token: Tensor,
    x: Tensor,
    reads: Reads,
    chunk: Chunk,
    at: int,
    both: Tensor | None,
    embed: Tensor | None = None,
    to: Tensor | None = None,
    dependent: int = 0,
) -> tuple[Tensor, ...]:
    """Write the next drafted token of each row to place `at` of the chunk, and the layer's input that follows from it.

    best, arg  (B, P): partial maxima of the head's logits and their tokens, as for `pick`. None: `token` has the choice
    targets    int64 (W,): the model's token of each of the head's
    token      int32 (B,): becomes the model's token; it stays where no logit is finite
    x          float32 (B, H): the feature that the token came from
    both       float32 (B, 2 H): becomes [normed embedding, normed feature]; None after the last token
    embed, to  the model's embedding and float32 (B T, width): the rows of place `at` are written

    Returns what it changed: token, the chunk's tokens, then both and `to` where given.
    """
    batch, tokens = _check("extend_draft", x, reads, chunk, both, embed, to, len(x))
    if not 1 <= at < tokens:
        raise ValueError(f"extend_draft: at: got {at}, wanted a drafted place of the chunk, from 1 to {tokens - 1}.")
    require("extend_draft", "token", token, torch.int32, (batch,), x.device)
    require("extend_draft", "targets", targets, torch.int64, ("W",), x.device)
    if best is not None and arg is not None:
        require("extend_draft", "best", best, torch.float32, (batch, "P"), x.device)
        require("extend_draft", "arg", arg, torch.int32, tuple(best.shape), x.device)
    run = implementation("extend_draft", reads.table)
    return run(best, arg, targets, token, x, reads, chunk, at, both, embed, to, dependent)


@definition(lambda g: (
    draw(g, 4, 50).detach(), ints(*range(50)).repeat(4, 1) % 5, ints(0, 2, 3, 5, 6).long(), ints(1, 1, 1, 1),
    draw(g, 4, 40).detach(), _reads(g), _chunk(), 2, zeros(4, 80), draw(g, 7, 24).detach(), zeros(12, 24),
))  # fmt: skip
def extend_draft_reference(best, arg, targets, token, x, reads, chunk, at, both, embed=None, to=None, dependent=0):
    if best is not None and arg is not None:
        top = best.amax(1)  # NaN if one of them is
        chosen = torch.where(best == top[:, None], arg, torch.iinfo(torch.int32).max).amin(1).clamp(max=len(targets) - 1)
        token.copy_(torch.where(top.isfinite(), targets.index_select(0, chosen), token))
    chunk.token[:, at] = token
    changed = [token, chunk.token]
    if both is not None:
        embedded = rms_normed(embedding(reads.table, token).float(), reads.embedded)
        changed.append(both.copy_(torch.cat([embedded, rms_normed(x, reads.feature)], 1)))
    if embed is not None and to is not None:
        to.view(*chunk.token.shape, -1)[:, at] = embedding(embed, token).float()
        changed.append(to)
    return tuple(changed)


def _check(
    op: str, x: Tensor, reads: Reads, chunk: Chunk, both: Tensor | None, embed: Tensor | None, to: Tensor | None, rows: int
) -> tuple[int, int]:
    """Check what both have, and return the batch and the tokens of a row."""
    require(op, "chunk.token", chunk.token, torch.int32, ("B", "T"), x.device)
    for name in ("position", "alive"):
        require(op, f"chunk.{name}", getattr(chunk, name), torch.int32, tuple(chunk.token.shape), x.device)
    require(op, "reads.table", reads.table, None, ("V", "H"), x.device)
    hidden = reads.table.shape[1]
    require(op, "x", x, torch.float32, (rows, hidden), x.device, "it has a feature for each entry")
    for name in ("embedded", "feature"):
        require(op, f"reads.{name}.weight", getattr(reads, name).weight, None, (hidden,), x.device)
    if both is not None:
        require(op, "both", both, torch.float32, (rows, 2 * hidden), x.device)
    check_embedding(op, chunk.token.view(-1), embed, to, None)
    return chunk.token.shape[0], chunk.token.shape[1]


def _chunk() -> Chunk:
    return Chunk(*(ints(*[0] * 12).view(4, 3) for _ in Chunk._fields))


def _reads(g: torch.Generator) -> Reads:
    return Reads(frozen(draw(g, 7, 40)), *(Norm(frozen(draw(g, 40)), 1e-5) for _ in range(2)))
