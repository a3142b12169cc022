"""The random numbers of a run's ranks: each has its own, which a checkpoint keeps, and rank 0 those of a run that is alone.

Dropout and the noise of diffusion are drawn from them. The first weights are not: they come before, alike on every rank.
"""

import torch
from torch import Tensor

from ..distributed import Ranks
from ..trace import notice

MIXED = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: ranks and steps one apart get seeds far apart
SEEDS = (1 << 63) - 1


def seed_ranks(ranks: Ranks, seed: int, step: int = 0) -> None:
    """Give every rank but the first random numbers of its own."""
    if not ranks.first:
        torch.manual_seed((seed + MIXED * (ranks.rank + (step << 20))) & SEEDS)


def states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """The state of every rank's generators, by name, for a checkpoint. Waits for all ranks, for no device."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {_name(kind, rank): state for rank, found in enumerate(ranks.gather(own)) for kind, state in found.items()}


def restore(tensors: dict[str, Tensor], ranks: Ranks, device: torch.device, seed: int, step: int) -> None:
    """This rank's generators as `states` has them. A rank that had none then begins anew."""
    names = [kind for kind in ("cpu", "cuda") if _name(kind, ranks.rank) in tensors]
    if "cpu" not in names:
        seed_ranks(ranks, seed, step)
    else:
        torch.set_rng_state(tensors[_name("cpu", ranks.rank)])
    if device.type == "cuda" and "cuda" in names:
        torch.cuda.set_rng_state(tensors[_name("cuda", ranks.rank)], device)
    saved = sum(name.startswith("cpu") for name in tensors)
    if saved != ranks.world:
        fresh = f"; ranks from {saved} on draw dropout and noise anew" if saved < ranks.world else ""
        notice(f"resume: saved by {saved} rank{'s'[: saved != 1]}, goes on with {ranks.world}{fresh}.")


def _name(kind: str, rank: int) -> str:
    return f"{kind}.{rank}" if rank else kind
