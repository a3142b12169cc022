"""What is asked of a decoder: prompts and settings, checked on the host before anything is launched."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..models.folder import ends_of
from .runner import ModelRunner
from .text import TextCodec

LARGEST = 1e30  # of a temperature or a penalty: in fp32, logits times or over it stay finite
STOPS = 32  # stop tokens that a request may name


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen, for every row of a request alike."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind, fits, wanted in (
            ("temperature", Real, lambda t: 0 <= t <= LARGEST, f"0 (greedy) or more, up to {LARGEST:g}"),
            ("top_k", Integral, lambda k: 0 <= k < 2**31, "a whole number, 0 (off) or more"),
            ("top_p", Real, lambda p: 0 < p <= 1, "more than 0 and at most 1 (off)"),
            ("min_p", Real, lambda p: 0 <= p < 1, "0 (off) or more and less than 1"),
            ("repetition_penalty", Real, lambda p: 1 / LARGEST <= p <= LARGEST, f"{1 / LARGEST:g} to {LARGEST:g}; 1 is off"),
            ("seed", Integral, lambda seed: -(2**63) <= seed < 2**63, "a whole number of 64 bits"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
                raise ValueError(f"generate: {name}: got {value!r}, wanted {wanted}.")

    @property
    def greedy(self) -> bool:
        """Whether the greatest logit is all that is asked for."""
        return self.temperature == 0 and self.repetition_penalty == 1


@dataclass(frozen=True)
class Request:
    prompts: list[list[int]]  # one a row: a prompt asked for n times stands here n times
    max_new_tokens: int
    choice: Choice = field(default_factory=Choice)
    stops: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: bool = False
    adapters: tuple[str | None, ...] | None = None  # one a row; None: all rows have all that are on

    @property
    def lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


def make_request(
    prompts: Any,
    text: TextCodec | None,
    body: ModelRunner,
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
    if unknown := choice.keys() - (known := [one.name for one in fields(Choice)]):
        raise TypeError(
            f"generate() got an unexpected keyword argument {min(unknown)!r}, wanted max_new_tokens, stop, n, logprobs, "
            f"adapters, sampling, {', '.join(known)}."
        )
    check_count("n", n)
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens, "; None takes as many as fit")
    if sampling not in (None, "model"):
        raise ValueError(
            f"generate: sampling: got {sampling!r}, wanted 'model', for the settings of the model's generation config, or None."
        )
    if sampling == "model":
        choice = model_sampling(generation) | {name: value for name, value in choice.items() if value is not None}
    given = read_prompts(prompts, text, padding_of(generation, text))
    own = check_adapters(adapters, len(given), body)
    found = [prompt for prompt in given for _ in range(n)]
    check_prompts(found, body.vocab, body.max_batch, body.max_length)
    body.check_request([min(len(p) + (max_new_tokens or body.max_length), body.max_length) for p in found])
    stops, strings = read_stops(stop, text, generation, body.vocab)
    return Request(
        found,
        body.max_length if max_new_tokens is None else max_new_tokens,
        Choice(**choice),
        stops,
        strings,
        logprobs,
        None if own is None else tuple(name for name in own for _ in range(n)),
    )


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OTHER_SAMPLING = (
    "num_beams", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "penalty_alpha", "no_repeat_ngram_size",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "guidance_scale",
)  # fmt: skip
"""Settings of a generation config that change tokens and that no decoder here has."""


def model_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings of a model's generation config, as transformers reads them.

    Without `do_sample` the model decodes greedily: the temperature is 0, and a repetition penalty applies alone. A setting
    that the config leaves out is off.
    """
    found = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    if not generation.get("do_sample"):
        return {"temperature": 0.0} | {key: value for key, value in found.items() if key == "repetition_penalty"}
    return {"temperature": 1.0} | found


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


def read_prompts(given: Any, text: TextCodec | None, pad: int | None = None) -> list[list[int]]:
    """Return the token ids of one prompt or several.

    given  text, ids, lists of either, a tensor or array (T,) or (B, T), or a tokenizer's output, whose attention_mask marks
           the padding
    pad    the id of the padding: in a (B, T) without an attention_mask, it is removed from both ends of each row
    """
    if isinstance(given, Mapping) and "input_ids" in given:
        mask = given.get("attention_mask")
        ids = read_prompts(given["input_ids"], text, pad if mask is None else None)
        return ids if mask is None else _unpadded(ids, mask)
    if isinstance(given, (Tensor, np.ndarray)):
        if given.ndim not in (1, 2) or str(given.dtype).removeprefix("torch.")[:3] not in ("int", "uin"):
            raise ValueError(
                f"generate: a tensor of prompts must hold token ids (T,) or (B, T), got {given.dtype} {tuple(given.shape)}."
            )
        if given.ndim == 1:
            return [given.tolist()]
        return [_without(pad, row) for row in given.tolist()]
    if isinstance(given, str):
        return [_encode(given, text)]
    if not isinstance(given, Sequence):
        raise ValueError(
            f"generate: prompts: got {type(given).__name__}, wanted text, token ids, a list of either, or a tokenizer's output "
            "with input_ids."
        )
    if given and any(isinstance(item, Real) for item in given):
        return [_ids(0, given)]
    return [_encode(item, text) if isinstance(item, str) else _ids(number, item) for number, item in enumerate(given)]


def _ids(number: int, item: Any) -> list[int]:
    tokens = item.tolist() if hasattr(item, "tolist") else item
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise ValueError(f"generate: prompt {number}: got {item!r}, wanted text or a list of token ids.")
    for at, token in enumerate(tokens):
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ValueError(
                f"generate: prompt {number}: got {token!r} at index {at}, wanted token ids, which are whole numbers."
            )
    return [int(token) for token in tokens]


def _without(pad: int | None, row: list[int]) -> list[int]:
    """Return the row without padding before and after its tokens. A row of padding alone stays."""
    real = [at for at, token in enumerate(row) if token != pad]
    return row[real[0] : real[-1] + 1] if real else row


def _unpadded(ids: list[list[int]], mask: Any) -> list[list[int]]:
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
                f"generate: attention_mask of prompt {number}: got padding between its tokens, wanted it before or behind them."
            )
    return [[token for token, real in zip(*pair) if real] for pair in zip(ids, marks)]


def _encode(prompt: str, text: TextCodec | None) -> list[int]:
    if text is None:
        raise ValueError("generate: a prompt is text, but the decoder has no tokenizer; pass tokenizer= to gb.decoder, or ids.")
    return text.encode(prompt)


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


def check_verify(verify: Any) -> None:
    if verify not in (True, "quick", False, None):
        raise ValueError(f"decoder: verify: got {verify!r}, wanted True, 'quick' or False.")


def check_adapters(given: Any, prompts: int, body: ModelRunner) -> list[str | None] | None:
    """One for each prompt."""
    if given is None:
        return None
    known = body.adapters
    if not isinstance(given, (str, Sequence)):
        raise ValueError(f"generate: adapters: got {given!r}, wanted a name or None for each prompt.")
    if known is None:
        why = f" ({body.path})" if body.path else ""
        raise ValueError(f"generate: adapters: got {given!r}, but all rows are computed alike{why}; leave it out.")
    found = [given] * prompts if isinstance(given, str) else list(given)
    if len(found) != prompts:
        raise ValueError(f"generate: adapters: got {len(found)} for {prompts} prompts, wanted a name or None for each.")
    for name in found:
        if name is not None and name not in known:
            on = f"those that are on: {', '.join(map(repr, known))}" if known else "None, for none is on"
            raise ValueError(f"generate: adapters: got {name!r}, wanted one of {on}.")
    return found


def check_count(name: str, value: Any, also: str = "") -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"generate: {name}: got {value!r}, wanted a whole number, 1 or more{also}.")


def check_prompts(
    prompts: list[list[int]], vocab: int, max_batch: int, max_length: int, who: str = "generate", new: int = 1
) -> None:
    """`new`: the least tokens that must have room behind each."""
    if not prompts:
        raise ValueError(f"{who}: got no prompts, wanted at least one.")
    if len(prompts) > max_batch:
        raise ValueError(
            f"{who}: {len(prompts)} sequences at once, but the decoder was built for max_batch={max_batch}; "
            "ask for fewer, or build it larger."
        )
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"{who}: prompt {number} is empty; give it at least one token (the model's bos, say).")
        if len(prompt) + new > max_length:
            leaves = f"which leaves no room in max_length={max_length}" if new else f"more than max_length={max_length}"
            raise ValueError(
                f"{who}: prompt {number} has {len(prompt)} tokens, {leaves}; shorten it, or build the decoder longer."
            )
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        if not 0 <= worst < vocab:
            raise ValueError(
                f"{who}: prompt {number} holds the token {worst}, outside the model's vocabulary of {vocab}; "
                "is the tokenizer this model's own?"
            )


def check_stops(stops: Sequence[Any], vocab: int) -> tuple[int, ...]:
    for stop in stops:
        if not isinstance(stop, Integral) or isinstance(stop, bool):
            raise ValueError(f"generate: stop: got {stop!r}, wanted token ids and strings.")
    found = tuple(dict.fromkeys(int(stop) for stop in stops))
    if len(found) > STOPS:
        raise ValueError(f"generate: {len(found)} stop tokens, wanted at most {STOPS}; use stop strings for more.")
    for stop in found:
        if not 0 <= stop < vocab:
            raise ValueError(
                f"generate: the stop token {stop} lies outside the vocabulary of {vocab}, so it can never be seen."
            )
    return found


def draws(prompts: list[list[int]]) -> list[int]:
    """Return the number that seeds each row's draws, made of its prompt and of the number of equal prompts before it.

    It does not depend on the batch or on the order of the prompts; copies of a prompt differ, and so do different prompts.
    """
    before: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in prompts:
        key = tuple(prompt)
        found.append((crc32(array("q", prompt).tobytes()) + before[key]) % 2**31)
        before[key] += 1
    return found


def pad(prompts: list[list[int]], width: int, device: torch.device) -> Tensor:
    """(B, width) int64, padded on the right with zeros, which nothing reads."""
    rows = [prompt[:width] + [0] * (width - len(prompt)) for prompt in prompts]
    return to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor through pinned memory, so that the host does not wait for the copy."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
