"""The micro-batches of one step: taken from what the user gave, opened to their tensors, and checked before anything runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..feed import Feed
from ..feed.leaves import Path, Tree, flatten, name


def gather(given: Any, accumulate: int) -> list[Any]:
    """The micro-batches of the next step: a list of them, one batch by itself, or `accumulate` drawn from a feed or iterator.

    Fewer than `accumulate` are a ragged last window; an empty list means that an iterator had no more.
    """
    if isinstance(given, list):
        if not 1 <= len(given) <= accumulate:
            raise ValueError(
                f"step: got a list of {len(given)} micro-batches, wanted 1 to accumulate={accumulate}; "
                f"a list always holds micro-batches, one batch goes in as a tensor, a tuple or a dict."
            )
        return given
    if isinstance(given, Tensor | tuple | Mapping):
        return [given]
    if isinstance(given, Feed):
        return [given.take() for _ in range(accumulate)]
    if isinstance(given, Iterator):
        return list(islice(given, accumulate))
    raise ValueError(
        f"step: got a {type(given).__name__}, wanted a list of micro-batches, one batch (a tensor, tuple or dict), a feed, "
        f"or an iterator over batches; pass gpubound.feed(source), or keep an iter(source)."
    )


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch in two parts: its tensors, and how to put it together again."""

    tensors: list[Tensor]
    key: tuple  # equal for micro-batches of equal shapes, dtypes and constants
    tree: Tree  # None where a tensor is, (leaf,) where it is something else

    @property
    def whole(self) -> Any:
        return self.fill(self.tensors)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        return self.tree.rebuild([next(rest) if leaf is None else leaf[0] for leaf in self.tree.leaves])


def take_apart(batch: Any, device: torch.device) -> MicroBatch:
    tree = flatten(batch)
    tensors: list[Tensor] = []
    key: list[tuple] = []
    rest: list[tuple[Any] | None] = []
    for path, leaf in zip(tree.paths, tree.leaves):
        if isinstance(leaf, Tensor):
            _check_device(path, leaf, device)
            tensors.append(leaf)
            rest.append(None)
            key.append((path, leaf.shape, leaf.dtype))
        else:
            _check_constant(path, leaf)
            rest.append((leaf,))
            key.append((path, leaf))
    return MicroBatch(tensors, tuple(key), replace(tree, leaves=rest))


def _check_device(path: Path, leaf: Tensor, device: torch.device) -> None:
    if leaf.device != device:
        raise ValueError(
            f"step: {name(path)} is on {leaf.device}, the model on {device}; a copy here would make the device wait: "
            f"draw the batches from gpubound.feed(source), which copies ahead."
        )


def _check_constant(path: Path, leaf: Any) -> None:
    try:
        hash(leaf)
    except TypeError:
        raise ValueError(
            f"step: {name(path)} is a {type(leaf).__name__}, wanted tensors, numbers, strings and the like; "
            f"it could not be told whether it changed since the step was captured."
        ) from None
