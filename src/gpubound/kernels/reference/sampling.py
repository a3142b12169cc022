"""The choice of the next token and the step of a row, in plain torch.

The draw is an exponential race: token v, with probability p_v before normalisation, finishes at E_v / p_v with E_v exponential,
and the first to finish wins, v with probability p_v / Σ p. (Adding Gumbel noise to logits and taking the maximum is the same
race: −log of these times.) E_v comes from a generator without state, Philox 4x32-10 of Salmon et al. 2011, by the counter
(v // 4, position, row, 0), the seed as key, and word v % 4. So nothing that moves a row in memory or time changes its tokens.

Top-k, top-p and min-p are thresholds on the value: tokens that are equal are kept or dropped together.
"""

import torch
from torch import Tensor

from ..sampling import Rows, Settings


@torch.no_grad()
def pick(
    best: Tensor, arg: Tensor, rows: Rows, emitted: Tensor, seen: Tensor | None = None,
    embed: Tensor | None = None, x: Tensor | None = None, dependent: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    top = best.amax(1)  # NaN if one of them is
    token = torch.where(best == top[:, None], arg, torch.iinfo(torch.int32).max).amin(1)
    return _advance(token, top.isfinite(), rows, emitted, seen, None, embed, x)


@torch.no_grad()
def sample(
    logits: Tensor, rows: Rows, settings: Settings, emitted: Tensor, logprob: Tensor | None = None,
    embed: Tensor | None = None, x: Tensor | None = None, dependent: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    scaled, top = _scaled(logits, settings)
    drawn = torch.where(settings.temperature > 0, _race(scaled, rows.position, settings), scaled.argmax(1))
    good = top.isfinite()
    if logprob is not None:
        chosen = torch.log_softmax(logits.double(), 1).gather(1, drawn[:, None])[:, 0]
        logprob.copy_(torch.where((rows.alive != 0) & good, chosen, torch.nan))
    return _advance(drawn.to(torch.int32), good, rows, emitted, settings.seen, logprob, embed, x)


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


def _race(scaled: Tensor, position: Tensor, settings: Settings) -> Tensor:
    """The token that finishes first among those that are kept."""
    bits = _noise(settings.seed, position, settings.row, scaled.shape[1])
    exponential = -torch.log1p(-(bits.double() + 0.5) / 2**32)
    kept = scaled >= _floor(scaled, settings)[:, None]
    return torch.where(kept, exponential / scaled.double().exp(), torch.inf).argmin(1)


def _noise(seed: Tensor, position: Tensor, row: Tensor, words: int) -> Tensor:
    """32 random bits for each token of each row, as int64 (B, words)."""
    counter = torch.arange(-(-words // 4), device=seed.device)[None]
    key = seed[:, None] & 0xFFFFFFFF, (seed[:, None] >> 32) & 0xFFFFFFFF
    drawn = _philox(counter, position[:, None].long(), row[:, None].long() & 0xFFFFFFFF, torch.zeros_like(counter), *key)
    return torch.stack(drawn, 2).flatten(1)[:, :words]


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Ten rounds on words of 32 bits held in int64."""
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high2, low2 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a · b; by halves of b, as the whole product would not fit int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + high  # at most 2^48
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _advance(
    chosen: Tensor, good: Tensor, rows: Rows, emitted: Tensor, seen: Tensor | None, logprob: Tensor | None,
    embed: Tensor | None, x: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Give each living row its token, or mark it bad, and decide whether it goes on."""
    token, position, alive, limit, bad, stops = rows
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
        x.copy_(_embedding(embed, token))
    return tuple(t for t in (emitted, token, position, alive, bad, seen, logprob, x) if t is not None)


def _embedding(embed: Tensor, token: Tensor) -> Tensor:
    """The rows of the tokens; NaN for a token that has none."""
    known = (token >= 0) & (token < len(embed))
    return embed.index_select(0, torch.where(known, token, 0)).masked_fill(~known[:, None], torch.nan)
