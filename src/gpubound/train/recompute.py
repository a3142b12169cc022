"""Activation checkpointing: a block keeps only its input and computes the rest again in backward.

A third more work for a fraction of the memory: for every block, for the first few, or for as few as keep the measured peak
within a budget. It is the first blocks that recompute, because backward comes to them last: by then what the others kept has
been given back. "cheap" leaves the blocks alone: our layers compute norms and gated activations again (layers/recompute.py),
"none" not even those.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import DeviceError
from ..layers.recompute import KEEP_ALL, recompute_from, switch
from ..trace import notice
from ..words import byte_count, readable

MODES = ("cheap", "none", "blocks")


def parse(recompute: str) -> tuple[str, int]:
    """(one of MODES, 0), ("count", blocks) or ("budget", bytes).

    >>> parse("12"), parse("40 GB")
    (('count', 12), ('budget', 40000000000))
    """
    if recompute in MODES:
        return recompute, 0
    if recompute.isdecimal():
        return "count", int(recompute)
    budget = byte_count(recompute)
    if budget is None:
        raise ValueError(
            f"recompute: got {recompute!r}, wanted cheap, none, blocks, a number of blocks, or the bytes that a step may take, "
            f"as in '40 GB'."
        )
    return "budget", budget


def recompute_as(model: nn.Module, how: str | int) -> Callable[[], None]:
    """Let backward compute again what `how` says, as TrainStep takes it; returns what undoes it."""
    way, count = parse(str(how))
    if way == "budget":
        raise ValueError(
            f"recompute: got {how!r}, wanted cheap, none, blocks or a number of blocks; for a budget of bytes call "
            "gpubound.train.recompute.fit_blocks first, which tries how many blocks it takes."
        )
    if way == "cheap":
        return lambda: None
    return recompute_from(model, KEEP_ALL) if way == "none" else recompute_blocks(model, count if way == "count" else None)


def recompute_blocks(model: nn.Module, count: int | None = None) -> Callable[[], None]:
    """Switch it on for every block of `model`, or for the first `count` of them alone; returns what undoes it."""
    # Dropout must drop the same elements twice. Only then is the generator's state kept: a captured step cannot read it.
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=drops_out(model))
    ready, blocks = _ready(model), blocks_of(model)
    if count is not None and not 0 <= count <= len(blocks):
        raise ValueError(f"recompute: got {count} blocks, the model has {len(blocks)}; give at most so many.")
    if not ready:
        return switch((block, {"forward": partial(again, block.forward)}) for block in blocks[:count])
    chosen = {id(module) for module in (ready if count is None else blocks[:count])}
    on = {"_gradient_checkpointing_func": again}
    return switch((module, on | {"gradient_checkpointing": id(module) in chosen}) for module in ready)


def fit_blocks(model: nn.Module, rehearse: Callable[[], Any], budget: int, device: torch.device) -> int:
    """How many of the first blocks must recompute for the peak of `rehearse()`, a forward and backward, to fit `budget` bytes.

    Found by trying, log2 of the number of blocks times. Nothing is left switched on. The peak counts weights and all.
    """
    most, peaks = len(blocks_of(model)), dict[int, int]()

    def fits(count: int) -> bool:
        undo = recompute_blocks(model, count)
        try:
            peaks[count] = peak_bytes(rehearse, device)
        except torch.OutOfMemoryError:
            return False
        finally:
            undo()
        return peaks[count] <= budget

    if not fits(most):
        raise DeviceError(
            f"recompute: with all {most} blocks recomputed a step still needs more than {readable(budget)}; "
            f"take a smaller micro-batch, shorter rows or a larger budget."
        )
    count = bisect_left(range(most), True, key=fits)
    notice(f"recompute: {count} of {most} blocks; {readable(peaks[count])} at the peak of a step, of {readable(budget)}.")
    return count


def peak_bytes(rehearse: Callable[[], Any], device: torch.device) -> int:
    """The most that was allocated on the GPU while `rehearse` ran."""
    if device.type != "cuda":
        raise ValueError(
            f"recompute: a byte budget needs a GPU, whose allocator measures the peak, and this runs on {device}; "
            f"take cheap, none, blocks, or a number of blocks."
        )
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    rehearse()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


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


def _ready(model: nn.Module) -> list[nn.Module]:
    """What follows Hugging Face's protocol, as our own blocks do. Hugging Face marks the model around its blocks, too."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What there is to recompute."""
    return [module for module in _ready(model) if len(_ready(module)) == 1] or find_blocks(model)
