"""What ranks that each hold all weights must have in common: the same parameters at the start, and so after every step.

A step's sums of gradients have the same bits on every rank, and the update computes with these alone. So the weights are sent
once, at the start, and stay the same without being sent again. `assert_alike` is the proof that a run asks for now and then.
"""

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError
from ..parallel import Ranks
from .flat_buffers import FlatLayout


def check_replicas(layout: FlatLayout, ranks: Ranks) -> None:
    """ValueError, on every rank, where one has other parameters than the first."""
    mine = [f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}" for slot in layout.slots]
    first = ranks.of_first(mine)
    odd = next((f"{a} where rank 0 has {b}" for a, b in zip([*mine, "nothing"], [*first, "nothing"]) if a != b), None)
    for rank, found in enumerate(ranks.gather(odd)):
        if found is not None:
            raise ValueError(
                f"parameters: rank {rank} has {found}; make the same model, and freeze the same of it, on every rank."
            )


def settings(name: str, chosen: Any) -> dict[str, Any]:
    """What ranks must have been given alike of an optimizer or a schedule, by name. Functions cannot be compared."""
    found = {name: type(chosen).__name__}
    if is_dataclass(chosen):
        for key, value in vars(chosen).items():
            found |= settings(f"{name}.{key}", value) if is_dataclass(value) else {f"{name}.{key}": value}
    else:  # a torch optimizer, which has been made
        groups = chosen.optimizer.param_groups
        found |= {f"{name} (group {i}).{key}": value for i, group in enumerate(groups) for key, value in group.items()}
    return {key: value for key, value in found.items() if isinstance(value, int | float | str | tuple | None)}


@torch.no_grad()
def begin_alike(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """Give every rank the first one's values of these, and random numbers of its own.

    Two ranks with one seed would drop out the same elements and draw the same noise. A captured step draws from the same
    generator, which torch gives it anew at each replay, so a seed or a state that is set later holds there, too.
    """
    for _, tensor in named:
        ranks.spread(tensor)
    seed = ranks.of_first(torch.initial_seed())
    if not ranks.first:
        torch.manual_seed((seed + ranks.rank) % (1 << 63))


@torch.no_grad()
def assert_alike(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> None:
    """RankError, on every rank, with the first tensor in which one has other bits than the first rank. Waits for the device."""
    named = list(named)
    mine = _read([_bits(tensor) for _, tensor in named])
    first = ranks.of_first(mine)
    odd = next((name for (name, _), a, b in zip(named, mine, first) if a != b), None)
    for rank, name in enumerate(ranks.gather(odd)):
        if name is not None:
            raise RankError(
                f"rank {rank} has other values in {name} than rank 0, and every rank should have the same; go on from a "
                f"checkpoint before this step, and look for what writes weights on one rank alone."
            )


def _read(scalars: list[Tensor]) -> list[int]:
    """Their values, with one wait for each device: a part of a state lies on the host."""
    values = [0] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        there = [number for number, scalar in enumerate(scalars) if scalar.device == device]
        for number, value in zip(there, torch.stack([scalars[number] for number in there]).tolist()):
            values[number] = value
    return values


def _bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as whole numbers: another value changes it, whatever else is in there, a NaN too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(kinds[tensor.itemsize]).sum(dtype=torch.int64)
