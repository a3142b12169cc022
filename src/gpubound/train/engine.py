"""How several GPUs share a run, chosen by memory and said in one line."""

import torch
from torch import nn

from ..parallel import Ranks
from ..trace import notice
from ..words import readable
from .precision import precision as precision_named
from .recipe import Recipe
from .recompute import blocks_of

SHARE = 0.8  # of a GPU's memory that weights, masters, gradient and moments may take: activations need the rest


def share_out(recipe: Recipe, model: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """Replicas, or each weight's rows dealt to the ranks: what the recipe says, or what fits. Says which, and what it takes."""
    if ranks.alone:
        if recipe.parallel == "fsdp":
            notice("parallel: fsdp: there is one process, so it holds the whole model.")
        return
    numbers = precision_named(recipe.precision_on(device))
    layout = recipe.numbers.lay_out(model, numbers)
    need = sum(layout.bytes(numbers.masters).values()) + recipe.numbers.moment_bytes(layout)
    who, what = "GPU" if device.type == "cuda" else "rank", "of weights, gradient and moments"
    has = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory)) if device.type == "cuda" else None
    of = "" if has is None else f", {need / has:.0%} of its {readable(has)}"
    too_much = recipe.parallel == "auto" and has is not None and need > SHARE * has
    if recipe.parallel != "fsdp" and not too_much:
        notice(f"parallel: ddp: each of {ranks.world} {who}s holds {readable(need)} {what}{of}.")
        return
    why = f", because a replica would hold {readable(need)} of them{of}" if too_much else ""
    notice(f"parallel: fsdp: each of {ranks.world} {who}s holds its rows of every weight, and their gradient and moments{why}.")
    if recipe.budget is not None:
        raise ValueError(
            f"recompute: got {recipe.recompute!r}, a budget, which is tried on a whole model, and this one is sharded; give "
            f"cheap, none, blocks or a number of blocks."
        )
    from ..parallel.sharded import shard  # a second's import, for those who shard

    shard(model, blocks_of(model), ranks, numbers.dtype)
