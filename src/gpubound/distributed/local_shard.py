"""Local part of a tensor: all of it, or the shard that FSDP2 or another DTensor layout left to this rank."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layers.linear_product import any_sharded as any_sharded, full_tensor, is_sharded as is_sharded
from .ranks import Ranks


@dataclass(frozen=True)
class LocalShard:
    """Tensor `local` at `offsets` of a tensor of `shape`."""

    local: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.local.shape))

    def moved(self, local: Tensor) -> "LocalShard":
        """Return the same shard in other memory."""
        return replace(self, local=local)


def local_shard_of(tensor: Tensor) -> LocalShard:
    """Return the local shard of a tensor; a plain tensor is one shard."""
    if not is_sharded(tensor):
        return LocalShard(tensor.detach(), tensor.shape, (0,) * tensor.dim())
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return LocalShard(tensor.detach().to_local(), tensor.shape, tuple(chunk.offsets))  # type: ignore[attr-defined]


def gathered(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor by name, gathered from its shards. All ranks must iterate over all of them."""
    for name, tensor in state.items():
        yield name, full_tensor(tensor.detach())


def export(save: Callable[[Iterator[tuple[str, Tensor]]], object], state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Call `save` on the first rank with the state's tensors, gathered individually. All ranks call it; none holds more than
    `save` keeps."""
    weights = gathered(state)

    def work() -> None:
        try:
            if ranks.first:
                save(weights)
        finally:  # every rank takes part in every gather, also where the first has failed
            deque(weights, maxlen=0)

    ranks.together(work)
