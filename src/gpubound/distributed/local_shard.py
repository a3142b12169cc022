"""What a process holds of a tensor: all of it, or the shard that FSDP2 or another plan of DTensors left to this rank.

Nothing here imports torch.distributed: a run alone has no need of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layers.linear_formats import is_sharded as is_sharded, whole
from .ranks import Ranks


@dataclass(frozen=True)
class LocalShard:
    """`local`, which stands at `offsets` in a whole of `shape`."""

    local: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.local.shape))

    def moved(self, local: Tensor) -> "LocalShard":
        """The same piece, in other memory."""
        return replace(self, local=local)


def local_shard_of(tensor: Tensor) -> LocalShard:
    """A plain tensor is a piece that is the whole."""
    if not is_sharded(tensor):
        return LocalShard(tensor.detach(), tensor.shape, (0,) * tensor.dim())
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return LocalShard(tensor.detach().to_local(), tensor.shape, tuple(chunk.offsets))  # type: ignore[attr-defined]


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """The same on every rank, whatever parts they hold."""
    return any(map(is_sharded, tensors))


def gathered(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by name, whole, one after the other. Where it is sharded all ranks must come to it, and each gets it."""
    for name, tensor in state.items():
        yield name, whole(tensor.detach())


def export(save: Callable[[Iterator[tuple[str, Tensor]]], object], state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """`save` on the first rank, of the state's tensors one by one. All ranks call it; none holds more than `save` keeps."""
    weights = gathered(state)

    def work() -> None:
        try:
            if ranks.first:
                save(weights)
        finally:  # every rank comes to every tensor, also where the first has failed
            deque(weights, maxlen=0)

    ranks.together(work)
