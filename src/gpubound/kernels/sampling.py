"""Choose the next token of each row, and advance the row.

All of it runs on the device and in place, so that a CUDA graph can contain one decoding step or many: the choice, the stop
tokens, the length limit, the position, and the embedding of the new token.

The draw is an exponential race: token v, with probability p_v before normalisation, finishes at E_v / p_v with E_v exponential,
and the first to finish wins, v with probability p_v / Σ p. (Adding Gumbel noise to logits and taking the maximum is the same
race: −log of these times.) Under top-k, top-p or min-p the tokens that are left race. Without them chunks of CHUNK tokens do,
each with the sum of its tokens' p, and then the tokens of the first one, so a GPU needs noise for one chunk alone.

E_v comes from a generator without state, Philox 4x32-10 of Salmon et al. 2011, by the counter (v // 4, position, row, 0), the
seed as key, and word v % 4; that of chunk c by (c // 4, position, row, 1). So a row gets the same tokens in any slot and at any
time.

Top-k, top-p and min-p are thresholds on the value: tokens that are equal are kept or dropped together.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import SIXTEEN_BITS, implementation, require
from .registry import definition, doubles, draw, frozen, ints

LOW = 0xFFFFFFFF  # the lower word of an int64
CHUNK = 4096  # tokens: a GPU's program reads them at once, and a vocabulary of 151,936 has 38


class Rows(NamedTuple):
    """State of each row of a batch: int32 (B,), changed in place by every step, but for `limit` and `stops`."""

    token: Tensor  # the last token, whose keys and values are not in the cache yet
    position: Tensor  # its place in the row, which is also the number of tokens in the cache
    alive: Tensor  # 1 while the row generates
    limit: Tensor  # tokens that the row may hold in all
    bad: Tensor  # 0, or 1 + the position whose logits were not finite
    stops: Tensor  # (S,): a row ends with any of these tokens; padded with -1

    def part(self, rows: slice) -> "Rows":
        return Rows._make([*(t[rows] for t in self[:-1]), self.stops])

    def first(self, count: int) -> "Rows":
        return self.part(slice(count))


class Settings(NamedTuple):
    """Sampling settings, one value a row. A captured graph reads them at each replay."""

    temperature: Tensor  # float32; 0 takes the largest logit
    top_k: Tensor  # int32; 0 is off
    top_p: Tensor  # float32; 1 is off
    min_p: Tensor  # float32; 0 is off
    penalty: Tensor  # float32, of tokens that the row has seen; 1 is off
    seed: Tensor  # int64
    row: Tensor  # int32: the number of the sequence in its request, whatever slot of the batch it sits in
    seen: Tensor | None = None  # uint8 (B, V): 1 where the row holds the token; None: no row has a penalty


class Into(NamedTuple):
    """Outputs of a choice."""

    emitted: Tensor  # int32 (B,): the new token, or -1 where the row is not alive or its largest logit is NaN or infinite
    embed: Tensor | None = None  # a weight (V, H), with x: both or neither
    x: Tensor | None = None  # float32 (B, H): becomes the embedding of every row's token, for the next step


SETTINGS = dict.fromkeys(Settings._fields[:-1], torch.float32)
SETTINGS |= {"top_k": torch.int32, "seed": torch.int64, "row": torch.int32}


def pick(
    best: Tensor, arg: Tensor, rows: Rows, into: Into, seen: Tensor | None = None, dependent: bool = False
) -> tuple[Tensor, ...]:
    """The token with the largest logit, out of P maxima per row: `best` (B, P), with their tokens in `arg` (B, P). Of equal
    maxima the lowest token wins. Then `rows` take their step (docs/kernels.md).

    seen       uint8 (B, V): marked at the new token
    dependent  the kernel may start while the one before it still runs (programmatic dependent launch), in a chain of kernels
               where each waits for the one before

    Returns what it changed: emitted, token, position, alive, bad, then seen and x where given.
    """
    require("pick", "best", best, torch.float32, best.shape if best.dim() == 2 else ("B", "P"), best.device)
    require("pick", "arg", arg, torch.int32, tuple(best.shape), best.device)
    if seen is not None:
        require("pick", "seen", seen, torch.uint8, (len(best), "V"), best.device)
    _check_rows("pick", rows, into, best, None if seen is None else seen.shape[1])
    return implementation("pick", best)(best, arg, rows, into, seen, dependent)


@definition(lambda g: (draw(g, 4, 50).detach(), _counted(4, 50), example_rows(), _into(g)))
def pick_reference(best, arg, rows, into, seen=None, dependent=False):
    top = best.amax(1)  # NaN if one of them is
    token = torch.where(best == top[:, None], arg, torch.iinfo(torch.int32).max).amin(1)
    return _advance(token, top.isfinite(), rows, into, seen)


def sample(
    logits: Tensor, rows: Rows, settings: Settings, into: Into, logprob: Tensor | None = None, dependent: bool = False,
    filtered: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Draw a token per row from the logits (B, V), in fp32 or 16 bits, by the row's settings. Then `rows` take their step, as
    in `pick`.

    The settings apply in this order: repetition penalty, temperature, top-k, top-p of what is left, min-p. The draw depends
    on seed, row, position and logits alone, so it is the same in any slot, batch and graph.

    logprob   float32 (B,): of the new token under softmax(logits), before any setting; NaN where none is emitted
    filtered  False: no row is under top-k, top-p or min-p, and the launch for such rows is left out

    Returns what it changed: emitted, token, position, alive, bad, then seen, logprob and x where given.
    """
    known = logits.dtype in (torch.float32, *SIXTEEN_BITS)
    if logits.dim() != 2 or not known or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(
            f"sample: logits must be a matrix (B, V) in torch.float32 or 16 bits whose rows are dense, got {logits.dtype} "
            f"{tuple(logits.shape)} with strides {logits.stride()}; cast or copy them into one buffer."
        )
    batch, words = logits.shape
    _check_rows("sample", rows, into, logits, words)
    for name, dtype in SETTINGS.items():
        require("sample", f"settings.{name}", getattr(settings, name), dtype, (batch,), logits.device)
    if settings.seen is not None:
        require("sample", "settings.seen", settings.seen, torch.uint8, (batch, words), logits.device)
    if logprob is not None:
        require("sample", "logprob", logprob, torch.float32, (batch,), logits.device)
    return implementation("sample", logits)(logits, rows, settings, into, logprob, dependent, filtered)


@definition(lambda g: (frozen(draw(g, 4, 300)), example_rows(), _settings(), _into(g)))
def sample_reference(logits, rows, settings, into, logprob=None, dependent=False, filtered=True):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled, top = _scaled(logits, settings)
    warm, sampled = settings.temperature > 0, scaled.argmax(1)
    if warm.device.type != "cpu" or warm.any():  # noise for a vocabulary takes a CPU longer than all else; a GPU is not asked
        sampled = torch.where(warm, _race(scaled, rows.position, settings, filtered), sampled)
    good = top.isfinite()
    if logprob is not None:
        chosen = torch.log_softmax(logits.double(), 1).gather(1, sampled[:, None])[:, 0]
        logprob.copy_(torch.where((rows.alive != 0) & good, chosen, torch.nan))
    return _advance(sampled.to(torch.int32), good, rows, into, settings.seen, logprob)


def _scaled(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Log-probabilities up to a constant, the largest 0: penalised, then divided by the temperature (1 where that is 0).
    And the largest penalised logit."""
    if settings.seen is not None:
        penalty = settings.penalty[:, None]
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(settings.seen != 0, penalised, logits)
    top = logits.amax(1)
    temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0).clamp(min=1e-30)
    return (logits - top[:, None]) * temperature.reciprocal()[:, None], top


def _floor(scaled: Tensor, settings: Settings) -> Tensor:
    """The smallest value that top-k, top-p and min-p leave in each row, or something below it."""
    ordered, words = scaled.sort(1, descending=True).values, scaled.shape[1]
    count = torch.where(settings.top_k > 0, settings.top_k.clamp(max=words), words).long()
    floor = ordered.gather(1, count[:, None] - 1)
    mass = torch.where(ordered >= floor, ordered.double().exp(), 0.0).cumsum(1)
    short = (mass < settings.top_p[:, None].double() * mass[:, -1:]).sum(1, keepdim=True)
    top_p = torch.where(settings.top_p[:, None] < 1, ordered.gather(1, short.clamp(max=words - 1)), -torch.inf)
    return torch.maximum(torch.maximum(floor, top_p), settings.min_p[:, None].log()).clamp(max=0.0)[:, 0]


def _race(scaled: Tensor, position: Tensor, settings: Settings, filtered: bool = True) -> Tensor:
    """The token that finishes first: among those that are kept, or, where all are, in the chunk that does."""
    words, chunks = scaled.shape[1], -(-scaled.shape[1] // CHUNK)
    mass = scaled.double().exp()
    if filtered:
        mass = torch.where(scaled >= _floor(scaled, settings)[:, None], mass, 0.0)
    sums = F.pad(mass, (0, chunks * CHUNK - words)).unflatten(1, (chunks, CHUNK)).sum(2)
    chunk = _first(sums, position, settings, 1)
    unfiltered = ((settings.top_k <= 0) | (settings.top_k >= words)) & (settings.top_p >= 1) & (settings.min_p <= 0)
    outside = torch.arange(words, device=scaled.device) // CHUNK != chunk[:, None]
    return _first(mass.masked_fill(outside & unfiltered[:, None], 0.0), position, settings, 0)


def _first(mass: Tensor, position: Tensor, settings: Settings, stream: int) -> Tensor:
    """The column of `mass` that finishes first."""
    bits = _noise(settings.seed, position, settings.row, mass.shape[1], stream)
    return (-torch.log1p(-(bits.double() + 0.5) / 2**32) / mass).argmin(1)


def _noise(seed: Tensor, position: Tensor, row: Tensor, words: int, stream: int = 0) -> Tensor:
    """32 random bits for each token or chunk of each row, as int64 (B, words)."""
    quads = -(-words // 4)
    size = len(seed), quads
    counter = torch.arange(quads, device=seed.device).expand(size), (row.long() & LOW)[:, None].expand(size)
    other = position.long()[:, None].expand(size), torch.full(size, stream, device=seed.device, dtype=torch.int64)
    key = torch.stack([seed & LOW, (seed >> 32) & LOW])[..., None]
    noise = _philox(torch.stack(counter), torch.stack(other), key)
    return torch.stack(noise, -1).permute(1, 2, 0, 3).flatten(1)[:, :words]


def _philox(even: Tensor, odd: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds on words of 32 bits held in int64, two at once: numbers 0 and 2 of a counter, then 1 and 3, and its key.

    A product of two words has 64 bits, and int64 wraps around to the same ones.
    """
    factors, steps = _words(even, 0xD2511F53, 0xCD9E8D57), _words(even, 0x9E3779B9, 0xBB67AE85)
    for _ in range(10):
        product = (even * factors).flip(0)
        even, odd = ((product >> 32) & LOW) ^ odd ^ key, product & LOW
        key = (key + steps) & LOW
    return even, odd


def _words(like: Tensor, first: int, second: int) -> Tensor:
    """Return two words on the device of `like`, made without a copy from the host."""
    return first + (second - first) * torch.arange(2, device=like.device)[:, None, None]


def _advance(
    chosen: Tensor, good: Tensor, rows: Rows, into: Into, seen: Tensor | None, logprob: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Give each living row its token, or mark it bad, and decide whether it goes on."""
    (token, position, alive, limit, bad, stops), (emitted, embed, x) = rows, into
    live = alive != 0
    emits = live & good
    emitted.copy_(torch.where(emits, chosen, -1))
    bad.copy_(torch.where(live & ~good & (bad == 0), position + 1, bad))
    token.copy_(torch.where(emits, chosen, token))
    if seen is not None:
        here = torch.arange(seen.shape[1], device=seen.device) == token[:, None]
        seen.copy_(torch.where(here & emits[:, None], 1, seen))
    goes_on = emits & ~(token[:, None] == stops).any(1) & (position + 2 < limit)
    alive.copy_(goes_on)
    position.add_(goes_on)
    if embed is not None and x is not None:
        x.copy_(embedding(embed, token))
    return changed(rows, emitted, seen, logprob, x)


def changed(rows: Rows, emitted: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    return emitted, rows.token, rows.position, rows.alive, rows.bad, *(t for t in others if t is not None)


def embedding(embed: Tensor, token: Tensor) -> Tensor:
    """The rows of the tokens; NaN for a token that has none."""
    known = (token >= 0) & (token < len(embed))
    return embed.index_select(0, torch.where(known, token, 0)).masked_fill(~known[:, None], torch.nan)


def _check_rows(op: str, rows: Rows, into: Into, first: Tensor, words: int | None) -> None:
    for name, t in [*zip((f"rows.{field}" for field in Rows._fields[:-1]), rows), ("emitted", into.emitted)]:
        require(op, name, t, torch.int32, (len(first),), first.device)
    require(op, "rows.stops", rows.stops, torch.int32, ("S",), first.device)
    check_embedding(op, first, into.embed, into.x, words)


def check_embedding(op: str, first: Tensor, embed: Tensor | None, x: Tensor | None, words: int | None) -> None:
    if (embed is None) != (x is None):
        raise ValueError(f"{op}: embed and x go together, got only {'x' if embed is None else 'embed'}; pass both or neither.")
    if embed is None or x is None:
        return
    require(op, "embed", embed, None, ("V", "H"), first.device, "pass the model's own weight")
    if words is not None and len(embed) < words:
        raise ValueError(f"{op}: embed has {len(embed)} rows for a vocabulary of {words}; tokens beyond have no embedding.")
    require(op, "x", x, torch.float32, (len(first), embed.shape[1]), first.device)


def example_rows() -> Rows:
    """Four rows: two go on, one is dead, one reaches its limit."""
    return Rows(ints(1, 1, 1, 1), ints(3, 4, 5, 6), ints(1, 1, 0, 1), ints(9, 9, 9, 8), ints(0, 0, 0, 0), ints(7, -1))


def _settings() -> Settings:
    """Greedy; top-k and min-p; anything; top-p."""
    cool, top_p = doubles(0, 0.8, 1, 1.2).float(), doubles(1, 1, 1, 0.9).float()
    min_p, penalty = doubles(0, 0.05, 0, 0).float(), doubles(1, 1.3, 1, 1).float()
    seen = (_counted(4, 300) % 3 == 0).to(torch.uint8)
    return Settings(cool, ints(0, 20, 0, 0), top_p, min_p, penalty, ints(1, 2, 3, 4).long(), ints(0, 1, 0, 1), seen)


def _counted(rows: int, columns: int) -> Tensor:
    return ints(*range(columns)).repeat(rows, 1)


def _into(generator: torch.Generator) -> Into:
    return Into(ints(0, 0, 0, 0), draw(generator, 300, 40).detach(), draw(generator, 4, 40).detach())
