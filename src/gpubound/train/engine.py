"""How several GPUs share a run, chosen by memory and said in one line."""

import torch
from torch import nn

from ..errors import DeviceError
from ..parallel import Ranks
from ..trace import notice
from ..words import readable
from .precision import precision as precision_named
from .recipe import Recipe

SHARE = 0.8  # of a GPU's memory that weights, masters, gradient and moments may take: activations need the rest


def choose(recipe: Recipe, model: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """Say what a replica takes of each GPU; DeviceError where `auto` finds that it does not fit."""
    if ranks.alone:
        return
    numbers = precision_named(recipe.precision_on(device))
    layout = recipe.numbers.lay_out(model, numbers)
    need = sum(layout.bytes(numbers.masters).values()) + recipe.numbers.moment_bytes(layout)
    parts = f"{readable(need)} of weights, gradient and moments"
    if device.type != "cuda":
        notice(f"parallel: ddp: each of {ranks.world} ranks holds {parts}.")
        return
    has = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory))
    if recipe.parallel == "auto" and need > SHARE * has:
        raise DeviceError(
            f"parallel: each GPU would hold {parts}, and {SHARE:.0%} of its {readable(has)} may be so much; take optimizer "
            f"adamw8bit, a smaller model, or parallel: ddp to try it all the same."
        )
    notice(f"parallel: ddp: each of {ranks.world} GPUs holds {parts}, {need / has:.0%} of its {readable(has)}.")
