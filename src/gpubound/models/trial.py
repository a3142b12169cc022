"""What modules are tried with: made-up hidden states and tokens, the same at every call and in every dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import LMLoss
from .placing import Case

BATCH, TOKENS = 2, 16


def noise(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Unit normal numbers, the same on every device and dtype, drawn aside from the user's random state."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(like.device, like.dtype)


def rounded_noise(shape: tuple[int, ...], own: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rounded to the module's own dtype, whatever dtype it is wanted in: every run reads the same numbers."""
    return noise(shape, torch.empty(0, device=device, dtype=own)).to(dtype)


def random_case(module: nn.Module, shape: tuple[int, ...]) -> Case:
    own, device = dtype_and_device(module)

    def case(dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        return rounded_noise(shape, own, dtype, device), {}

    return case


def dtype_and_device(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    p = next(module.parameters(), torch.empty(0))
    return p.dtype, p.device


def reads_tokens(model: Any) -> bool:
    """A Hugging Face model of text, read left to right: it can be fed made-up tokens."""
    config = getattr(model, "config", None)
    return (
        getattr(model, "main_input_name", None) == "input_ids"
        and hasattr(model, "get_input_embeddings")
        and hasattr(config, "vocab_size")
        and not getattr(config, "is_encoder_decoder", False)
    )


def made_up(model: Any) -> Tensor:
    """Token ids to feed it, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    words = model.lm_head.out_features if isinstance(getattr(model, "lm_head", None), LMLoss) else model.config.vocab_size
    ids = torch.randint(words, (BATCH, TOKENS), generator=generator, device="cpu")
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
