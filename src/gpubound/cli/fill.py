"""What `gpubound generate` does with a masked diffusion model: its options, and the sampler in the decoder's place."""

import sys
import time
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from ..decode import MaskedSampler
from ..decode.text import TextCodec
from ..device import label
from ..formatting import quantity
from ..layers.quantized_base import numbers_of
from .saved import Saved, checked_ends

if TYPE_CHECKING:
    from .generate import Generate

NEW, BLOCK = 128, 32  # tokens of an answer, and of a block where they divide the answer
DECODERS = (
    "chat", "system", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "logprobs", "max_length", "k", "weights",
    "cache", "speculate", "split", "fused", "verify", "table",
)  # fmt: skip
"""What a decoder alone has."""
FILLS = ("steps", "block", "guidance")
"""What filling alone has."""


def fills(saved: Saved) -> bool:
    """Whether it is a model that fills masks."""
    return getattr(saved.model.config, "causal", True) is False


def check_kind(options: "Generate", saved: Saved) -> None:
    """Refuse options that this kind of model has no use for."""
    kind, foreign = ("a masked diffusion model", DECODERS) if fills(saved) else ("a causal model", FILLS)
    for field in fields(options):
        if field.name in foreign and field.default is not MISSING and getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise ValueError(f"{name}: {saved.folder} is {kind}, for which it has no effect; leave it out.")


def build(options: "Generate", saved: Saved, probe: list[list[int]]) -> MaskedSampler:
    """The sampler for prompts like `probe`, and a line on stderr that says what it is."""
    own = saved.tokenizer
    if own.mask is None:
        raise ValueError(
            f"{saved.folder}: its tokenizer has no mask_token, and the model fills masks; give --tokenizer FOLDER."
        )
    ends = [] if options.ignore_eos else checked_ends(saved)
    made = MaskedSampler(saved.model, TextCodec(own, skip_special=not options.special), ends=[*ends, *options.stop_id])
    if saved.device.type == "cuda":  # what such a request compiles and captures: not on its clock
        made.generate(probe, **settings_of(options) | {"steps": None})
    first = next(saved.model.parameters())
    parts = [
        f"{saved.folder}: {quantity(numbers_of(saved.model))} parameters",
        f"{str(first.dtype).removeprefix('torch.')} on {label(saved.device)}",
        "fills masks",
        f"ready in {time.perf_counter() - saved.begun:.2f} s",
    ]
    print(", ".join(parts), file=sys.stderr, flush=True)
    return made


def settings_of(options: "Generate") -> dict[str, Any]:
    """What the sampler's start() takes."""
    tokens = options.max_new_tokens or NEW
    block = options.block or (BLOCK if tokens % BLOCK == 0 else None)
    names = ("steps", "guidance", "seed", "n")
    temperature = options.temperature or 0.0
    return {name: getattr(options, name) for name in names} | {"temperature": temperature, "tokens": tokens, "block": block}
