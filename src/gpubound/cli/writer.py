"""A saved model that is ready to go on with prompts, batch by batch: for one process that writes, and for each of several."""

from typing import TYPE_CHECKING, Any

import torch

from ..decode.layer import GEMV_ROWS
from ..decode.result import Generated
from ..decode.text import TextCodec
from ..device import resolve
from .fill import build as build_sampler, check_kind, fills, settings_of as filling_of
from .saved import Saved, build, open_saved, settings_of

if TYPE_CHECKING:
    from .generate import Generate

NEW = 256  # tokens that a text goes on for, unless asked otherwise


def opened(options: "Generate", device: str) -> Saved:
    """The model that the options name, on its device."""
    names = ("dtype", "tokenizer", "trust_remote_code", "adapter")
    over = sharing(options) if options.split is not None else [resolve(device)]
    given = {name: getattr(options, name) for name in names}
    saved = open_saved(options.ckpt, over, **given, split=options.split or "layers")
    check_kind(options, saved)
    return saved


class Writer:
    """A model that is ready to go on with the prompts, batch by batch. A batch is named by the number of its first prompt."""

    def __init__(self, options: "Generate", saved: Saved, prompts: list[str]):
        self.options, self.prompts = options, prompts
        codec = TextCodec(saved.tokenizer)
        self.ids = [codec.encode(prompt) for prompt in prompts]
        self.together = together(options)
        self.made, self.settings = (filler if fills(saved) else continuer)(options, saved, self.ids, self.together)

    def start(self, first: int) -> Any:
        """What writes the batch, ready to play."""
        batch = self.settings | {"seed": self.options.seed + first}  # the same prompt in another batch is drawn anew
        return self.made.start(self.ids[first : first + self.together], **batch)

    def rows(self, first: int) -> list[tuple[int, str, int]]:
        """(number of its prompt, the prompt, which of its sequences) of every sequence of the batch."""
        numbers = range(first, min(first + self.together, len(self.ids)))
        return [(number, self.prompts[number], copy) for number in numbers for copy in range(self.options.n)]

    def told(self, first: int, sequences: list[Generated]) -> list[dict[str, Any]]:
        """The batch's sequences as JSON has them."""
        return [
            vars(sequence) | {"prompt": prompt, "prompt_tokens": sequence.prompt}
            for (_, prompt, _), sequence in zip(self.rows(first), sequences)
        ]


def sharing(options: "Generate") -> list[torch.device]:
    """The devices that share one copy of the model."""
    given, there = resolve(options.device), torch.cuda.device_count()
    if given.type == "cuda" and options.device.startswith("cuda:"):
        raise ValueError(
            f"device: got {options.device}, a single GPU, and with --split several share the model; leave --device out."
        )
    if options.gpus is None and (given.type == "cpu" or there < 2):
        seen = f"{there} GPU{' is' if there == 1 else 's are'} visible" if given.type == "cuda" else "no GPU is used"
        raise ValueError(f"split: {seen}, and at least 2 devices share the model; name more GPUs, or give --gpus.")
    count = options.gpus or there
    if given.type == "cuda" and count > there:
        raise ValueError(f"gpus: got {count}, wanted at most the {there} GPUs that are visible.")
    return [given] * count if given.type == "cpu" else [torch.device("cuda", number) for number in range(count)]


def together(options: "Generate") -> int:
    """How many prompts are written on at once."""
    batch = min(options.batch, GEMV_ROWS) if options.split == "tensors" else options.batch
    return max(1, batch // options.n)


def filler(options: "Generate", saved: Saved, ids: list[list[int]], together: int) -> tuple[Any, dict[str, Any]]:
    """What writes, and what its start() takes: of a masked diffusion model."""
    return build_sampler(options, saved, ids[:together]), filling_of(options)


def continuer(options: "Generate", saved: Saved, ids: list[list[int]], together: int) -> tuple[Any, dict[str, Any]]:
    """The same of a causal model."""
    settings = settings_of(options, saved) | {"max_new_tokens": options.max_new_tokens or NEW}
    # a multiple of 64, so that runs like each other have caches alike
    needed = min(-(-(max(map(len, ids)) + settings["max_new_tokens"]) // 64) * 64, saved.positions)
    length = needed if options.max_length is None else options.max_length
    check_room(ids, length)
    return build(options, saved, ids[:together], length), settings


def check_room(ids: list[list[int]], length: int) -> None:
    """Of all prompts before the first is written on: one in a later batch would end the run, and --json has printed nothing."""
    for number, prompt in enumerate(ids, 1):
        if not prompt:
            raise ValueError(f"prompt {number} has no tokens, by this tokenizer; give it at least one to go on from.")
        if len(prompt) >= length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which leaves no room in max_length={length}; shorten it, or give a "
                "larger --max-length."
            )
