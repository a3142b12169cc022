"""Exact decoding: tokens and log-probabilities of the model's own forward, bit for bit.

A step and a prefill call the model's own modules in a `BatchInvariant` context (layers/invariant.py), as the trainer's forward
does, and read keys from the cache. So the log-probability of a token is the one that a forward over the full sequence gives,
in any batch, at any place of a row, and with any pages.

Legend: B rows, C copies of a prompt, T tokens, P blocks of a row, H query heads, G key heads, D width of a head.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import GenerateError
from ..kernels import cross_entropy, invariant_cached_attention, write_tokens
from ..kernels.invariant import BLOCK, SharedKeys
from ..layers.embedding_and_head import head_of
from ..layers.invariant import BatchInvariant
from ..models.language_model import hidden_of
from ..models.registry import mode, why_not_invariant
from .kv_cache import PAGE, Cache, CacheLayout, cached_layers, pages_for
from .runner import RunnerConfig, SamplingVariant, Stepper, check_room, choose, into_body, random_ids
from .transformer import ViewRunner
from .weight_view import WeightView, bind

TOKENS = 16384  # of a prompt's forward, all rows together
SCORED = 256  # tokens whose logits are in memory at a time
IGNORED = -100
TRIED, STEPS = 70, 8  # tokens of the trial, more than a page has, and its last ones, which are steps


class CachedKeys:
    """A decoder's cache as one forward extends and reads it: T tokens of each row, from `start` (B, int32) on.

    blocks (B, C, P, int32): where each of C copies of a row is stored; the first one is read. shared: what rows have in common.
    """

    def __init__(self, cache: Cache, blocks: Tensor, start: Tensor, tokens: int, shared: SharedKeys | None) -> None:
        self.cache, self.start, self.shared = cache, start, shared
        self.copies, self.blocks = blocks, blocks[:, 0].contiguous()
        self.positions = start[:, None].long() + torch.arange(tokens, device=start.device)  # (B, T)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.whole.k[number], self.cache.whole.v[number]
        for stored, new in ((keys, k), (values, v)):
            write_tokens(stored, new.transpose(1, 2), self.copies, self.start)
        q = q.transpose(1, 2).contiguous()
        return invariant_cached_attention(q, keys, values, self.blocks, self.start, scale, self.shared)


class ExactRunner(ViewRunner):
    """Run a model's own modules by batch-invariant kernels, over a cache."""

    refills = captures_prefill = calls = True
    kernels = "the model's own modules, by batch-invariant kernels"
    reads = "the model's weights"

    def __init__(self, model: nn.Module, config: RunnerConfig) -> None:
        why = why_not_invariant(model)
        live = why or bind(model, config.max_length)
        if not isinstance(live, WeightView):
            raise ValueError(f"decoder: exact: {live}; leave exact out.")
        self.model, self.live, self.config, self.device = model, live, config, live.device
        self.max_batch, self.max_length, self.vocab = config.max_batch, config.max_length, live.shape.vocab
        if config.cache.pages is None:  # room for all rows, in pages, which the samples of a prompt share
            config = replace(config, cache=CacheLayout(pages=config.max_batch * pages_for(config.max_length)))
        layers = cached_layers(live.layers)
        needed = Cache(config, layers, live.dtype, torch.device("meta")).nbytes + 4 * config.max_batch * self.vocab
        check_room(needed, self.device, config)
        self.cache = Cache(config, layers, live.dtype, self.device)
        self.scale: Tensor | None = None  # of the hidden states before the head, one for each row
        self._try()

    @property
    def grouped(self) -> Cache:
        return self.cache

    @property
    def spare(self) -> range:  # type: ignore[override]
        return range(self.max_batch, self.cache.rows)

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        return self.forward(token, position).float()

    @torch.no_grad()
    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits of a step in the model's dtype, as the trainer reads them."""
        start = position.clamp(max=self.max_length - 1)
        rows = len(token)
        hidden = self._hidden(token[:, None], start, self._blocks(rows), self.cache.shared_by(rows))[:, 0]
        if self.scale is not None:
            hidden = (hidden.float() * self.scale[: len(hidden), None]).to(hidden.dtype)
        self.output = self._head(hidden)
        return self.output

    def logprobs(self, token: Tensor) -> Tensor:
        """Return the log-probability of each row's token (B,) by the last step's logits, NaN where it is -1."""
        labels = token.long().masked_fill(token < 0, IGNORED)
        return (-cross_entropy(self.output, labels, reduction="none")).masked_fill(token < 0, float("nan"))

    def _blocks(self, rows: int) -> Tensor:
        """Return the blocks (B, 1, P) of the first rows."""
        assert self.cache.pages is not None
        return self.cache.pages[:rows, None]

    def _hidden(self, ids: Tensor, start: Tensor, blocks: Tensor, shared: SharedKeys | None = None) -> Tensor:
        """Return the last hidden states (B, T, hidden) of ids (B, T), at positions from `start` (B) on."""
        (B, T), device = ids.shape, ids.device
        keys = CachedKeys(self.cache, blocks, start, T, shared)
        row = torch.arange(B + 1, device=device, dtype=torch.int32)
        packed = {"segment_ids": row[:B, None].expand(B, T), "cu_seqlens": row * T}
        with mode(self.model, training=False), BatchInvariant(keys):
            return hidden_of(self.model, {"input_ids": ids.long(), "position_ids": keys.positions, **packed})

    def _head(self, hidden: Tensor) -> Tensor:
        head = head_of(self.model)
        with BatchInvariant():
            return F.linear(hidden, head.weight, head.bias)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        self._fill(ids, 0, self._blocks(len(ids)))

    @torch.no_grad()
    def refill(self, ids: Tensor, lengths: Tensor, rows: Tensor, start: int = 0) -> None:
        blocks = self.cache.copies(rows)
        assert blocks is not None
        self._fill(ids, start, blocks)

    def _fill(self, ids: Tensor, begin: int, blocks: Tensor) -> None:
        """Fill the cache with ids (B, T), of as many tokens at a time as memory is meant for."""
        for at, part in self._parts(ids):
            self._hidden(part, torch.full((len(ids),), begin + at, device=ids.device, dtype=torch.int32), blocks)

    def _parts(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        step = max(1, TOKENS // max(1, len(ids)))
        return ((at, ids[:, at : at + step]) for at in range(0, ids.shape[1], step))

    @torch.no_grad()
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for at, part in self._parts(ids[None]):
            start = torch.full((1,), at, device=ids.device, dtype=torch.int32)
            for hidden in self._hidden(part, start, self._blocks(1))[0].split(SCORED):
                yield self._head(hidden)

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        self.reserve([len(ids) - 1])
        scores: list[Tensor] = []
        for logits in self.logits_after(ids[:-1]):
            first = 1 + sum(map(len, scores))
            scores.append(-cross_entropy(logits, ids[first : first + len(logits)].long(), reduction="none"))
        return torch.cat(scores)

    def _try(self) -> None:
        """Compare steps after a prefill with the forward of the whole sequence."""
        tokens = min(TRIED, self.max_length)
        ids = random_ids(self.vocab, tokens, self.device)
        self.reserve([tokens])
        with torch.no_grad(), mode(self.model, training=False), BatchInvariant():
            full = hidden_of(self.model, {"input_ids": ids[None]})[0]
        filled = max(0, tokens - STEPS)
        self.prefill(ids[None, :filled], ids[:1])
        for place in range(filled, tokens):
            self.step(ids[place : place + 1], torch.full((1,), place, device=self.device, dtype=torch.int32))
            if not torch.equal(self.output, self._head(full[place : place + 1])):
                raise GenerateError(
                    f"decoder: exact: {type(self.model).__name__}: the logits of a step at position {place} are not those of "
                    f"the forward of the whole sequence, bit for bit; please report it with the model's config."
                )

    def same_kernels(self, rows: int) -> bool:
        return True

    def row_counts(self) -> set[int]:
        return {1, self.max_batch}

    def rebind(self) -> None:
        if why := why_not_invariant(self.model):
            raise GenerateError(f"decoder: exact: the model has changed since its decoder was built: {why}; build a new one.")
        self.live.refresh()

    def bytes_a_step(self, live: list[int]) -> int:
        return self.live.bytes_read() + self.cache.bytes_read(live)

    def report(self) -> list[tuple[str, str, str]]:
        why = "log-probabilities have the bits of the trainer's forward with exact=True"
        return [(f"{len(self.live.layers)} layers, head", "batch-invariant products and attention", why), *self.cache.report()]


class ExactStepper(Stepper):
    """Steps whose log-probabilities are those of the trainer: of the head's logits in the model's dtype."""

    def run(self, rows: int, steps: int, variant: SamplingVariant) -> None:
        body, slots, state = self.body, self.slots, self.slots.rows.first(rows)
        settings, body.cache.sharing = slots.choice(slice(rows), variant.penalty), variant.shared
        for step in range(steps):
            body.scale = slots.scale[:rows] if variant.tempered else None
            logits, emitted = body.forward(state.token, state.position), slots.emitted[step, :rows]
            choose(body, logits, state, settings, into_body(body, emitted))
            if variant.logprobs:
                slots.logprobs[step, :rows] = body.logprobs(emitted)


assert BLOCK == PAGE  # a page is what attention reads at a time
