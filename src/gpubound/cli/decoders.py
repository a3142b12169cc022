"""A decoder as the options of `gpubound generate` ask for it: what writing a text and holding a conversation have in common."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..corpus import Tokenizer
from ..decode import FastDecoder, decoder
from ..device import label
from ..words import quantity
from .saved import Saved

if TYPE_CHECKING:
    from .generate import Generate

VERIFY: dict[str, bool | str] = {"full": True, "quick": "quick", "none": False}
# What a model writes may hold control characters, and a terminal obeys them.
HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def check_text(where: str, text: str) -> None:
    """Bytes that are not UTF-8 reach Python as surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: is not a text in UTF-8 (at character {error.start + 1}); convert it first.") from error


class Spoken:
    """The tokenizer for the decoder's texts: special tokens are left out of them, unless asked for."""

    def __init__(self, inner: Tokenizer, special: bool):
        self.inner, self.special = inner, special

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids, skip_special=not self.special)


def build(
    options: "Generate", saved: Saved, probe: list[list[int]], length: int, device: torch.device, begun: float
) -> FastDecoder:
    """The decoder for prompts like `probe` in sequences of `length` tokens, and a line on stderr that says what it is."""
    # On a CPU a launch of many steps saves nothing, and the first token would wait for the last.
    k = int(options.k) if options.k != "auto" else 1 if device.type == "cpu" else "auto"
    tokenizer = Spoken(saved.tokenizer, options.special)
    way: dict[str, Any] = {"fused": options.fused, "verify": VERIFY[options.verify]}
    way |= {"speculate": options.speculate, "weights": options.weights, "cache": options.cache}
    made = decoder(saved.model, len(probe) * options.n, length, k, tokenizer=tokenizer, **way)
    for _ in range(2 if device.type == "cuda" else 0):  # what such a request compiles, then what it captures: not on its clock
        made.generate(probe, **settings_of(options, saved) | {"max_new_tokens": sum(made.ladder), "stop": ()})
    first = next(saved.model.parameters())
    parts = [
        f"{saved.folder}: {quantity(sum(p.numel() for p in saved.model.parameters()))} parameters",
        f"{str(first.dtype).removeprefix('torch.')} on {label(device)}",
        f"its own forward ({made.path})" if made.path else made.kernels,
        f"ready in {time.perf_counter() - begun:.2f} s",
    ]
    print(", ".join(parts), file=sys.stderr, flush=True)
    if options.table:
        print(made, file=sys.stderr, flush=True)
    return made


def settings_of(options: "Generate", saved: Saved) -> dict[str, Any]:
    """What the decoder's generate() takes. A special token's name among the stops is its number: texts leave it out."""
    special = {token.content: i for i, token in saved.tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    ends = [] if options.ignore_eos else [i for i in saved.ends if i < vocabulary(saved)]
    stops = [*ends, *options.stop_id, *(special.get(text, text) for text in options.stop)]
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n", "logprobs", "max_new_tokens")
    return {name: getattr(options, name) for name in names} | {"stop": tuple(dict.fromkeys(stops))}


def vocabulary(saved: Saved) -> int:
    model: Any = saved.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.lm_head
    return head.weight.shape[0]
