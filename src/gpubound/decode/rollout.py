"""Rollouts: many sequences through the rows of a decoder. A row whose sequence ends gets the next one of a queue, and the
others go on.

The host launches STEPS steps for all rows, and reads the tokens of a launch while the next one runs. Once enough rows have
ended, their next prompts are prefilled and their state is written between two launches, on the device's stream: the host waits
for nothing. The samples of a prompt that begin together share its prefill. When the queue is empty, the last sequences move to
fewer rows.

A sequence's tokens depend on the weights, its prompt, its settings and its seed, which is made of the rollout's seed, the
prompt's index and the sample's.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import GenerateError
from ..formatting import readable
from ..trace import notice
from .kv_cache import PagePool
from .request import (
    LIMITS,
    Choice,
    check_adapters,
    check_count,
    check_prompts,
    pad,
    padding_of,
    read_prompts,
    read_stops,
    to_device,
)
from .runner import SamplingVariant
from .running import closed_at_exit, raise_not_finite, short_switch_interval
from .text import TextStream

if TYPE_CHECKING:
    from .generate import FastDecoder

STEPS = 4  # of a launch: a row that has ended waits for the end of its launch, and for the one after it
AHEAD = 2  # launches that are not read yet
# A refill takes as long as half a step of 256 rows (H200, 0.6b), however few prompts it has. So it waits until a sixteenth of
# the rows have ended, for at most so many launches.
SHARE, LAUNCHES = 16, 4
PROMPT_TOKENS = 16384  # padding counted, that are prefilled at once: more would only take memory


@dataclass
class RolloutSequence:
    """A sequence of a rollout, without its prompt."""

    prompt: int  # its index
    sample: int  # among those of the prompt
    seed: int  # generate(prompt, seed=...) with the same settings draws the same
    tokens: list[int] = field(default_factory=list)  # a stop token included
    logprobs: list[float] = field(default_factory=list)  # of each token under softmax(logits / temperature)
    finish: str = ""  # 'stop' or 'length'
    text: str | None = None  # None without a tokenizer


@dataclass(eq=False)
class Running:
    """A sequence with its request, and its place in the batch."""

    result: RolloutSequence
    ids: list[int]
    limit: int  # tokens of prompt and answer
    choice: Choice
    adapter: str | None
    text: TextStream | None
    row: int = -1
    launched: int = 0  # steps

    @property
    def left(self) -> int:
        """Steps that it may need after those that are launched."""
        return self.limit - len(self.ids) - self.launched


class Rollout:
    """An iterator over the sequences of a rollout, as they end; `FastDecoder.rollout` makes it."""

    def __init__(
        self, decoder: "FastDecoder", waiting: list[Running], stops: tuple[int, ...], logprobs: bool, adapters: bool
    ) -> None:
        self.decoder, self.waiting, self.stops, self.logprobs = decoder, deque(waiting), stops, logprobs
        self.choosing = adapters
        self.size = decoder.bucket(min(len(waiting), decoder.max_batch))  # rows of a launch
        self.rows: list[Running | None] = [None] * self.size
        choices = [one.choice for one in waiting]
        self.variant = SamplingVariant(
            all(choice.greedy for choice in choices),
            any(choice.repetition_penalty != 1 for choice in choices),
            logprobs,
            logprobs and any(choice.temperature not in (0, 1) for choice in choices),
        )
        self.finished: list[RolloutSequence] = []
        self.seconds = 0.0
        self.launches = self.prefills = self.row_steps = 0  # prefills: of prompts; row_steps: of all rows, alive or not
        self._flights: deque[list[Running | None]] = deque()  # the rows of each launch that is not read yet
        self._since = 0  # launches since the last refill
        self._pages = PagePool(decoder.body.paged)
        self._playing = self._play()
        closed_at_exit().add(self._playing)

    def __iter__(self) -> Iterator[RolloutSequence]:
        return self

    def __next__(self) -> RolloutSequence:
        return next(self._playing)

    def close(self) -> None:
        """End the rollout; the decoder is ready for the next request."""
        self._playing.close()

    @property
    def sequences(self) -> list[RolloutSequence]:
        """All sequences, ordered by prompt and sample. Runs the rollout to its end."""
        for _ in self:
            pass
        return sorted(self.finished, key=lambda one: (one.prompt, one.sample))

    @property
    def count(self) -> int:
        """Tokens of the sequences that have ended."""
        return sum(len(one.tokens) for one in self.finished)

    @property
    def tokens_per_s(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """The share of all rows' steps that brought a token."""
        return self.count / self.row_steps if self.row_steps else 0.0

    def _play(self) -> Generator[RolloutSequence, None, None]:
        decoder, slots, begun = self.decoder, self.decoder.slots, time.perf_counter()
        with decoder.turn:
            try:
                with short_switch_interval():
                    with decoder.plainly():
                        decoder.bound.follow()
                        decoder.body.choose(None)
                        slots.vacate(self.stops)
                    while self.waiting or any(self.rows):
                        with decoder.plainly():
                            if self._due():
                                self._refill()
                            elif not self.waiting:
                                self._compact()
                            launches = self._launches()
                            if launches:
                                self._launch()
                        if not launches:
                            yield from self._receive()
            finally:
                slots.drop()
                self.seconds += time.perf_counter() - begun

    def _due(self) -> bool:
        """Return whether ended rows get their next sequences now."""
        free = self.rows.count(None)
        enough = free >= max(1, self.size // SHARE) or self._since >= LAUNCHES or free == self.size
        return free > 0 and enough and bool(self.waiting) and self._pages.fits(self.waiting[0].limit)

    def _refill(self) -> None:
        slots = self.decoder.slots
        new: list[Running] = []
        for row in [number for number, one in enumerate(self.rows) if one is None]:
            if not self.waiting or not self._pages.fits(self.waiting[0].limit):
                break
            one = self.rows[row] = self.waiting.popleft()
            one.row = row
            self._pages.give(row, one.limit)
            new.append(one)
        self._since = 0
        self._place()
        shared = [list(group) for _, group in groupby(new, key=lambda one: one.result.prompt)]
        for batch in batches(shared):
            self._prefill(batch)
        slots.seat(
            [one.row for one in new],
            [one.ids for one in new],
            [one.limit for one in new],
            [one.choice for one in new],
            self.variant.tempered,
        )
        self.decoder.body.begin(slots.rows.token[: self.size])

    def _place(self) -> None:
        """Write the pages and the adapters of the rows as they are now."""
        self._pages.upload()
        if self.choosing:
            self.decoder.body.choose([None if one is None else one.adapter for one in self.rows])

    def _prefill(self, batch: list[list[Running]]) -> None:
        """Prefill prompts, each for all of its samples. Sizes are powers of two, so that few graphs serve all."""
        device, width = self.decoder.body.device, prompt_width(batch[-1][0], self.decoder.max_length)
        self.prefills += len(batch)
        batch = batch + [batch[-1]] * ((1 << (len(batch) - 1).bit_length()) - len(batch))
        copies = 1 << (max(map(len, batch)) - 1).bit_length()
        rows = [[one.row for one in group] + [group[0].row] * (copies - len(group)) for group in batch]
        ids = [group[0].ids[:-1] for group in batch]  # a prompt's last token goes through the first step
        lengths = torch.tensor([len(one) for one in ids], device="cpu")
        try:
            self.decoder.graphs.refill(
                pad(ids, width, device), to_device(lengths, device), to_device(torch.tensor(rows, device="cpu"), device)
            )
        except torch.OutOfMemoryError as error:
            raise GenerateError(
                f"rollout: out of memory in the prefill of {len(batch)} prompts of up to {width} tokens, with {self.size} rows "
                f"and a cache of {readable(self.decoder.body.cache_bytes())}; build the decoder with a smaller max_batch or "
                f"max_length."
            ) from error

    def _compact(self) -> None:
        """Move the last sequences to the first rows, once these are at most half of the rows."""
        live = [one for one in self.rows if one is not None]
        size = self.decoder.bucket(max(1, len(live)))
        if not live or size > self.size // 2:
            return
        free = [row for row in range(size) if self.rows[row] is None]
        moved = [one for one in live if one.row >= size]
        targets = free[: len(moved)]
        rows = torch.tensor([[one.row for one in moved], targets], dtype=torch.int64, device="cpu")
        sources_N, targets_N = to_device(rows, self.decoder.body.device)
        self.decoder.slots.move(sources_N, targets_N)
        if moved and self.decoder.body.paged is None:
            reached = max(min(one.limit, len(one.ids) + one.launched) for one in moved)
            self.decoder.body.move(sources_N, targets_N, reached)
        for one, row in zip(moved, targets):
            self._pages.move(one.row, row)
            self.rows[row], one.row = one, row
        self.size = size
        del self.rows[size:]
        self._place()
        self.decoder.body.begin(self.decoder.slots.rows.token[:size])

    def _launches(self) -> bool:
        """Return whether the next launch is to begin before the oldest is read."""
        slots, graphs = self.decoder.slots, self.decoder.graphs
        if slots.ahead >= min(AHEAD, slots.lead) or not any(one is not None and one.left > 0 for one in self.rows):
            return False
        return not slots.ahead or graphs.made(self.size, self._steps, self.variant)

    @property
    def _steps(self) -> int:
        return min(STEPS, max(self.decoder.ladder))

    def _launch(self) -> None:
        decoder, steps = self.decoder, self._steps
        if name := decoder.bound.moved():
            raise GenerateError(f"{name} was changed, moved or replaced while tokens were generated from it; start again.")
        decoder.graphs.launch(self.size, steps, self.variant)
        decoder.slots.send(steps)
        self._flights.append(list(self.rows))
        for one in self.rows:
            if one is not None:
                one.launched += steps
        self.launches, self._since = self.launches + 1, self._since + 1
        self.row_steps += steps * self.size

    def _receive(self) -> Iterator[RolloutSequence]:
        """Read the oldest launch, and yield the sequences that it ended."""
        tokens, owners = self.decoder.slots.receive(self.logprobs), self._flights.popleft()
        columns, values = list(zip(*tokens.emitted)), list(zip(*tokens.logprobs))
        ended: list[Running] = []
        stopped: list[int] = []  # rows that still generate
        for row, one in enumerate(owners):
            if one is None or one.result.finish:
                continue
            result, new = one.result, [token for token in columns[row] if token >= 0]
            result.tokens += new
            if values:
                result.logprobs += values[row][: len(new)]
            if one.text is not None:
                one.text.add(new)
            if one.text is not None and one.text.stopped:
                result.finish = "stop"
                count = one.text.tokens_before_stop()
                result.tokens, result.logprobs = result.tokens[:count], result.logprobs[:count]
                stopped += [one.row] if tokens.alive[row] else []
            elif not tokens.alive[row]:
                if tokens.bad[row]:
                    name = f"prompt {result.prompt}, sample {result.sample}"
                    raise_not_finite(self.decoder, name, one.ids + result.tokens, tokens.bad[row] - 1)
                result.finish = "stop" if result.tokens and result.tokens[-1] in self.stops else "length"
            if result.finish:
                ended.append(one)
        if stopped:
            self.decoder.slots.end(stopped)
        for one in ended:
            self.rows[one.row] = None
            self._pages.take(one.row)
            if one.text is not None:
                one.result.text = one.text.complete()
            self.finished.append(one.result)
        yield from (one.result for one in ended)


def batches(groups: list[list[Running]]) -> Iterator[list[list[Running]]]:
    """Yield groups of samples of one prompt, as many as a prefill takes, the shortest prompts first."""
    batch: list[list[Running]] = []
    for group in sorted(groups, key=lambda group: len(group[0].ids)):
        if batch and (len(batch) + 1) * prompt_width(group[0]) > PROMPT_TOKENS:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def prompt_width(one: Running, most: int | None = None) -> int:
    """Return the padded length of a prompt without its last token."""
    length = len(one.ids) - 1
    width = max(16, 1 << (length - 1).bit_length()) if length else 0
    return width if most is None else min(width, most)


def start_rollout(
    decoder: "FastDecoder",
    prompts: Any,
    n: int,
    max_new_tokens: Any,
    logprobs: bool,
    seed: int,
    stop: Any,
    adapters: Any,
    settings: dict[str, Any],
) -> Rollout:
    """Check the arguments of `FastDecoder.rollout`, and return the rollout."""
    body = decoder.body
    if not body.refills or decoder.stepper.tokens > 1:
        why = "with speculate" if decoder.stepper.tokens > 1 else f"of {type(decoder.model).__name__} by {decoder.kernels}"
        where = f" on {len(body.spans or body.peers)} devices" if len(body.spans) > 1 or body.peers else ""
        raise ValueError(f"rollout: got a decoder {why}{where}, whose rows begin and end together; use generate.")
    if unknown := settings.keys() - (LIMITS.keys() - {"seed"}):
        raise TypeError(f"rollout() got an unexpected keyword argument {min(unknown)!r}, wanted {', '.join(LIMITS)}.")
    check_count("n", n)
    ids = read_prompts(prompts, decoder.text, padding_of(decoder.generation, decoder.text))
    check_prompts(ids, body.vocab, len(ids), decoder.max_length, "rollout")
    stops, strings = read_stops(stop, decoder.text, decoder.generation, body.vocab)
    most = each("max_new_tokens", max_new_tokens, len(ids))
    for value in {value for value in most if value is not None}:
        check_count("max_new_tokens", value, "; None takes as many as fit")
    names = [None] * len(ids) if adapters is None else check_adapters(adapters, len(ids), body)
    columns = {name: each(name, value, len(ids)) for name, value in settings.items()}
    waiting = []
    for number, prompt in enumerate(ids):
        choice = Choice(seed=seed, **{name: values[number] for name, values in columns.items()})
        limit = min(len(prompt) + (most[number] or decoder.max_length), decoder.max_length)
        for sample in range(n):
            own = sequence_seed(seed, number, sample)
            text = None if decoder.text is None else TextStream(decoder.text, strings, stops)
            result = RolloutSequence(number, sample, own)
            waiting.append(Running(result, prompt, limit, replace(choice, seed=own), names[number], text))
    rows = min(len(waiting), decoder.max_batch)
    notice(
        f"rollout: {len(waiting):,} sequences of up to {max(one.limit for one in waiting):,} tokens, {rows:,} at a time, in a "
        f"cache of {readable(body.cache_bytes())}; a prefill takes up to {PROMPT_TOKENS:,} tokens at once."
    )
    return Rollout(decoder, waiting, stops, logprobs, adapters is not None)


def each(name: str, value: Any, count: int) -> list[Any]:
    """Return a setting of each prompt: `value` is one for all, or a list."""
    if isinstance(value, str) or not isinstance(value, Sequence | Tensor):
        return [value] * count
    values = value.tolist() if isinstance(value, Tensor) else list(value)
    if len(values) != count:
        raise ValueError(f"rollout: {name}: got {len(values)} for {count} prompts, wanted one for all or one for each.")
    return values


def sequence_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of a sequence, made of the rollout's, the prompt's index and the sample's."""
    digest = blake2b(f"{seed} {prompt} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
