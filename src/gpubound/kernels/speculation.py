"""Speculative decoding: draft tokens out of the row's own text, and accept those that turn out right.

A step runs T tokens of each row through the model at once: the last one, and T - 1 that are drafted to follow. The model's own
choice after each of them is drawn as ever (`pick`, `sample`), by a key that is the row's seed and the position. So what the
model would have said without a draft is known for every place up to the first where the draft differs, and that is what the row
gets: the same tokens, drawn or greedy, in fewer steps. What was wrong stays in the cache beyond the row's position, where
nothing reads it, and is written over.
"""

import torch
from torch import Tensor

from .choose import implementation
from .sampling import Rows, _check, _check_embedding

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
    """What to run next: each row's last token, and what followed when its last tokens stood in the row before.

    The longest match counts, of three tokens at most, of equal ones the latest. A match close to the end is taken as a period:
    "a b a b" goes on with "a b a". A row without a match repeats its last token.

    text      int32 (B, L): the tokens of each row, the last one at `rows.position`; what lies beyond is not read
    chunk     int32 (B, T): becomes the token and the T - 1 drafted ones
    position  int32 (B, T): becomes their places, L - 1 at most
    alive     int32 (B, T): becomes the row's
    embed, x  a weight (V, H) and float32 (B T, H): x becomes the embedding of all
    dependent lets the kernel start while the one before it still runs, see `pick`
    """
    batch, device = len(rows.token), rows.token.device
    _check_state("propose", rows)
    _check("propose", "text", text, torch.int32, (batch, "L"), device)
    _check("propose", "chunk", chunk, torch.int32, (batch, "T"), device)
    for name, t in (("position", position), ("alive", alive)):
        _check("propose", name, t, torch.int32, tuple(chunk.shape), device)
    _check_embedding("propose", chunk.view(-1), embed, x, None)
    return implementation("speculation.propose", _as_float(text))(rows, text, chunk, position, alive, embed, x, dependent)


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
    """Give each row the model's choices up to the first that its draft did not foresee, that one included.

    chosen    int32 (B, T): what `pick` or `sample` emitted for the tokens of `chunk`; -1: its logits were not finite
    going     int32 (B, T): whether the row goes on after it, as they left it in `alive`
    text      int32 (B, L): gets the new tokens behind `rows.position`
    emitted   int32 (T, B), rows of a larger block if need be: the new tokens, then -1
    seen      uint8 (B, V): marked at the new tokens
    logprob   float32 (T, B): of the new tokens, out of `chosen_logprob` (B, T); NaN beyond

    Returns what it changed: emitted, token, position, alive, bad, text, then seen and logprob where given.
    """
    batch, device = len(rows.token), rows.token.device
    _check_state("accept", rows)
    _check("accept", "chunk", chunk, torch.int32, (batch, "T"), device)
    for name, t in (("chosen", chosen), ("going", going)):
        _check("accept", name, t, torch.int32, tuple(chunk.shape), device)
    _check("accept", "text", text, torch.int32, (batch, "L"), device)
    _check_block("emitted", emitted, torch.int32, chunk)
    if seen is not None:
        _check("accept", "seen", seen, torch.uint8, (batch, "V"), device)
    if (chosen_logprob is None) != (logprob is None):
        raise ValueError("accept: chosen_logprob and logprob go together; pass both or neither.")
    if chosen_logprob is not None and logprob is not None:
        _check("accept", "chosen_logprob", chosen_logprob, torch.float32, tuple(chunk.shape), device)
        _check_block("logprob", logprob, torch.float32, chunk)
    return implementation("speculation.accept", _as_float(text))(
        chosen, going, chunk, rows, text, emitted, seen, chosen_logprob, logprob, dependent
    )


def _as_float(t: Tensor) -> Tensor:
    """Kernels are tested and chosen for a floating dtype; these have none, and are right in all or in none."""
    return t.view(torch.float32)


def _check_state(op: str, rows: Rows) -> None:
    for name in ("token", "position", "alive", "bad"):
        _check(op, f"rows.{name}", getattr(rows, name), torch.int32, tuple(rows.token.shape), rows.token.device)


def _check_block(name: str, t: Tensor, dtype: torch.dtype, chunk: Tensor) -> None:
    batch, tokens = chunk.shape
    apart = t.dim() == 2 and t.stride(1) == 1 and (tokens == 1 or t.stride(0) >= batch)
    if t.shape != (tokens, batch) or t.dtype != dtype or not apart or t.device != chunk.device:
        raise ValueError(
            f"accept: {name} must be {dtype} ({tokens}, {batch}) with dense rows on {chunk.device}, got {t.dtype} "
            f"{tuple(t.shape)} with strides {t.stride()} on {t.device}; a line for each token that a row may get."
        )
