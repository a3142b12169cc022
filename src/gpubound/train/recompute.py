"""Activation checkpointing: each block keeps only its input and computes the rest again in backward.

A third more work for a fraction of the memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

MODES = ("none", "blocks")


def recompute_blocks(model: nn.Module) -> Callable[[], None]:
    """Switch it on for every block of `model`; returns what switches it off again."""
    # Dropout must drop the same elements twice. Only then is the generator's state kept: a captured step cannot read it.
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=drops_out(model))
    ready: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if ready:  # Hugging Face's protocol, which our own blocks follow
        before = [(m, m.gradient_checkpointing, getattr(m, "_gradient_checkpointing_func", None)) for m in ready]
        for module in ready:
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, again
        return lambda: _restore(before)
    blocks = find_blocks(model)
    for block in blocks:
        block.forward = partial(again, block.forward)
    return lambda: _unwrap(blocks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of two or more modules of one class that hold parameters."""
    for module in model.modules():
        members = list(module.children())
        alike = len(members) > 1 and len({type(m) for m in members}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and next(module.parameters(), None) is not None:
            return members
    raise ValueError(
        f"recompute='blocks': {type(model).__name__} has no list of blocks of one class (nn.ModuleList, nn.Sequential); "
        f"leave it out, or checkpoint inside the model."
    )


def drops_out(model: nn.Module) -> bool:
    """True when some module drops out at random while training."""
    rates = ("p", "dropout", "attention_dropout")
    return any(isinstance(rate := getattr(m, name, None), float) and rate > 0 for m in model.modules() for name in rates)


def _restore(before: list[tuple]) -> None:
    for module, was, function in before:
        module.gradient_checkpointing, module._gradient_checkpointing_func = was, function


def _unwrap(blocks: list[nn.Module]) -> None:
    for block in blocks:
        del block.__dict__["forward"]
