"""Requests to a decoder, checked on the host before anything is launched, and the generations that they return."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..formatting import unexpected
from ..models.decoding import ends_of
from ..trace import notice
from .text import TextCodec

LARGEST = 1e30  # of a temperature or a penalty: in fp32, logits times or over it stay finite
STOPS = 32  # stop tokens that a request may name


# Of each setting: its type, the least and the greatest value, and both in words.
LIMITS: dict[str, tuple[type, float, float, str]] = {
    "temperature": (Real, 0, LARGEST, f"0 (greedy) or more, up to {LARGEST:g}"),
    "top_k": (Integral, 0, 2**31 - 1, "a whole number, 0 (off) or more, below 2^31"),
    "top_p": (Real, math.nextafter(0, 1), 1, "more than 0 and at most 1 (off)"),
    "min_p": (Real, 0, math.nextafter(1, 0), "0 (off) or more and less than 1"),
    "repetition_penalty": (Real, 1 / LARGEST, LARGEST, f"{1 / LARGEST:g} to {LARGEST:g}; 1 is off"),
    "seed": (Integral, -(2**63), 2**63 - 1, "a whole number of 64 bits"),
}


@contextmanager
def named(who: str) -> Iterator[None]:
    """Raise the errors of checks that others share with `generate` by the name of the function that was called."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("generate: "):
            raise
        raise ValueError(f"{who}: {str(error).removeprefix('generate: ')}") from None


@dataclass(frozen=True)
class Choice:
    """Sampling settings of a request, for all of its rows."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (kind, low, high, wanted) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
                raise ValueError(f"generate: {name}: got {value!r}, wanted {wanted}.")

    @property
    def greedy(self) -> bool:
        """True where each token is the one with the greatest logit."""
        return self.temperature == 0 and self.repetition_penalty == 1

    @property
    def filtered(self) -> bool:
        """True where some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Request:
    prompts: list[list[int]]  # one a row: a prompt asked for n times is repeated n times
    max_new_tokens: int
    choice: Choice = field(default_factory=Choice)
    stops: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: bool = False
    adapters: tuple[str | None, ...] | None = None  # one a row; None: all rows have all that are on


def make_request(
    prompts: Any,
    text: TextCodec | None,
    body: Any,
    generation: Mapping[str, Any],
    max_new_tokens: int | None = None,
    stop: Any = None,
    n: int = 1,
    logprobs: bool = False,
    adapters: Any = None,
    sampling: str | None = None,
    **choice: Any,
) -> Request:
    """Check the arguments of `generate`, before anything is launched. `generation` is the model's generation config."""
    if unknown := choice.keys() - LIMITS.keys():
        raise unexpected("generate", unknown, ("max_new_tokens", "stop", "n", "logprobs", "adapters", "sampling", *LIMITS))
    check_count("n", n)
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens, "; None takes as many as fit")
    if not isinstance(logprobs, bool):
        raise ValueError(f"generate: logprobs: got {logprobs!r}, wanted True, for that of each token alone, or False.")
    if sampling not in (None, "model"):
        raise ValueError(
            f"generate: sampling: got {sampling!r}, wanted 'model', for the settings of the model's generation config, or None."
        )
    if sampling == "model":
        choice = model_sampling(generation) | {name: value for name, value in choice.items() if value is not None}
    sequences = read_prompts(prompts, text, padding_of(generation, text))
    if adapters is not None:
        adapters = tuple(name for name in check_adapters(adapters, len(sequences), body) for _ in range(n))
    if n > 1:
        sequences = [prompt for prompt in sequences for _ in range(n)]
    check_prompts(sequences, body.vocab, body.max_batch, body.max_length)
    most = body.max_length if max_new_tokens is None else max_new_tokens
    note_room(sequences, [max_new_tokens] * len(sequences), body.max_length)
    body.check_request([min(len(prompt) + most, body.max_length) for prompt in sequences])
    stops, strings = read_stops(stop, text, generation, body.vocab)
    return Request(sequences, most, Choice(**choice), stops, strings, logprobs, adapters)


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OTHER_SAMPLING = (
    "num_beams", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "penalty_alpha", "no_repeat_ngram_size",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "guidance_scale",
)  # fmt: skip
"""Settings of a generation config that change tokens and that this decoder does not have."""


def model_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings of a model's generation config, as transformers reads them.

    Without `do_sample` the model decodes greedily: the temperature is 0, and a repetition penalty applies alone. A setting
    that the config leaves out is off.
    """
    settings = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    if not generation.get("do_sample"):
        return {"temperature": 0.0} | {key: value for key, value in settings.items() if key == "repetition_penalty"}
    return {"temperature": 1.0} | settings


def describe_sampling(generation: Mapping[str, Any], explicit: Mapping[str, Any] | None = None) -> str:
    """Return one line with the settings in force, and those of the model's generation config that are not."""
    explicit = {name: value for name, value in (explicit or {}).items() if value is not None}
    choice = Choice(**model_sampling(generation) | explicit)
    values = {name: getattr(choice, name) for name in SAMPLING}
    default = {name: getattr(Choice(), name) for name in SAMPLING}
    shown = [f"{name} {value:g}" for name, value in values.items() if value != default[name]]
    greedy = ["greedy"] if choice.temperature == 0 else []
    unused = [
        f"{name}={generation[name]!r}" for name in OTHER_SAMPLING if generation.get(name) not in (None, 1, 1.0, 0, 0.0, [], ())
    ]
    missing = f"; not available here: {', '.join(unused)}" if unused else ""
    return f"sampling: {', '.join(greedy + shown)} (from the model's generation config{missing})"


def padding_of(generation: Mapping[str, Any], text: TextCodec | None = None) -> int | None:
    """Return the id that pads a tensor of prompts; None where no id can be told from a token, as one that also ends a text."""
    pad = generation.get("pad_token_id")
    pad = pad if pad is not None or text is None else text.pad
    return None if pad is None or pad in ends_of(dict(generation)) else pad


def read_prompts(prompts: Any, text: TextCodec | None, pad: int | None = None) -> list[list[int]]:
    """Return the token ids of one prompt or several.

    prompts  text, ids, lists of either, a tensor or array (T,) or (B, T), or a tokenizer's output, whose attention_mask marks
             the padding
    pad      the id of the padding: in a (B, T) without an attention_mask, it is removed from both ends of each row
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        mask = prompts.get("attention_mask")
        ids = read_prompts(prompts["input_ids"], text, pad if mask is None else None)
        return ids if mask is None else _masked(ids, mask)
    if isinstance(prompts, (Tensor, np.ndarray)):
        if prompts.ndim not in (1, 2) or str(prompts.dtype).removeprefix("torch.")[:3] not in ("int", "uin"):
            raise ValueError(
                f"generate: a tensor of prompts must hold token ids (T,) or (B, T), got {prompts.dtype} {tuple(prompts.shape)}."
            )
        rows = prompts.tolist() if prompts.ndim == 2 else [prompts.tolist()]
        for number, row in enumerate(rows):
            real = [at for at, token in enumerate(row) if token != pad] if prompts.ndim == 2 else []
            rows[number] = row[real[0] : real[-1] + 1] if real else row  # a row of padding alone stays
        return rows
    if not isinstance(prompts, Sequence):
        raise ValueError(
            f"generate: prompts: got {type(prompts).__name__}, wanted text, token ids, a list of either, or a tokenizer's "
            "output with input_ids."
        )
    if isinstance(prompts, str) or any(isinstance(prompt, Real) for prompt in prompts):
        prompts = [prompts]
    return [_read_prompt(number, prompt, text) for number, prompt in enumerate(prompts)]


def _read_prompt(number: int, prompt: Any, text: TextCodec | None) -> list[int]:
    if isinstance(prompt, str):
        if text is None:
            raise ValueError(
                "generate: a prompt is text, but the decoder has no tokenizer; pass tokenizer= to gb.decoder, or ids."
            )
        return text.encode(prompt)
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(tokens, Sequence):
        raise ValueError(f"generate: prompt {number}: got {prompt!r}, wanted text or a list of token ids.")
    for at, token in enumerate(tokens):
        # Through the abstract class alone, 512 tokens take 0.2 ms of a prefill's 4.
        if type(token) is not int and (not isinstance(token, Integral) or isinstance(token, bool)):
            raise ValueError(
                f"generate: prompt {number}: got {token!r} at index {at}, wanted token ids, which are whole numbers."
            )
    return list(map(int, tokens))


def _masked(ids: list[list[int]], mask: Any) -> list[list[int]]:
    """Return the ids of each row that its mask marks. Padding is before or after them."""
    rows = mask.tolist() if hasattr(mask, "tolist") else mask
    rows = rows if not rows or isinstance(rows[0], Sequence) or hasattr(rows[0], "tolist") else [rows]
    marks = [list(map(bool, row)) for row in rows]
    if [len(row) for row in marks] != [len(row) for row in ids]:
        raise ValueError("generate: attention_mask: got another shape than input_ids, wanted a number for each id.")
    for number, row in enumerate(marks):
        first = row.index(True) if True in row else 0
        if not all(row[first : first + sum(row)]):
            raise ValueError(
                f"generate: attention_mask of prompt {number}: got padding between its tokens, wanted it before or after them."
            )
    return [[token for token, real in zip(*pair) if real] for pair in zip(ids, marks)]


def read_stops(
    stop: Any, text: TextCodec | None, generation: Mapping[str, Any], vocab: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the stop tokens and the stop strings. None: the end-of-text tokens of the model's generation config."""
    if stop is None:
        return model_ends(generation, vocab), ()
    if not isinstance(stop, (str, Integral, Iterable)):
        raise ValueError(f"generate: stop: got {stop!r}, wanted token ids and strings.")
    stops = [stop] if isinstance(stop, (str, Integral)) else list(stop)
    strings = tuple(s for s in stops if isinstance(s, str))
    if strings and text is None:
        raise ValueError("generate: a stop string needs a tokenizer; pass tokenizer= to gb.decoder, or stop token ids.")
    if "" in strings:
        raise ValueError("generate: a stop string is empty, which every text holds; leave it out.")
    return check_stops([s for s in stops if not isinstance(s, str)], vocab), strings


def model_ends(generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the end-of-text tokens of a model's generation config. It may have none."""
    ends = ends_of(dict(generation))
    for token in ends:
        if not 0 <= token < vocab:
            raise ValueError(
                f"generate: the model's config: eos_token_id: got {token}, outside its vocabulary of {vocab}; correct it, or "
                f"pass stop=."
            )
    return check_stops(ends, vocab)


def check_adapters(names: Any, prompts: int, body: Any) -> list[str | None]:
    """Return the adapter of each prompt: `names` is one for all, or a list."""
    known = body.adapters
    if not isinstance(names, (str, Sequence)):
        raise ValueError(f"generate: adapters: got {names!r}, wanted a name or None for each prompt.")
    if known is None:
        why = f" ({body.path})" if body.path else ""
        raise ValueError(f"generate: adapters: got {names!r}, but all rows are computed alike{why}; leave it out.")
    result = [names] * prompts if isinstance(names, str) else list(names)
    if len(result) != prompts:
        raise ValueError(f"generate: adapters: got {len(result)} for {prompts} prompts, wanted a name or None for each.")
    for name in result:
        if name is not None and name not in known:
            on = f"those that are on: {', '.join(map(repr, known))}" if known else "None, for none is on"
            raise ValueError(f"generate: adapters: got {name!r}, wanted one of {on}.")
    return result


def check_count(name: str, value: Any, also: str = "") -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"generate: {name}: got {value!r}, wanted a whole number, 1 or more{also}.")


def check_prompts(prompts: list[list[int]], vocab: int, max_batch: int, max_length: int, new: int = 1) -> None:
    """Raise a ValueError for prompts that do not fit. new: the tokens that each must at least have room for."""
    if not prompts:
        raise ValueError("generate: got no prompts, wanted at least one.")
    if len(prompts) > max_batch:
        raise ValueError(
            f"generate: {len(prompts)} sequences at once, but the decoder was built for max_batch={max_batch}; "
            "ask for fewer, or build it larger."
        )
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"generate: prompt {number} is empty; give it at least one token (the model's bos, say).")
        if len(prompt) + new > max_length:
            leaves = f"which leaves no room in max_length={max_length}" if new else f"more than max_length={max_length}"
            raise ValueError(
                f"generate: prompt {number} has {len(prompt)} tokens, {leaves}; shorten it, or build the decoder longer."
            )
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= worst < vocab:
            raise ValueError(
                f"generate: prompt {number} holds the token {worst}, outside the model's vocabulary of {vocab}; "
                "is the tokenizer this model's own?"
            )


def note_room(prompts: Sequence[list[int]], most: Sequence[int | None], max_length: int, who: str = "generate") -> None:
    """Print a line where a prompt leaves no room for its `most` new tokens; their text ends at max_length.

    It is printed once for each max_length and number of tokens: prompts of a loop differ in length.
    """
    cut = [(max_length - len(prompt), new) for prompt, new in zip(prompts, most) if new and len(prompt) + new > max_length]
    if cut:
        room, new = min(cut)
        notice(
            f"{who}: max_new_tokens: got {new}, but a prompt of {max_length - room} tokens leaves {room} in "
            f"max_length={max_length}, and its text ends there; ask for fewer, or give a larger max_length.",
            key=f"{who}: max_new_tokens {new} of {max_length}",
        )


def check_stops(stops: Sequence[Any], vocab: int) -> tuple[int, ...]:
    for stop in stops:
        if not isinstance(stop, Integral) or isinstance(stop, bool):
            raise ValueError(f"generate: stop: got {stop!r}, wanted token ids and strings.")
    tokens = tuple(dict.fromkeys(map(int, stops)))
    if len(tokens) > STOPS:
        raise ValueError(f"generate: {len(tokens)} stop tokens, wanted at most {STOPS}; use stop strings for more.")
    for stop in tokens:
        if not 0 <= stop < vocab:
            raise ValueError(
                f"generate: the stop token {stop} lies outside the vocabulary of {vocab}, so it can never be seen."
            )
    return tokens


def draws(prompts: list[list[int]]) -> list[int]:
    """Return the number that seeds each row's draws, made of its prompt and of the number of equal prompts before it.

    It does not depend on the batch or on the order of the prompts; copies of a prompt differ, and so do different prompts.
    """
    copies: Counter[bytes] = Counter()
    numbers = []
    for prompt in prompts:
        key = array("q", prompt).tobytes()
        numbers.append((crc32(key) + copies[key]) % 2**31)
        copies[key] += 1
    return numbers


CHUNK = 2048  # tokens of a prompt at a time
PROMPT_TOKENS = 4096  # in a prefill, padding counted: more keep the GPU busy for longer than their launches take


def prompt_width(length: int) -> int:
    """Return the padded length of prompts: one of few sizes where a graph is captured for each, and of longer ones, whose
    attention would take up to four times as long at the next power of two, whole chunks."""
    if length > PROMPT_TOKENS:
        return -(-length // CHUNK) * CHUNK
    return max(16, 1 << (length - 1).bit_length()) if length else 0


def pad(prompts: list[list[int]], width: int, device: torch.device) -> Tensor:
    """Return prompts as (B, width) int64, padded on the right with zeros, which no kernel reads."""
    rows = [prompt[:width] + [0] * (width - len(prompt)) for prompt in prompts]
    return to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on the device, copied through pinned memory so that the host does not wait."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class Generated:
    """One generated sequence; the prompt is not part of it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # empty unless asked for
    finish: str = ""  # 'stop token', 'stop string' or 'length'
    text: str | None = None  # None without a tokenizer


@dataclass
class Generation:
    """The sequences that `generate` returns, in the order of the prompts, and the speed at which they came."""

    sequences: list[Generated]
    seconds: float = 0.0  # from the call to the last token on the host
    first_token_s: float = 0.0  # from the call to the first
    launches: int = 0
    steps: int = 0  # as launched
    positions: int = 0  # that the model computed in the steps of a masked diffusion model, over all rows
    row_steps: int = 0  # steps that brought a row a token, over all rows
    bytes_read: int = 0  # that the wanted steps must read: the roofline's numerator
    wanted: int | None = None  # steps that a row might need when they were launched; None: all
    at_once: int = 1  # devices that read at the same time, each a part of these bytes

    @property
    def tokens(self) -> list[list[int]]:
        return [sequence.tokens for sequence in self.sequences]

    @property
    def texts(self) -> list[str]:
        return [sequence.text or "" for sequence in self.sequences]

    @property
    def count(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def tokens_a_step(self) -> float:
        """Tokens per step of a row that was alive: 1, or with speculation 1 + the drafted tokens that proved right."""
        return self.count / self.row_steps if self.row_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all rows together. The time includes the prompt and the first token."""
        return self.count / self.seconds if self.seconds else 0.0

    def roofline(self, read_bytes_per_s: float) -> float:
        """The fraction of the time that this machine needs just to read the weights and the live cache once per step.

        The rate is that of one device. Where several share the model, those that read at once are counted.
        """
        return self.bytes_read / (self.at_once * read_bytes_per_s) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        figures = "seconds", "first_token_s", "tokens_per_s", "launches", "steps", "tokens_a_step", "bytes_read"
        sequences = [vars(sequence) for sequence in self.sequences]
        return {"sequences": sequences, "tokens": self.count} | {name: getattr(self, name) for name in figures}
