"""Unwrap a model that a script has wrapped in DistributedDataParallel, for a step that sums gradients itself.

Two owners of one gradient would sum it twice, and divide it by different numbers of tokens. So the wrapper is removed, and the
step takes its process group. The wrapper's hooks have no effect in a backward whose forward did not run through the wrapper.
"""

import logging
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..trace import notice
from .ranks import ALONE, Ranks, check_ranks, ranks_of

REFUSED = {
    "FullyShardedDataParallel": "shard it with torch.distributed.fsdp.fully_shard, which keeps parameters apart",
    "DataParallel": "start a process for each GPU with torchrun, and give ranks=",
    "DistributedDataParallel": "give the model itself, or wrap the whole of it",
}


def unwrapped(model: nn.Module, ranks: Ranks) -> tuple[nn.Module, Ranks]:
    """Return the model inside DistributedDataParallel, and the wrapper's ranks if `ranks` is ALONE; return any other model
    unchanged."""
    check_ranks(ranks, "TrainStep")
    if isinstance(model, DistributedDataParallel):
        if hooks := getattr(model, "_comm_hooks", ()):
            raise ValueError(
                f"model: its DistributedDataParallel has the communication hook {hooks[0][0].__name__}, which a step that adds "
                f"up gradients by itself would not call; wrap the model without one."
            )
        kind = next(model.module.parameters()).device.type
        world = dist.get_world_size(model.process_group)
        ranks = ranks_of(model.process_group, kind) if ranks is ALONE else ranks
        if ranks.world != world:
            raise ValueError(
                f"ranks: got {ranks.world}, but the model's DistributedDataParallel has {world}; leave ranks= out to "
                f"train over these."
            )
        model = model.module
        notice(
            f"train: DistributedDataParallel is taken off the model. Its hooks are not used: gradients are summed once a "
            f"step, over {ranks.world} ranks."
        )
    for name, module in model.named_modules():
        for base in type(module).__mro__:  # matched by name: importing the classes is slow
            if base.__name__ in REFUSED and base.__module__.startswith("torch."):
                raise ValueError(
                    f"model: {name or 'it'} is a {base.__name__}, whose parameters a step cannot take over; "
                    f"{REFUSED[base.__name__]}."
                )
    return model, ranks


def tell_if_alone(ranks: Ranks) -> None:
    """Log a warning if a step has no ranks although this is one of several processes: each would train a separate model."""
    if ranks.alone and dist.is_initialized() and dist.get_world_size() > 1:
        notice(
            f"train: this is one of {dist.get_world_size()} processes, but its step has no ranks and trains alone; "
            f"give ranks=, from gpubound.distributed.join.",
            logging.WARNING,
        )


def tell_if_saved_apart(ranks: Ranks, folder: Path) -> None:
    """Log a warning if a rank other than the first saves without ranks: the first may save to the same location."""
    if ranks.alone and dist.is_initialized() and (rank := dist.get_rank()) > 0:
        notice(
            f"checkpoint: rank {rank} of {dist.get_world_size()} saves into {folder} without ranks, and would spoil what "
            f"another rank saves there; give Checkpoints ranks=, from gpubound.distributed.join, or save on rank 0 alone.",
            logging.WARNING,
        )
