"""Memory of a run: the peaks that are predicted before it, and what would fit where the memory ran out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..device import total_bytes
from ..distributed.failures import SMALLER
from ..errors import DeviceError
from ..models.registry import is_named
from ..plan import first_that_fits, phases, step_of
from ..trace import notice
from ..train.recipe import Recipe

GIB = 1 << 30


def predict(recipe: Recipe, device: torch.device, world: int) -> dict[str, int]:
    """Print and return the peaks of the phases of a run on a GPU, of torch's allocator; nothing where they are not known."""
    if device.type != "cuda":
        return {}
    try:
        step = step_of(recipe, world)
    except ValueError as error:
        notice(f"memory: not predicted: {error}")
        return {}
    predicted = phases(step, 4 if is_named(recipe.model) and recipe.adapters is None else step.itemsize)
    if predicted:
        peaks = ", ".join(f"{phase} {size / GIB:.1f}" for phase, size in predicted.items())
        notice(f"memory: {peaks} GiB predicted, of {total_bytes(device) / GIB:.1f}.")
    return predicted


@contextmanager
def explained(recipe: Recipe, device: torch.device, world: int) -> Iterator[None]:
    """Add to an error of MemoryPhases, raised inside, the first options that would fit."""
    try:
        yield
    except DeviceError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        try:
            options = first_that_fits(recipe, world, total_bytes(device))
        except ValueError:  # the model's activations are not counted
            advice = SMALLER
        else:
            other = " or a smaller model" if recipe.lora else ", a smaller model, or lora"
            advice = f"{options} would fit" if options else f"no other step fits: take shorter rows{other}"
        raise DeviceError(f"{str(error).rstrip('.')}; {advice}.") from error.__cause__
