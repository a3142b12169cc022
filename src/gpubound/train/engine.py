"""How several GPUs share a run, chosen by memory and said in one line."""

from collections.abc import Callable

import torch
from torch import nn

from ..parallel import Ranks
from ..trace import notice
from ..words import readable
from .flat_buffers import counted
from .muon import numbers_by_rule
from .precision import precision as precision_named
from .recipe import Recipe

SHARE = 0.8  # of a GPU's memory that weights, masters, gradient and moments may take: activations need the rest


def deals_rows(recipe: Recipe, outline: Callable[[], nn.Module], device: torch.device, ranks: Ranks) -> bool:
    """Whether each weight's rows are dealt to the ranks, or each holds a replica: what the recipe says, or what fits. Says
    which, and what it takes.

    outline  makes the model on the meta device: nobody has room for it yet
    """
    if ranks.alone:
        if recipe.parallel == "fsdp":
            notice("parallel: fsdp: there is one process, so it holds the whole model.")
        return False
    numbers, model = precision_named(recipe.precision_on(device)), outline()
    layout = counted(numbers.dtype, *numbers_by_rule(model, recipe.numbers))
    need = sum(layout.bytes(numbers.masters).values()) + recipe.numbers.moment_bytes(layout)
    need += 0 if recipe.adapters is None else recipe.adapters.frozen_bytes(model, numbers.dtype)
    who, what = "GPU" if device.type == "cuda" else "rank", "of weights, gradient and moments"
    has = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory)) if device.type == "cuda" else None
    of = "" if has is None else f", {need / has:.0%} of its {readable(has)}"
    too_much = recipe.parallel == "auto" and has is not None and need > SHARE * has
    if recipe.parallel != "fsdp" and not too_much:
        notice(f"parallel: ddp: each of {ranks.world} {who}s holds {readable(need)} {what}{of}.")
        return False
    why = f", because a replica would hold {readable(need)} of them{of}" if too_much else ""
    held = "every weight, and their gradient and moments" if recipe.adapters is None else "the base, and all adapters"
    notice(f"parallel: fsdp: each of {ranks.world} {who}s holds its rows of {held}{why}.")
    return True
