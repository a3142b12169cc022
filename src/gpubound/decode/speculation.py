"""Speculative steps: several tokens of a row in one pass over the weights, with the same tokens as plain steps.

A step drafts what may follow a row's last token, runs token and draft through the model at once, and lets `pick` or `sample`
choose after each of them as in plain decoding: a choice depends on the logits, the seed, the sequence and the position alone.
The row then gets those choices up to and including the first that its draft did not predict. So the tokens are those that
plain steps bring a row alone, greedy or sampled, without rejection sampling; a good draft only makes them come sooner.

All of it is in the launch: the host knows neither the drafts nor how many were right until the tokens arrive. Wrong drafts
leave keys and values beyond the row's position, which are not read and which the next step overwrites.

A runner may round differently for more rows. The fused one does beyond GEMV_ROWS rows, and a row counts once for each of its
tokens: beyond, two logits within rounding may change places, as they may in a larger batch.

Shapes: B rows, T tokens of a row in a step (the last, and T - 1 drafted), V vocabulary, L positions.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import accept, propose
from ..kernels.ngram_speculation import Chunk, Said
from ..kernels.sampling import Into, Rows, Settings
from .runner import BatchState, SamplingVariant, StepGraphs, Stepper, choose, into_body

TRIAL = 8  # steps of a launch, at least, that show whether drafts pay again
MOST = 15  # tokens that may be drafted: with the last token, as many as a tile of a tensor core has rows


@dataclass(frozen=True)
class Draft:
    """A smaller model with the same tokenizer that guesses tokens ahead, for `decoder(..., speculate=Draft(model, tokens))`;
    or a `gb.DraftHead`, which reads the model's hidden states.

    A step of several tokens sums each as a plain step does, so that each has its bits. With `tensor_cores` it takes them
    together, which reads keys and weights once. The tokens are then the same unless two logits are within rounding.

    It samples with the large model's settings, seeds and positions. Both see the same noise, so they mostly agree.
    """

    model: nn.Module | None  # None: look up in the row's own text
    tokens: int = 4
    tensor_cores: bool = False  # verify by products of all tokens together
    adaptive: bool = True  # take plain steps while drafts bring fewer tokens than those would in the same time


def tokens_a_step(speculate: Any, device: torch.device) -> int:
    """Return T for `decoder`'s `speculate`. device: the model's."""
    drafted = speculate.tokens if isinstance(speculate, Draft) else speculate
    if not isinstance(drafted, int) or isinstance(drafted, bool) or not 1 <= drafted <= MOST:
        raise ValueError(
            f"decoder: speculate: got {drafted!r}, wanted a number of tokens from 1 to {MOST} to look up in the text, or "
            "gb.Draft(model, tokens)."
        )
    draft = speculate.model if isinstance(speculate, Draft) else None
    if draft is not None and (devices := {p.device for p in draft.parameters()}) != {device}:
        where = f"is on {' and '.join(sorted(map(str, devices)))}" if devices else "has no weights"
        raise ValueError(f"decoder: speculate: the draft model {where}, the model is on {device}; move it there.")
    return drafted + 1


class Pace:
    """Choice between launches that draft and plain ones: to draft while a verified step brings at least as many tokens as plain
    steps do in its time.

    It counts the tokens of about the last WINDOW verified steps, or of the last TRIAL if those beyond one are below FAR of what
    pays. If they are too few, REST plain steps follow. Then TRIAL steps draft, and plain ones go on until their tokens are
    here. If they are too few again, twice as many follow. A request begins with a trial, too, whose tokens are waited for.
    """

    WINDOW, REST, MOST, FAR = 16, 240, 1920, 0.6

    def __init__(self, ladder: tuple[int, ...]) -> None:
        self.ladder = ladder  # plain steps a launch
        self.seconds: dict[int, tuple[float, float]] = {}  # of a verified and of a plain step, by rows
        self.rate: float | None = None  # tokens that a verified step brings a row
        self.ratio = 0.0  # of the two times, with the rows of the current request; 0: not measured
        self.rest, self.length, self.trial = 0, self.REST, False
        self.drafted, self.counted = 0, 0  # verified steps of the request that were launched, and whose tokens are here

    def begin(self, rows: int) -> None:
        """Begin a request. Where drafts did not pay before, it begins with a trial."""
        verified, plain = self.seconds.get(rows, (0.0, 1.0))
        self.ratio = verified / plain
        if self.ratio and self.rate is None:
            self.rate = self.ratio + 0.25  # so that no single step decides
        self.rest, self.length, self.trial = 0, self.REST, False
        self.drafted = self.counted = 0

    def lead(self, most: int) -> int:
        """Return how many launches, of `most`, the host may be ahead: each may turn out to be one too many."""
        if not self.ratio:
            return most
        return 1 if self.drafted >= TRIAL > self.counted else min(most, 2)

    def plain(self, steps: int) -> bool:
        """Return whether a launch of this many steps, as drafts would have, is of plain ones: a short one is no trial."""
        if not self.ratio or self.rate is None:
            return False
        return self.rest > 0 or self.trial or (self.rate < self.ratio and steps < min(TRIAL, self.ladder[0]))

    def launched(self, plain: bool, steps: int) -> None:
        if plain:
            self.rest = max(0, self.rest - steps)
        else:
            self.drafted += steps
            self.trial = self.rate is not None and self.rate < self.ratio

    def add(self, tokens: int, steps: int) -> None:
        """Count the tokens that verified steps, over all rows, have brought."""
        self.counted += steps
        if not steps or self.rate is None:
            return
        self.rate += (tokens / steps - self.rate) * min(1.0, steps / self.WINDOW)
        if steps >= TRIAL and tokens / steps < 1 + self.FAR * (self.ratio - 1):
            self.rate = min(self.rate, tokens / steps)
        if self.rest == 0 and self.rate < self.ratio:
            self.rest, self.length = self.length, min(2 * self.length, self.MOST)
        elif self.rate >= self.ratio:
            self.rest, self.length = 0, self.REST
        self.trial = False


class TextDraft(Stepper):
    """Speculative steps, drafted from the rows' own texts."""

    def __init__(self, body: Any, slots: BatchState, tokens: int) -> None:
        super().__init__(body, slots)
        self.tokens = tokens
        size, device = slots.max_batch * tokens, slots.device
        self.text = torch.zeros(slots.max_batch, body.max_length, device=device, dtype=torch.int32)
        self.chunk, self.chosen, *state = torch.zeros(7, size, device=device, dtype=torch.int32)
        self.logprob = torch.zeros(size, device=device, dtype=torch.float32)
        self.rows = Rows._make([*state, slots.rows.stops])  # a row for each token
        self.settings = [t.repeat_interleave(tokens) for t in slots.settings[:-1] if t is not None]
        self.marks: Tensor | None = None
        step = torch.arange(tokens, device=device)
        self.step, self.before = step.int(), torch.minimum(step, step[:, None]).flatten()

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        self.text[: len(ids), : ids.shape[1]] = ids

    def run(self, rows: int, steps: int, variant: SamplingVariant) -> None:
        if variant.plain:
            self.run_plain(rows, steps, variant)
            return
        body, slots, T, n = self.body, self.slots, self.tokens, rows * self.tokens
        state, each, text = slots.rows.first(rows), self.rows.first(n), self.text[:rows]
        each.limit.view(rows, T).copy_(state.limit[:, None])
        chunk = Chunk(*(t[:n].view(rows, T) for t in (self.chunk, each.position, each.alive)))
        into, logprob = Into(self.chosen[:n]), self.logprob[:n] if variant.logprobs else None
        chosen = Said(into.emitted.view(rows, T), None if logprob is None else logprob.view(rows, T))
        settings = None if variant.greedy and not variant.logprobs and body.finds_best(n) else self._repeated(rows, variant)
        text.scatter_(1, state.position[:, None].long(), state.token[:, None])
        for step in range(steps):
            self.draft(state, chunk, variant)
            logits = body.step(chunk.token, chunk.position)
            if settings is not None:
                self._mark(settings, chunk.token)
            choose(body, logits, each, settings, into, logprob)
            seen = slots.marks()[:rows] if variant.penalty else None
            lines = slice(step * T, (step + 1) * T)
            emitted = Said(slots.emitted[lines, :rows], None if logprob is None else slots.logprobs[lines, :rows])
            accept(chunk, chosen, state, text, emitted, seen, body.chained(n))

    def run_plain(self, rows: int, steps: int, variant: SamplingVariant) -> Tensor:
        """Run steps of one token, and add the tokens to the text, which of rows that end is read no more. Return the position
        (rows,) of each row before them."""
        body, state, text = self.body, self.slots.rows.first(rows), self.text[:rows]
        begin = state.position.clone()
        text.scatter_(1, state.position[:, None].long(), state.token[:, None])
        body.begin(state.token)
        super().run(rows, steps, variant)
        new = self.slots.emitted[:steps, :rows].t()
        place = (begin[:, None] + torch.arange(1, steps + 1, device=begin.device)).clamp(max=text.shape[1] - 1)
        text.scatter_(1, place, torch.where(new >= 0, new, text.gather(1, place)))
        return begin

    def draft(self, state: Rows, chunk: Chunk, variant: SamplingVariant) -> None:
        """Fill the chunk with each row's last token, its draft and their state, and write the runner's input."""
        body, (rows, T) = self.body, chunk.token.shape
        x = None if body.x is None else body.x[: rows * T]
        propose(state, self.text[:rows], chunk, body.embed, x, body.chained(rows * T))

    def _repeated(self, rows: int, variant: SamplingVariant) -> Settings:
        """Return the settings of the rows, repeated for each of their tokens."""
        n, settings = rows * self.tokens, self.slots.choice(slice(rows), variant.penalty)
        mine = [t[:n] for t in self.settings]
        for to, value in zip(mine, settings):
            assert value is not None
            to.view(rows, -1).copy_(value[:, None])
        if not variant.penalty:
            return Settings._make([*mine, None])
        if self.marks is None:
            self.marks = self.slots.marks().repeat(self.tokens, 1)
        return Settings._make([*mine, self.marks[:n]])

    def _mark(self, settings: Settings, chunk: Tensor) -> None:
        """Mark the tokens before each token of a chunk: those of the row, and the drafted ones up to it."""
        if settings.seen is None:
            return
        rows, T = chunk.shape
        marks = settings.seen.view(rows, T, -1)
        marks.copy_(self.slots.marks()[:rows, None])
        marks.scatter_(2, chunk.long().index_select(1, self.before).view(rows, T, T), 1)

    def report(self) -> list[tuple[str, str, str]]:
        return [("speculation", f"{self._drafted()} looked up in the text", self._proof()), *self._paces()]

    def _paces(self) -> list[tuple[str, str, str]]:
        """Return the table's rows about plain steps."""
        found = [] if self.pace is None else sorted(self.pace.seconds.items())
        return [
            (
                f"plain steps, {n} row{'s' * (n > 1)}",
                f"below {verified / plain:.2f} tokens a step",
                f"measured: {verified * 1e6:,.0f} us a verified step, {plain * 1e6:,.0f} a plain one",
            )
            for n, (verified, plain) in found
        ]

    def _drafted(self) -> str:
        return f"{self.tokens - 1} token{'s' if self.tokens > 2 else ''}"

    def _proof(self) -> str:
        most = max((n for n in range(1, self.slots.max_batch + 1) if self.exact(n)), default=0)
        if most == self.slots.max_batch:
            return "the tokens that a row gets alone"
        rows = f"up to {most} row{'s' if most > 1 else ''}; of more, " if most else ""
        return f"the tokens that a row gets alone, {rows}where no two logits lie within rounding"

    def exact(self, rows: int) -> bool:
        return self.body.same_kernels(rows * self.tokens)


class DrawnDraft(TextDraft):
    """Base class of drafts that are chosen from logits, with the rows' settings: `own` is the state of the rows as drafted."""

    def __init__(self, body: Any, slots: BatchState, tokens: int) -> None:
        super().__init__(body, slots, tokens)
        zeros = torch.zeros(6, slots.max_batch, device=slots.device, dtype=torch.int32)
        token, position, alive, limit, bad, self.chosen_draft = zeros
        limit.fill_(body.max_length + 1)  # at the cache's end a row stays at its last position
        self.own = Rows(token, position, alive, limit, bad, stops=zeros[0, :1] - 1)  # -1: no token
        self.own_marks: Tensor | None = None

    def _own_settings(self, rows: int, variant: SamplingVariant, vocab: int) -> Settings:
        """Return the rows' settings. Marks are a copy, which drafts change; with another vocabulary there are none."""
        settings = self.slots.choice(slice(rows), False)
        if not variant.penalty or vocab != self.slots.vocab:
            return settings
        marks = self.slots.marks()
        self.own_marks = torch.empty_like(marks) if self.own_marks is None else self.own_marks
        return settings._replace(seen=self.own_marks[:rows].copy_(marks[:rows]))


class ModelDraft(DrawnDraft):
    """Drafts by a smaller model, whose cache follows the rows as the body's does."""

    def __init__(self, body: Any, slots: BatchState, tokens: int, drafting: Any) -> None:
        super().__init__(body, slots, tokens)
        self.drafting, self.prompts = drafting, StepGraphs(Stepper(drafting, slots))

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        super().prefill(ids, lengths)
        self.prompts.prefill(ids.clamp(max=self.drafting.vocab - 1), lengths)

    def draft(self, state: Rows, chunk: Chunk, variant: SamplingVariant) -> None:
        (rows, T), other = chunk.token.shape, self.drafting
        own, into = self.own.first(rows), into_body(other, self.chosen_draft[:rows])
        settings = None if variant.greedy and other.finds_best(rows) else self._own_settings(rows, variant, other.vocab)
        own.token.copy_(state.token.clamp(max=other.vocab - 1))  # the two may pad their vocabularies differently
        own.position.copy_(state.position)
        own.alive.fill_(1)
        chunk.token[:, 0] = state.token
        other.begin(own.token)
        for t in range(1, T):
            logits = other.step(own.token, own.position)
            choose(other, logits, own, settings, into)
            chunk.token[:, t] = own.token.clamp(max=self.body.vocab - 1)
        other.step(own.token, own.position)  # for its keys and values: if all drafts were right, the next one starts after it
        chunk.position.copy_((state.position[:, None] + self.step).clamp(max=self.body.max_length - 1))
        chunk.alive.copy_(state.alive[:, None])
        self.body.begin(chunk.token.view(-1))

    def moved(self) -> str | None:
        return self.drafting.moved()

    def rebind(self) -> None:
        self.drafting.rebind()
        self.prompts.clear()

    def bytes_a_step(self, live: list[int]) -> int:
        return self.tokens * self.drafting.bytes_a_step(live)

    def report(self) -> list[tuple[str, str, str]]:
        parts = [(f"draft: {part}", what, why) for part, what, why in self.drafting.report()]
        return [("speculation", f"{self._drafted()} drafted by a model", self._proof()), *parts]
