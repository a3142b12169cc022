"""The request of a rollout, checked before anything runs: its sequences, their settings and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..formatting import unexpected
from .request import (
    LIMITS,
    Choice,
    Generated,
    check_adapters,
    check_count,
    check_prompts,
    named,
    note_room,
    padding_of,
    read_prompts,
    read_stops,
)
from .runner import SamplingVariant
from .text import TextStream

if TYPE_CHECKING:
    from .generate import FastDecoder


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
    turn: int = 0  # of its conversation: see Rollout.extend

    def as_generated(self, prompt: list[int], stops: Sequence[Any]) -> Generated:
        """Return the sequence as `generate` returns it. stops: tokens and strings that end it."""
        finish = self.finish
        if finish == "stop":
            finish = "stop token" if self.tokens and self.tokens[-1] in stops else "stop string"
        return Generated(prompt, self.tokens, self.logprobs, finish, self.text)


@dataclass(eq=False)
class Running:
    """A sequence with its request, and its place in the batch."""

    result: RolloutSequence
    ids: list[int]
    limit: int  # tokens of prompt and answer
    choice: Choice  # of all samples of the prompt; each has its own seed in `result`
    adapter: str | None
    text: TextStream
    before: "Running | None" = None  # the turn before
    start: int = 0  # positions that its row holds already
    row: int = -1
    launched: int = 0  # steps

    @property
    def left(self) -> int:
        """Steps that it may need after those that are launched."""
        return self.limit - len(self.ids) - self.launched


MOST_SEQUENCES = 1 << 20  # of a rollout, each of which the host keeps


@dataclass(frozen=True)
class RolloutRequest:
    sequences: list[Running]  # in the order in which they begin
    stops: tuple[int, ...]
    stop_strings: tuple[str, ...]
    logprobs: bool
    samples: int  # of a prompt
    chooses: bool  # whether each has its own adapter, or none; else all have those that are on

    @property
    def variant(self) -> SamplingVariant:
        choices = [one.choice for one in self.sequences]
        greedy, penalty = all(one.greedy for one in choices), any(one.repetition_penalty != 1 for one in choices)
        tempered = self.logprobs and any(one.temperature not in (0, 1) for one in choices)
        return SamplingVariant(greedy, penalty, self.logprobs, tempered, any(one.filtered for one in choices))


@named("rollout")
def rollout_request(
    decoder: "FastDecoder",
    prompts: Any,
    n: int,
    max_new_tokens: Any,
    logprobs: bool,
    seed: int,
    stop: Any,
    adapters: Any,
    settings: dict[str, Any],
) -> RolloutRequest:
    """Check the arguments of `FastDecoder.rollout`."""
    body = decoder.body
    if not decoder.refills:
        why = "with speculate" if decoder.stepper.tokens > 1 else f"of {type(decoder.model).__name__} by {decoder.kernels}"
        where = f" on {len(body.spans or body.peers)} devices" if len(body.spans) > 1 or body.peers else ""
        raise ValueError(f"rollout: got a decoder {why}{where}, whose rows begin and end together; use generate.")
    if unknown := settings.keys() - (LIMITS.keys() - {"seed"}):
        raise unexpected("rollout", unknown, ("n", "max_new_tokens", "logprobs", "stop", "adapters", *LIMITS))
    check_count("n", n)
    ids = read_prompts(prompts, decoder.text, padding_of(decoder.generation, decoder.text))
    check_prompts(ids, body.vocab, len(ids), decoder.max_length)
    if n * len(ids) > MOST_SEQUENCES:
        raise ValueError(
            f"rollout: n: got {n:,} for {len(ids):,} prompts, wanted at most {MOST_SEQUENCES:,} sequences; "
            f"start several rollouts."
        )
    stops, strings = read_stops(stop, decoder.text, decoder.generation, body.vocab)
    most = each("max_new_tokens", max_new_tokens, len(ids))
    for value in {value for value in most if value is not None}:
        check_count("max_new_tokens", value, "; None takes as many as fit")
    note_room(ids, most, decoder.max_length, "rollout")
    names = [None] * len(ids) if adapters is None else check_adapters(adapters, len(ids), body)
    columns = {name: each(name, value, len(ids)) for name, value in settings.items()}
    waiting = []
    for number, prompt in enumerate(ids):
        choice = Choice(seed=seed, **{name: values[number] for name, values in columns.items()})
        limit = min(len(prompt) + (most[number] or decoder.max_length), decoder.max_length)
        for sample in range(n):
            digest = blake2b(f"{seed} {number} {sample}".encode(), digest_size=8).digest()
            own = int.from_bytes(digest, "little") >> 1  # the sequence's seed
            text = TextStream(decoder.text, strings, stops)
            result = RolloutSequence(number, sample, own)
            waiting.append(Running(result, prompt, limit, choice, names[number], text))
    return RolloutRequest(waiting, stops, strings, logprobs, n, adapters is not None)


def each(name: str, value: Any, count: int) -> list[Any]:
    """Return a setting of each prompt: `value` is one for all, or a list."""
    if isinstance(value, str) or not isinstance(value, Sequence | Tensor):
        return [value] * count
    values = value.tolist() if isinstance(value, Tensor) else list(value)
    if len(values) != count:
        raise ValueError(f"rollout: {name}: got {len(values)} for {count} prompts, wanted one for all or one for each.")
    return values
