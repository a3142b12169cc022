"""The interface between placing and a model family, and inputs for the verification of replaced modules.

A family's module has a table SWAPS, {role: maker}. A maker gets a module and its decoder stack, and returns a `Swap`. Placing
refuses modules that it must not replace, verifies the replacement, and reports it. The replacement's `fused_kernels` describes
its kernels for the report. Calls that the replacement does not support go to the forward of the module's original class.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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

# Names of the KV cache in transformers: `cache` since 5.24, `past_key_values` before, and in models from elsewhere.
NAMES = ("cache", "past_key_values")
PATCHED = "its class has another forward than when it was placed"
BATCH, TOKENS = 2, 16
TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")

Case = Callable[[torch.dtype], tuple[Tensor, dict[str, Any]]]
"""dtype -> (x, keywords): x gets a gradient; the same values in every dtype"""


def cache_name(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's KV cache parameter (or of an output class's field), or None."""
    parameters = signature(function).parameters
    return next((name for name in NAMES if name in parameters), None)


def cache_word(function: Callable[..., Any]) -> str:
    """Return the name of the KV cache parameter of a function that is known to have one."""
    name = cache_name(function)
    assert name is not None, f"{function} takes no keys and values"
    return name


def cache_in(output: Mapping[str, Any]) -> Any:
    """Return the KV cache among a model's outputs, or None. The older name as an attribute of 5.24's outputs would warn."""
    return next((value for name, value in output.items() if name in NAMES), None)


@dataclass
class Swap:
    """Replacement of a module: the new class, its additional attributes, and the cases by which it is verified."""

    part: type
    calls: tuple[Call, ...]  # ops and shapes that the replacement calls, so that they can be compiled in parallel
    attributes: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    refusal: str = ""
    trial: Callable[[], str | None] | None = None  # an additional check: returns why not to swap, or None


Maker = Callable[[Any, Any], Swap]
"""(module, the decoder stack with a rotary_emb that contains it, or None) -> its Swap"""


class Delegating:
    """Base class of replacements that call the original forward for unsupported calls."""

    original: Any  # class of the module
    forwards: tuple[Any, Any]  # the replacement's and the original class's forward, when the module was placed
    config: Any
    training: bool
    delegated: Counter[str]

    def delegate(self, why: str, *args, **kwargs):
        """Call the original forward and count the call: same result, fewer fusions."""
        self.delegated[why] += 1
        count("place.delegated")
        return self.original.forward(self, *args, **kwargs)

    def patched(self) -> str | None:
        """Return why the replacement's forward may differ from the class's current one; None if that was not changed."""
        return None if self.original.forward is self.forwards[1] else PATCHED

    def by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return positional and keyword arguments by the parameter names of the original forward."""
        return dict(zip(_names(self.original.forward), args)) | kwargs


@cache
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(name for name in signature(forward).parameters if name != "self")


def noise(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Return normal values, the same on every device and in every dtype, without changing the global RNG state."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)
    return values.to(like.device, like.dtype)


def random_case(module: nn.Module, shape: tuple[int, ...]) -> Case:
    """Return a case of normal values, rounded to the module's dtype first, so that every dtype gets the same values."""
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
    """Return random token ids for a model, the same at every call. Ids of images or sounds are left out."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(getattr(model, "lm_head", None), LMLoss):
        size, others = model.lm_head.out_features, set()
    else:
        size, names = model.config.get_text_config().vocab_size, vars(model.config)
        others = {names[name] for name in names if name.endswith(("_token_id", "_token_index")) and name not in TEXT_TOKENS}
    ids = torch.randint(size, (BATCH, TOKENS), generator=generator, device="cpu")
    if others:
        text = torch.tensor([i for i in range(min(size, 1024)) if i not in others], device="cpu")
        ids = text[ids % len(text)]
    return ids.to(next(model.parameters()).device)


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set training or eval mode in all of `module` within the context, and restore each sub-module's mode after it."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        for m, value in modes:
            m.training = value


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of these tensors after the context."""
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
