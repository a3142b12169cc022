"""The largest micro-batch that fits, found by trying: what a step really takes is known to nobody beforehand."""

import dataclasses
import gc
from collections.abc import Callable

import torch

from ..errors import DeviceError
from ..trace import notice
from .recipe import Recipe


def largest_micro_batch(recipe: Recipe, attempt: Callable[[Recipe], None], device: torch.device) -> Recipe:
    """`recipe` with the largest micro-batch for which `attempt` does not run out of memory, and as many tokens a step.

    Only divisors of the rows of a step are tried, largest first, so that accumulation makes up for the rest exactly.
    """
    rows = recipe.micro_batch * recipe.accumulate
    for size in (n for n in range(rows, 0, -1) if rows % n == 0):
        tried = dataclasses.replace(recipe, micro_batch=size, accumulate=rows // size)
        fits = _fits(tried, attempt)
        gc.collect()  # a step and its model refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if fits:
            notice(f"auto_batch: {size} rows fit; {rows // size} micro-batches make the {rows} rows of a step.")
            return tried
    raise DeviceError(
        f"auto_batch: not even one row of {recipe.seq} tokens fits on {device}; "
        f"take shorter rows, a smaller model, or recompute=blocks."
    )


def _fits(recipe: Recipe, attempt: Callable[[Recipe], None]) -> bool:
    try:
        attempt(recipe)
    except torch.OutOfMemoryError:
        return False
    return True
