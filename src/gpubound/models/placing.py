"""What placing asks of a family: for each role of its modules, a function that says how such a module is swapped.

A family's file has a table SWAPS, {role: maker}. A maker gets a module and the decoder stack that it lies in, and
gives a `Swap`. Placing does the rest: it refuses what is better left alone, verifies, and keeps the table. The part has a
method `fused_kernels`, which tells the table what it runs. Calls that it cannot take go to the forward of the class that it was
swapped into. What modules are tried with is made up here: the same hidden states and tokens at every call and in every dtype.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Call
from ..layers import LMLoss
from ..trace import count

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def activation_name(config: Any) -> str:
    """What a config calls its activation; ACTIVATIONS has our word for it."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))


Case = Callable[[torch.dtype], tuple[Tensor, dict[str, Any]]]
"""dtype -> (x, keywords): x gets a gradient; the same values in every dtype"""


@dataclass
class Swap:
    """How a module can be swapped: for which part, with which attributes beside its own, verified on which cases."""

    part: type
    calls: tuple[Call, ...]  # what the part will call, and in which shapes, so that they can be compiled side by side
    attributes: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    refusal: str = ""
    trial: Callable[[], str | None] | None = None  # what the exercise would not show: why not to swap, or None


Maker = Callable[[Any, Any], Swap]
"""(module, the decoder stack with a rotary_emb that it lies in, or None) -> its Swap"""


PATCHED = "its class has another forward than when it was placed"


class Delegating:
    """A part that does not take every call."""

    original: Any  # the class of its module
    forwards: tuple[Any, Any]  # of its class and of its module's, when it was placed
    config: Any
    training: bool
    delegated: Counter[str]

    def delegate(self, why: str, *args, **kwargs):
        """The original forward, counted: same result, fewer fusions."""
        self.delegated[why] += 1
        count("place.delegated")
        return self.original.forward(self, *args, **kwargs)

    def patched(self) -> str | None:
        """Why its own forward may not stand in for its module's."""
        return None if self.original.forward is self.forwards[1] else PATCHED

    def by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Positional arguments under the names that the original forward gives them."""
        return dict(zip(_names(self.original.forward), args)) | kwargs


@cache
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(name for name in signature(forward).parameters if name != "self")


BATCH, TOKENS = 2, 16
OF_TEXT = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def noise(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Unit normal numbers, the same on every device and dtype, drawn aside from the user's random state."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)
    return drawn.to(like.device, like.dtype)


def random_case(module: nn.Module, shape: tuple[int, ...]) -> Case:
    """Rounded to the module's own dtype, whatever dtype it is wanted in: every run reads the same numbers."""
    like = next(module.parameters(), torch.empty(0, device="cpu", dtype=torch.float32)).detach().new_empty(0)
    return lambda dtype: (noise(shape, like).to(dtype), {})


def reads_tokens(model: Any) -> bool:
    """Return whether this is a transformers model of text, read left to right. One that also takes images reads text alone."""
    config: Any = getattr(model, "config", None)
    return (
        getattr(model, "main_input_name", None) == "input_ids"
        and hasattr(model, "get_input_embeddings")
        and hasattr(config, "get_text_config")
        and hasattr(config.get_text_config(), "vocab_size")
        and not getattr(config, "is_encoder_decoder", False)
    )


def made_up(model: Any) -> Tensor:
    """Return random token ids for a model, the same at every call. Ids that stand for images or sounds are left out."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(getattr(model, "lm_head", None), LMLoss):
        size, others = model.lm_head.out_features, set()
    else:
        size, names = model.config.get_text_config().vocab_size, vars(model.config)
        others = {names[name] for name in names if name.endswith(("_token_id", "_token_index")) and name not in OF_TEXT}
    ids = torch.randint(size, (BATCH, TOKENS), generator=generator, device="cpu")
    if others:
        text = torch.tensor([i for i in range(min(size, 1024)) if i not in others], device="cpu")
        ids = text[ids % len(text)]
    return ids.to(next(model.parameters()).device)


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or eval mode in all of `module`, and each sub-module's own again afterwards."""
    before = [(m, m.training) for m in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        for m, was in before:
            m.training = was


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """What is written into these tensors inside is undone behind it."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
