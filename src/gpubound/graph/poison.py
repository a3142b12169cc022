"""NaN where nothing should be read: a graph that looks at what it was not given then shows it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .reach import storage_key


def spoil(tensor: Tensor) -> None:
    """NaN into a floating tensor. Others, which may be addresses, get their own first value everywhere: it is in range."""
    tensor = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.numel():
        tensor.copy_(tensor.reshape(-1)[:1].clone().expand(tensor.numel()).reshape(tensor.shape))


def fill_results(outputs: Any, gradients: Sequence[Tensor], foreign: set[int]) -> None:
    """Spoil the outputs and gradients that lie in the graph's own memory, not those that are views of inputs or state."""
    for leaf in [*tree_leaves(outputs), *gradients]:
        if isinstance(leaf, Tensor) and storage_key(leaf) not in foreign:
            floating = leaf.is_floating_point() or leaf.is_complex()
            leaf.detach().fill_(float("nan") if floating else 119)  # 119 fits every integer, and is True


class Poison:
    """What poison=True does around every replay of one captured function."""

    def __init__(
        self,
        buffers: list[Tensor],
        outputs: Any,
        gradients: list[Tensor],
        foreign: set[int],
        pool: Any,
        device: torch.device,
    ) -> None:
        self._buffers, self._outputs, self._gradients, self._foreign = buffers, outputs, gradients, foreign
        self._pool, self._device = pool, device

    def before(self) -> None:
        """Outputs and gradients that a replay must write, and what is free in the graph's pool."""
        fill_results(self._outputs, self._gradients, self._foreign)
        scribble(self._pool, self._device)

    def after(self) -> None:
        """The static inputs: the next call must bring its own."""
        for buffer in self._buffers:
            spoil(buffer)


def scribble(pool: Any, device: torch.device) -> int:
    """0xFF into every free block of a graph's pool, which is NaN in every floating dtype. Returns the number of bytes.

    A block is free between replays: whatever a replay reads from it, it must have written there before.
    """
    if pool is None or device.type != "cuda":
        return 0
    total = 0
    for address, size in _free_blocks(pool, device):
        torch.as_tensor(_Raw(address, size), device=device).fill_(255)
        total += size
    return total


def _free_blocks(pool: Any, device: torch.device) -> Iterable[tuple[int, int]]:
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) == tuple(pool) and segment["device"] == device.index:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    yield block["address"], block["size"]


class _Raw:
    """Device memory at an address, in the form that torch.as_tensor takes without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
