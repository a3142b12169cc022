"""State that depends on the ranks of a run: the RNG of each, and whether tensors are sharded.

Each rank has its own RNG state, from which dropout and the noise of diffusion are drawn; rank 0 has that of a single process.
Initial weights are drawn before, and are equal on every rank.
"""

import torch
from torch import Tensor

from ...distributed import Ranks
from ...trace import notice
from .checkpoints import Checkpoint

MIXED = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring ranks and steps get distant seeds
SEEDS = (1 << 63) - 1
MASTER, MODEL = "step.master.", "model."
SCALE = "step.scale."  # of 8-bit moments: stored by rank, so another number of ranks needs the scales of all


def seed_ranks(ranks: Ranks, seed: int, step: int = 0) -> None:
    """Seed every rank but the first differently."""
    if not ranks.first:
        torch.manual_seed((seed + MIXED * (ranks.rank + (step << 20))) & SEEDS)


def rng_states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Return the RNG states of every rank, by name. Waits for all ranks, not for the device."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {_rng_name(kind, rank): state for rank, states in enumerate(ranks.gather(own)) for kind, state in states.items()}


def restore_rng(tensors: dict[str, Tensor], ranks: Ranks, device: torch.device, seed: int, step: int) -> None:
    """Restore this rank's RNG from what `rng_states` returned; a rank without a saved state is seeded."""
    if (name := _rng_name("cpu", ranks.rank)) in tensors:
        torch.set_rng_state(tensors[name])
    else:
        seed_ranks(ranks, seed, step)
    if device.type == "cuda" and (name := _rng_name("cuda", ranks.rank)) in tensors:
        torch.cuda.set_rng_state(tensors[name], device)
    saved = sum(name.startswith("cpu") for name in tensors)
    if saved != ranks.world:
        fresh = f"; ranks from {saved} on draw dropout and noise anew" if saved < ranks.world else ""
        notice(f"resume: saved by {saved} rank{'s'[: saved != 1]}, goes on with {ranks.world}{fresh}.")


def _rng_name(kind: str, rank: int) -> str:
    return f"{kind}.{rank}" if rank else kind


def convert_tensors(checkpoint: Checkpoint, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by the names of `live`, filling those in place; other tensors are new.

    Replicas have 16-bit weights and fp32 masters. The shards of an FSDP model are fp32 and their own masters. So the fp32
    weights of one are called step.master.NAME, and those of the other model.NAME.
    """
    shapes = checkpoint.shapes()
    weights = {name: MODEL + name.removeprefix(MASTER) for name in (*shapes, *live) if name.startswith(MASTER)}
    from_masters = {m: live[w] for m, w in weights.items() if m in shapes and m not in live and w in live}
    to_masters = {w: live[m] for m, w in weights.items() if m in live and m not in shapes and w in shapes}
    fitting = {name: tensor for name, tensor in live.items() if not name.startswith(SCALE)}
    tensors = checkpoint.tensors(like=fitting, but=tuple(from_masters))
    checkpoint.read(from_masters)
    checkpoint.read(to_masters)
    return tensors | {m: live[m] for m, w in weights.items() if w in to_masters}
