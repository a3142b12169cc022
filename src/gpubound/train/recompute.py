"""Activation checkpointing: a block keeps only its input and computes the rest again in backward.

It costs a third more work and saves most of the memory, for every block or the first few. The first blocks recompute because
backward reaches them last, when the activations of the others have been freed. With "cheap", only gpubound's layers compute
norms and gated activations again (layers/linear_product.py); with "none", nothing is recomputed.
"""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..layers.linear_product import KEEP_ALL
from ..models.registry import switch

MODES = ("cheap", "none", "blocks")


def parse(recompute: str | int) -> tuple[str, int]:
    """Return (one of MODES, 0) or ("count", blocks).

    >>> parse("blocks"), parse("12")
    (('blocks', 0), ('count', 12))
    """
    if recompute in MODES:
        return str(recompute), 0
    if str(recompute).isdecimal():
        return "count", int(recompute)
    raise ValueError(f"recompute: got {recompute!r}, wanted cheap, none, blocks or a number of blocks.")


def recompute_as(model: nn.Module, how: str | int) -> Callable[[], None]:
    """Switch on what `how` says, as TrainStep takes it, and return a function that undoes it."""
    mode, count = parse(how)
    if mode == "cheap":
        return lambda: None
    return recompute_from(model, KEEP_ALL) if mode == "none" else recompute_blocks(model, count if mode == "count" else None)


def recompute_from(model: nn.Module, least: float) -> Callable[[], None]:
    """Let the parts of `model` recompute results of `least` bytes and more. Return a function that undoes it."""
    return switch((part, {"recompute_bytes": least}) for part in model.modules() if hasattr(part, "recompute_bytes"))


def recompute_blocks(model: nn.Module, count: int | None = None) -> Callable[[], None]:
    """Checkpoint every block of `model`, or the first `count` of them; return a function that undoes it."""
    # Dropout must drop the same elements twice. Only then is the RNG state saved: a captured step cannot read it.
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=drops_out(model))
    ready, blocks = _ready(model), blocks_of(model)
    if count is not None and not 0 <= count <= len(blocks):
        raise ValueError(f"recompute: got {count} blocks, the model has {len(blocks)}; give at most so many.")
    if not ready:
        return switch((block, {"forward": partial(again, block.forward)}) for block in blocks[:count])
    chosen = {id(module) for module in (ready if count is None else blocks[:count])}
    on = {"_gradient_checkpointing_func": again}
    return switch((module, on | {"gradient_checkpointing": id(module) in chosen}) for module in ready)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost lists of two or more modules of one class that have parameters."""
    for module in model.modules():
        children = list(module.children())
        alike = len(children) > 1 and len({type(m) for m in children}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and next(module.parameters(), None) is not None:
            return children
    raise ValueError(
        f"recompute='blocks': {type(model).__name__} has no list of blocks of one class (nn.ModuleList, nn.Sequential); "
        f"leave it out, or checkpoint inside the model."
    )


def drops_out(model: nn.Module) -> bool:
    """Return whether any module has dropout."""
    rates = ("p", "dropout", "attention_dropout")
    return any(isinstance(rate := getattr(m, name, None), float) and rate > 0 for m in model.modules() for name in rates)


def _ready(model: nn.Module) -> list[nn.Module]:
    """Return the modules with Hugging Face's protocol, as gpubound's blocks. Hugging Face marks the model around them, too."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that can be recomputed."""
    return [module for module in _ready(model) if len(_ready(module)) == 1] or find_blocks(model)
