"""What is asked of a decoder: prompts and settings, checked on the host before anything is launched."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from .contract import Body

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
            if not isinstance(value, kind) or not fits(value):
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
    tokenizer: Any,
    body: Body,
    ends: list[int],
    max_new_tokens: int | None = None,
    stop: Any = None,
    n: int = 1,
    logprobs: bool = False,
    adapters: Any = None,
    **choice: Any,
) -> Request:
    """What `generate` was given, checked: of one that is not accepted, nothing has been launched."""
    if unknown := choice.keys() - (known := [one.name for one in fields(Choice)]):
        raise TypeError(
            f"generate() got an unexpected keyword argument {min(unknown)!r}, wanted max_new_tokens, stop, n, logprobs, "
            f"adapters, {', '.join(known)}."
        )
    check_count("n", n)
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens, "; None takes as many as fit")
    given = read_prompts(prompts, tokenizer)
    own = check_adapters(adapters, len(given), body)
    found = [prompt for prompt in given for _ in range(n)]
    check_prompts(found, body.vocab, body.max_batch, body.max_length)
    body.check_request([min(len(p) + (max_new_tokens or body.max_length), body.max_length) for p in found])
    stop = ends if stop is None else stop
    stops = [stop] if isinstance(stop, (str, Integral)) else list(stop)
    strings = tuple(s for s in stops if isinstance(s, str))
    if strings and tokenizer is None:
        raise ValueError("generate: a stop string needs a tokenizer; pass tokenizer= to gb.decoder, or stop token ids.")
    if "" in strings:
        raise ValueError("generate: a stop string is empty, which every text holds; leave it out.")
    return Request(
        found,
        body.max_length if max_new_tokens is None else max_new_tokens,
        Choice(**choice),
        check_stops([s for s in stops if not isinstance(s, str)], body.vocab),
        strings,
        logprobs,
        None if own is None else tuple(name for name in own for _ in range(n)),
    )


def read_prompts(given: Any, tokenizer: Any) -> list[list[int]]:
    """Token ids of one prompt or several: text, ids, lists of either, a tensor (T,) or (B, T), all of whose ids count, or a
    tokenizer's output, whose attention_mask says which ids are padding."""
    if isinstance(given, Mapping) and "input_ids" in given:
        ids = read_prompts(given["input_ids"], tokenizer)
        mask = given.get("attention_mask")
        return ids if mask is None else _unpadded(ids, mask)
    if isinstance(given, Tensor):
        if given.dim() not in (1, 2) or given.dtype.is_floating_point or given.dtype == torch.bool:
            raise ValueError(
                f"generate: a tensor of prompts must hold token ids (T,) or (B, T), got {given.dtype} {tuple(given.shape)}."
            )
        return [row.tolist() for row in (given if given.dim() == 2 else given[None])]
    if isinstance(given, str):
        return [_encode(given, tokenizer)]
    if not isinstance(given, Sequence):
        raise ValueError(
            f"generate: prompts: got {type(given).__name__}, wanted text, token ids, a list of either, or a tokenizer's output "
            "with input_ids."
        )
    if given and all(isinstance(item, Integral) for item in given):
        return [[int(token) for token in given]]
    return [_encode(item, tokenizer) if isinstance(item, str) else _ids(number, item) for number, item in enumerate(given)]


def _ids(number: int, item: Any) -> list[int]:
    tokens = item.tolist() if hasattr(item, "tolist") else item
    if not isinstance(tokens, Sequence) or not all(isinstance(token, Integral) for token in tokens):
        raise ValueError(f"generate: prompt {number}: got {item!r}, wanted text or a list of token ids.")
    return [int(token) for token in tokens]


def _unpadded(ids: list[list[int]], mask: Any) -> list[list[int]]:
    """Of each row the ids that count. Padding stands before them or behind them."""
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


def _encode(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise ValueError("generate: a prompt is text, but the decoder has no tokenizer; pass tokenizer= to gb.decoder, or ids.")
    found = tokenizer.encode(text)
    return list(getattr(found, "ids", found))  # the tokenizers package gives an Encoding


def check_options(tokenizer: Any, verify: Any) -> None:
    """Of a decoder, what no part of it looks at before a request is on its way."""
    if tokenizer is not None and not all(callable(getattr(tokenizer, what, None)) for what in ("encode", "decode")):
        raise ValueError(
            f"decoder: tokenizer: got a {type(tokenizer).__name__}, wanted one that encodes and decodes, of gpubound, "
            f"tokenizers or transformers."
        )
    if verify not in (True, "quick", False, None):
        raise ValueError(f"decoder: verify: got {verify!r}, wanted True, 'quick' or False.")


def check_adapters(given: Any, prompts: int, body: Body) -> list[str | None] | None:
    """One for each prompt."""
    if given is None:
        return None
    known = body.adapters
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
    if not isinstance(value, Integral) or value < 1:
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
        if not isinstance(stop, Integral):
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
    """The number under which each row draws: of its prompt and of how many equal ones stand before it.

    So a prompt gives the same tokens alone, in any batch and in any order, copies of it differ, and different prompts do not
    share their luck, as they would if all counted from 0.
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
