"""Choose the next token of each row, and move the row on.

Everything happens on the device and in place, so that a decoding step, or many of them, can lie in one CUDA graph: the choice,
the stop tokens, the length limit, the position, and the embedding of what was chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .choose import implementation


class Rows(NamedTuple):
    """Where each row of a batch stands: int32 (B,), and changed in place by every step, but for `limit` and `stops`."""

    token: Tensor  # the last token, whose keys and values are not in the cache yet
    position: Tensor  # its place in the row, which is also the number of tokens in the cache
    alive: Tensor  # 1 while the row generates
    limit: Tensor  # tokens that the row may hold in all
    bad: Tensor  # 0, or 1 + the position whose logits were not finite
    stops: Tensor  # (S,): a row ends with any of these tokens; padded with -1


class Settings(NamedTuple):
    """How each row chooses: one value a row, read by every step, so that a captured graph follows what is written here."""

    temperature: Tensor  # float32; 0 takes the largest logit
    top_k: Tensor  # int32; 0 is off
    top_p: Tensor  # float32; 1 is off
    min_p: Tensor  # float32; 0 is off
    penalty: Tensor  # float32, of tokens that the row has seen; 1 is off
    seed: Tensor  # int64
    row: Tensor  # int32: the number of the sequence in its request, whatever slot of the batch it sits in
    seen: Tensor | None = None  # uint8 (B, V): 1 where the row holds the token; None: no row has a penalty


def pick(
    best: Tensor,
    arg: Tensor,
    rows: Rows,
    emitted: Tensor,
    seen: Tensor | None = None,
    embed: Tensor | None = None,
    x: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor, ...]:
    """The token with the largest logit, from partial maxima `best` (B, P) and their tokens `arg` (B, P), then the step of
    `rows` (docs/kernels-sampling.md). Of equal maxima the lowest token is taken.

    emitted   int32 (B,): the new token, or -1 where the row is not alive or its maximum is NaN or infinite
    seen      uint8 (B, V): marked at the new token
    embed, x  a weight (V, H) and float32 (B, H): x becomes the embedding of every row's token, so that the next step can begin
    dependent lets the kernel start while the one before it still runs (programmatic dependent launch): for a chain of kernels
              each of which waits for the one before

    Returns what it changed: emitted, token, position, alive, bad, then seen and x where given.
    """
    _check("pick", "best", best, torch.float32, best.shape if best.dim() == 2 else ("B", "P"), best.device)
    _check("pick", "arg", arg, torch.int32, tuple(best.shape), best.device)
    _check_rows("pick", rows, emitted, best)
    if seen is not None:
        _check("pick", "seen", seen, torch.uint8, (len(best), "V"), best.device)
    _check_embedding("pick", best, embed, x, None if seen is None else seen.shape[1])
    return implementation("sampling.pick", best)(best, arg, rows, emitted, seen, embed, x, dependent)


def sample(
    logits: Tensor,
    rows: Rows,
    settings: Settings,
    emitted: Tensor,
    logprob: Tensor | None = None,
    embed: Tensor | None = None,
    x: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor, ...]:
    """A token from the logits (B, V) under each row's settings, then the step of `rows` as in `pick`.

    In this order: repetition penalty, temperature, top-k, top-p of what is left, min-p. The draw depends on seed, row, position
    and the logits alone: the same in any slot, batch and graph.

    logprob   float32 (B,): of the new token under softmax(logits), before any setting; NaN where none is emitted

    Returns what it changed: emitted, token, position, alive, bad, then seen, logprob and x where given.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(
            f"sample: logits must be a torch.float32 matrix (B, V) whose rows are dense, got {logits.dtype} "
            f"{tuple(logits.shape)} with strides {logits.stride()}; cast or copy them into one buffer."
        )
    batch, words = logits.shape
    _check_rows("sample", rows, emitted, logits)
    for name, dtype in SETTINGS.items():
        _check("sample", f"settings.{name}", getattr(settings, name), dtype, (batch,), logits.device)
    if settings.seen is not None:
        _check("sample", "settings.seen", settings.seen, torch.uint8, (batch, words), logits.device)
    if logprob is not None:
        _check("sample", "logprob", logprob, torch.float32, (batch,), logits.device)
    _check_embedding("sample", logits, embed, x, words)
    return implementation("sampling.sample", logits)(logits, rows, settings, emitted, logprob, embed, x, dependent)


SETTINGS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "penalty": torch.float32,
    "seed": torch.int64,
    "row": torch.int32,
}


def _check_rows(op: str, rows: Rows, emitted: Tensor, first: Tensor) -> None:
    state = {f"rows.{name}": t for name, t in zip(Rows._fields, rows) if name != "stops"} | {"emitted": emitted}
    for name, t in state.items():
        _check(op, name, t, torch.int32, (len(first),), first.device)
    _check(op, "rows.stops", rows.stops, torch.int32, ("S",), first.device)


def _check_embedding(op: str, first: Tensor, embed: Tensor | None, x: Tensor | None, words: int | None) -> None:
    if (embed is None) != (x is None):
        raise ValueError(
            f"{op}: embed and x go together, got only {'x' if embed is None else 'embed'}; "
            f"pass both for the next step's embeddings, or neither."
        )
    if embed is None or x is None:
        return
    if embed.dim() != 2 or not embed.is_floating_point() or not embed.is_contiguous() or embed.device != first.device:
        raise ValueError(
            f"{op}: embed must be a contiguous floating-point weight (V, H) on {first.device}, got {embed.dtype} "
            f"{tuple(embed.shape)} on {embed.device}; pass the model's own."
        )
    if words is not None and embed.shape[0] < words:
        raise ValueError(
            f"{op}: embed has {embed.shape[0]} rows for a vocabulary of {words}; a token beyond them would have no embedding."
        )
    _check(op, "x", x, torch.float32, (len(first), embed.shape[1]), first.device)


def _check(op: str, name: str, t: Tensor, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    """`shape` holds sizes, or a letter where any from 1 up will do: of S, the stops, there may be none."""
    fits = t.dim() == len(shape) and all(
        want == "S" or got > 0 if isinstance(want, str) else got == want for got, want in zip(t.shape, shape)
    )
    if t.dtype != dtype or not fits or t.device != device or not t.is_contiguous():
        wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(
            f"{op}: {name} must be a contiguous {dtype} tensor {wanted} on {device}, got {t.dtype} {tuple(t.shape)} on "
            f"{t.device}{'' if t.is_contiguous() else ', not contiguous'}; make it once, and change it in place."
        )
