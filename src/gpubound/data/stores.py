"""Stores: where a feed's batches come from. This module has those that need no copy a step: direct and resident.

Resident batches are uploaded once and served every epoch without a clone, which would cost a copy a step. A write into one is
detected instead: torch's version counters are compared before and after each use (about 0.1 µs a leaf), and the error names the
leaf. Containers are rebuilt each time, so removing a key from a batch changes nothing. The counters do not see writes through
`.data`, `numpy()`, or a custom kernel that does not tell autograd.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import DataError
from ..trace import count
from .leaves import Padding, Parcel, flatten, name, pack
from .source import BatchList, Items, Source


class _End:
    """The end of an epoch, in place of a batch. Compared by identity: tensors would compare their elements."""

    def __eq__(self, other: object) -> bool:
        return self is other


END = _End()


@dataclass(frozen=True)
class Served:
    """A batch with the counts of its leaves: resident in the store, on the device before, or copied."""

    batch: Any
    resident: int = 0
    passed: int = 0
    copied: int = 0
    bytes: int = 0
    waited: float = 0.0  # seconds for the source
    held_back: float = 0.0  # seconds for the device to catch up


def count_copied(size: int) -> None:
    if size:
        count("h2d_bytes", size)


class Store:
    mode: str
    length: int | None  # batches in an epoch

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        """Yield the batches of an epoch from number `start` on."""
        raise NotImplementedError

    def check_available(self) -> None:
        """Raise if no batch can be served now."""


class Direct(Store):
    """A source whose batches need no copy, as on a CPU. Single leaves on another device are moved."""

    mode = "direct"

    def __init__(self, source: Source, device: torch.device, padding: Padding):
        self.source, self.device, self.padding = source, device, padding
        self.length = source.length

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        batches = self.source.read(epoch, start)
        while True:
            began = time.perf_counter()
            if (batch := next(batches, END)) is END:
                return
            waited = time.perf_counter() - began
            parcel = pack(batch, self.device, self.padding)
            for i, _ in parcel.copied:
                parcel.tree.leaves[i] = parcel.tree.leaves[i].to(self.device)
            batch = parcel.tree.rebuild(parcel.tree.leaves)
            yield Served(batch, 0, parcel.passed, len(parcel.copied), parcel.payload, waited)


class _GuardedBatch:
    """A resident batch with the version counters of its leaves."""

    def __init__(self, parcel: Parcel, guard: bool):
        self.tree, self.resident, self.passed = parcel.tree, len(parcel.copied), parcel.passed
        # Inference tensors have no version counter.
        self.watched = [(i, leaf) for i, leaf in self.tree.tensors() if guard and not leaf.is_inference()]
        self.versions = self._versions()
        self.last_use = "before its first use"

    def _versions(self) -> list[tuple[int, bool]]:
        return [(leaf._version, leaf.requires_grad) for _, leaf in self.watched]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose tensors start new version counters."""
        vars(self).update(state)
        self.versions = self._versions()

    def serve(self, epoch: int, number: int) -> Served:
        self.check_unwritten()
        self.last_use = f"in epoch {epoch}, batch {number}"
        return Served(self.tree.rebuild(self.tree.leaves), self.resident, self.passed)

    def check_unwritten(self) -> None:
        versions = self._versions()
        if versions == self.versions:
            return
        for (i, _), before, after in zip(self.watched, self.versions, versions):
            if before != after:
                change = "was written to in place" if before[0] != after[0] else "had requires_grad set"
                raise DataError(
                    f"feed: {name(self.tree.paths[i])} {change} {self.last_use}; a resident batch is served again every epoch "
                    f"and must not change: write to a clone of it, or pass mode='ring'."
                )


class Resident(Store):
    """A list of batches on the device."""

    mode = "resident"

    def __init__(self, source: BatchList, device: torch.device, padding: Padding, guard: bool):
        self.source, self.length = source, source.length
        unique = {id(batch): batch for batch in source.batches}  # a batch that is listed several times is stored once
        stored = {key: _GuardedBatch(_uploaded(batch, device, padding), guard) for key, batch in unique.items()}
        self.batches = [stored[id(batch)] for batch in source.batches]

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        for number, i in enumerate(self.source.order(epoch).tolist()[start:], start):
            yield self.batches[i].serve(epoch, number)
            self.batches[i].check_unwritten()


def _uploaded(batch: Any, device: torch.device, padding: Padding) -> Parcel:
    """Return the batch with every leaf on the device."""
    parcel = pack(batch, device, padding)
    with torch.inference_mode(False):  # a tensor made inside inference_mode would have no version counter
        for i, _ in parcel.copied:
            parcel.tree.leaves[i] = parcel.tree.leaves[i].detach().to(device)
    count_copied(parcel.payload)
    return parcel


class ResidentItems(Store):
    """Single items stacked on the device; a batch is one gather a leaf, in an order that the device computes."""

    mode = "resident"

    def __init__(self, source: Items, device: torch.device, padding: Padding):
        self.source, self.device, self.padding = source, device, padding
        self.length = source.length
        self.tree = _uploaded(_stacked(source), device, Padding()).tree

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        size, order = self.source.batch_size, self.source.order(epoch, self.device)
        for number in range(start, self.source.length):
            rows = order[number * size : (number + 1) * size]
            tree = replace(self.tree, leaves=[leaf.index_select(0, rows) for leaf in self.tree.leaves])
            self.padding.apply(tree)
            yield Served(tree.rebuild(tree.leaves), resident=len(tree.leaves))


class CannotStay(Exception):
    """The reason why a source cannot be resident."""


def _stacked(source: Items) -> Any:
    """Return all items as one batch, or raise CannotStay."""
    if isinstance(source.items, TensorDataset):
        return list(source.items.tensors)  # as default_collate returns them
    try:
        batch = source.collate([source.items[i] for i in range(len(source.items))])
    except (RuntimeError, TypeError) as error:
        raise CannotStay(f"its items cannot be stacked ({str(error).splitlines()[0]})") from error
    if any(not isinstance(leaf, Tensor) or leaf.dim() == 0 for leaf in flatten(batch).leaves):
        raise CannotStay("its items hold more than tensors and numbers")
    return batch


def bytes_needed(batches: Sequence[Any], device: torch.device, padding: Padding) -> int:
    """Return the bytes of an upload of `batches`, each counted once."""
    return sum(pack(batch, device, padding).payload for batch in {id(batch): batch for batch in batches}.values())


def item_bytes_needed(source: Items, device: torch.device) -> int:
    """Return the bytes of an upload of the items, all of the size of the first: others cannot be stacked."""
    if isinstance(source.items, TensorDataset):
        return pack(list(source.items.tensors), device, Padding()).payload
    return pack(source.collate([source.items[0]]), device, Padding()).payload * len(source.items)
