"""Batches kept on the device: uploaded once, served every epoch without a byte from the host, and never cloned.

Serving the same tensors again is only right while nobody writes into them. Cloning each batch would defend against that and
cost a copy a step; here torch's own version counters are compared before and after each use instead, which costs about 0.1 µs
a leaf, and a write is an error that names the leaf. The containers are made anew each time, so popping a key from a batch
harms nothing.

What the counters cannot see: writes through `.data`, `numpy()`, or a custom kernel that does not tell autograd.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import DataError
from .epochs import Served, Store, count_copied
from .leaves import Padding, Parcel, flatten, name, pack
from .source import BatchList, Items


class HeldBatch:
    """One resident batch under guard."""

    def __init__(self, parcel: Parcel, guard: bool):
        self.tree, self.resident, self.passed = parcel.tree, len(parcel.copied), parcel.passed
        # Inference tensors have no version counter, and in-place writes to them are their owner's stated intention.
        self.watched = [(i, leaf) for i, leaf in self.tree.tensors() if guard and not leaf.is_inference()]
        self.marks = self._look()
        self.last_use = "before its first use"

    def _look(self) -> list[tuple[int, bool]]:
        return [(leaf._version, leaf.requires_grad) for _, leaf in self.watched]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's tensors count their versions anew."""
        vars(self).update(state)
        self.marks = self._look()

    def serve(self, epoch: int, number: int) -> Served:
        self.check_unwritten()
        self.last_use = f"in epoch {epoch}, batch {number}"
        return Served(self.tree.rebuild(self.tree.leaves), self.resident, self.passed)

    def check_unwritten(self) -> None:
        now = self._look()
        if now == self.marks:
            return
        for (i, _), was, is_ in zip(self.watched, self.marks, now):
            if was != is_:
                did = "was written to in place" if was[0] != is_[0] else "had requires_grad set"
                raise DataError(
                    f"feed: {name(self.tree.paths[i])} {did} {self.last_use}; a resident batch is served again every epoch and "
                    f"must stay as it is: write to a clone of it, or pass mode='ring'."
                )


class Resident(Store):
    """A list of batches on the device."""

    mode = "resident"

    def __init__(self, source: BatchList, device: torch.device, padding: Padding, guard: bool):
        self.source, self.length = source, source.length
        once = {id(batch): batch for batch in source.batches}  # one batch listed many times is held once
        held = {key: HeldBatch(_uploaded(batch, device, padding), guard) for key, batch in once.items()}
        self.held = [held[id(batch)] for batch in source.batches]

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        for number, i in enumerate(self.source.order(epoch).tolist()[start:], start):
            yield self.held[i].serve(epoch, number)
            self.held[i].check_unwritten()


def _uploaded(batch: Any, device: torch.device, padding: Padding) -> Parcel:
    """The batch, every leaf on the device."""
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
        self.tree = _uploaded(stacked(source), device, Padding()).tree

    def serve(self, epoch: int, start: int) -> Generator[Served]:
        size, wanted = self.source.batch_size, self.source.order(epoch, self.device)
        for number in range(start, self.source.length):
            rows = wanted[number * size : (number + 1) * size]
            tree = replace(self.tree, leaves=[leaf.index_select(0, rows) for leaf in self.tree.leaves])
            self.padding.apply(tree)
            yield Served(tree.rebuild(tree.leaves), resident=len(tree.leaves))


class CannotStay(Exception):
    """Why a source cannot be resident."""


def stacked(source: Items) -> Any:
    """All items as one batch, or CannotStay."""
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
    """What uploading `batches` would take on `device`, each counted once."""
    return sum(pack(batch, device, padding).payload for batch in {id(batch): batch for batch in batches}.values())


def item_bytes_needed(source: Items, device: torch.device) -> int:
    """The same for items, taken to be all of the size of the first: others could not be stacked."""
    if isinstance(source.items, TensorDataset):
        return pack(list(source.items.tensors), device, Padding()).payload
    return pack(source.collate([source.items[0]]), device, Padding()).payload * len(source.items)
