"""Sources: the host batches of an epoch, in an order that is a function of (seed, epoch), from any position.

`read(epoch, start)` of a source returns an iterator of batches. `steady` means that every epoch has the same batch objects, so
that they can be kept on the device. A DataLoader is not steady: its sampler and its transforms may draw again each time.

There are two shuffles, both functions of (seed, epoch), equal bit for bit on CPU and GPU.

`order` returns a whole permutation: sorted 64-bit hashes. Host-side sources use it.

`Scatter` stores no permutation. It maps index -> row one to one for any number of rows, so a batch can be drawn from a step
counter inside a captured graph. n rows form a grid of a·b with a = ⌊√n⌋; one pass rotates all n indices, then shifts every cell
along its column by an amount that depends on the row, and along its row by an amount that depends on the new column (a Feistel
network over a mixed radix). The fewer than a indices outside the grid skip the pass and are rotated into the grid by the next.
Every step is invertible, so the result is a bijection for every n, without the data-dependent loop of cycle walking, which a
graph cannot contain. Two passes are enough: for n from 10,007 to 1,048,576 the serial correlations, the 1,024-cell histograms
of index against row and of neighbours, and the count of distinct gaps are those of torch.randperm; after one pass they are not.
"""

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ..errors import DataError
from .leaves import flatten, name

PASSES = 2
KEYS = 3 * PASSES
EPOCHS = 4096  # rows in the table of keys: epoch 4096 repeats the order of epoch 0
_ALL = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# Seeds of the generators that feeds have set in loaders. Another feed over the same loader takes the same seed, so that it can
# continue at a position that the first one saved.
_SEEDS: WeakKeyDictionary[torch.Generator, int] = WeakKeyDictionary()


class Source:
    length: Any = None  # batches in an epoch; None if unknown
    steady = False
    shuffle = False  # by the feed; a loader's sampler may shuffle, too
    seed: int
    count: int  # elements that `order` permutes

    def order(self, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        return order(self.count, self.seed, epoch, device) if self.shuffle else torch.arange(self.count, device=device)

    def read(self, epoch: int, start: int) -> Iterator[Any]:
        raise NotImplementedError


class BatchList(Source):
    """A list of batches. `shuffle` permutes the batches, never their rows."""

    steady = True

    def __init__(self, batches: Sequence[Any], seed: int, shuffle: bool):
        if len(batches) == 0:
            raise ValueError(f"feed: source: got an empty {type(batches).__name__}, wanted at least one batch.")
        self.batches, self.seed, self.shuffle = batches, seed, shuffle
        self.length = self.count = len(batches)

    def read(self, epoch: int, start: int) -> Iterator[Any]:
        return (self.batches[i] for i in self.order(epoch).tolist()[start:])


class Items(Source):
    """A map dataset, or a list, of single items, collated into batches of `batch_size`."""

    def __init__(
        self, items: Any, batch_size: int, seed: int, shuffle: bool, drop_last: bool, collate: Callable[[list], Any] | None
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"feed: batch_size: got {batch_size!r}, wanted a whole number of items, 1 or more.")
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise ValueError(
                f"feed: batch_size= needs a source of single items with len() and [], got a {type(items).__name__}; "
                f"leave batch_size out if the source already yields batches."
            )
        self.items, self.batch_size, self.seed, self.shuffle = items, batch_size, seed, shuffle
        self.collate = collate or default_collate
        self.count = len(items)
        self.length = self.count // batch_size if drop_last else -(-self.count // batch_size)
        if self.length == 0:
            raise ValueError(f"feed: source: {self.count} items make no batch of {batch_size}; wanted at least one batch.")
        # Transforms of an unknown dataset may be random; tensors and a list of items do not change.
        self.steady = collate is None and (isinstance(items, list | tuple) or _is_tensors(items))

    def read(self, epoch: int, start: int) -> Iterator[Any]:
        fetch = getattr(self.items, "__getitems__", None) or (lambda indices: [self.items[i] for i in indices])
        order = self.order(epoch).tolist()
        for batch in range(start, self.length):
            yield self.collate(fetch(order[batch * self.batch_size : (batch + 1) * self.batch_size]))


def _is_tensors(items: Any) -> bool:
    return isinstance(items, TensorDataset) or (isinstance(items, Subset) and _is_tensors(items.dataset))


class Loader(Source):
    """A DataLoader. Its generators are seeded from (seed, epoch), so that its order and its workers' random draws can be
    resumed. Resuming inside an epoch reads and drops the batches before the position."""

    def __init__(self, loader: DataLoader, seed: int | None):
        generator = loader.generator or getattr(_sampler(loader), "generator", None)
        if seed is None:
            seed = 0 if generator is None else _SEEDS.get(generator, generator.initial_seed())
        self.seed = seed
        self.loader = loader
        try:
            self.length = len(loader)
        except TypeError:
            self.length = None
        if self.length == 0:
            raise ValueError("feed: source: the DataLoader has no batches, wanted at least one.")

    def read(self, epoch: int, start: int) -> Iterator[Any]:
        sampler = _sampler(self.loader)
        self.loader.generator = self._generator(epoch, 0)
        if hasattr(sampler, "generator"):
            sampler.generator = self._generator(epoch, 1)
        for part in (sampler, self.loader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if self.loader.num_workers == 0:
            return islice(self.loader, start, None)
        # The workers start here, with a collate that checks its batch: a worker's queue drops a batch that cannot be pickled,
        # and the DataLoader then waits for it without end.
        collate = self.loader.collate_fn
        self.loader.collate_fn = partial(_sendable, collate)
        try:
            return islice(iter(self.loader), start, None)
        finally:
            self.loader.collate_fn = collate

    def _generator(self, *words: int) -> torch.Generator:
        generator = torch.Generator().manual_seed(signed(mix(self.seed, *words)))
        _SEEDS[generator] = self.seed
        return generator


def _sampler(loader: DataLoader) -> Any:
    return getattr(loader.batch_sampler, "sampler", None) or loader.sampler


def _sendable(collate: Callable[[list], Any], items: list) -> Any:
    """Return the collated batch, or raise DataError if it cannot be pickled."""
    batch = collate(items)
    tree = flatten(batch)
    for path, leaf in zip(tree.paths, tree.leaves):
        if isinstance(leaf, Tensor | str | bytes | int | float | None):
            continue
        try:
            pickle.dumps(leaf)
        except Exception as error:  # a __reduce__ may raise anything
            raise DataError(
                f"feed: {name(path)}: a {type(leaf).__name__} cannot be sent from a DataLoader worker ({error}); "
                f"return tensors, numbers and strings, or set num_workers=0."
            ) from None
    return batch


class Stream(Source):
    """Any other iterable, or a function that returns one. Resuming reads and drops the batches before the position."""

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]], seed: int):
        self.source, self.seed = source, seed
        self.is_read = False

    def read(self, epoch: int, start: int) -> Iterator[Any]:
        if self.is_read and isinstance(self.source, Iterator):
            raise ValueError(
                f"feed: source: a {type(self.source).__name__} can be read once and has been, wanted batches for epoch "
                f"{epoch}; pass a list, a DataLoader, or a function that returns a fresh iterator."
            )
        self.is_read = True
        batches = self.source if isinstance(self.source, Iterable) else self.source()
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise ValueError(
                f"feed: source: the function returned a {type(batches).__name__}, wanted an iterable of an epoch's batches."
            )
        return islice(iter(batches), start, None)


def open_source(
    source: Any, batch_size: int | None, seed: int | None, shuffle: bool, drop_last: bool, collate: Callable[[list], Any] | None
) -> Source:
    """Return the Source that reads `source`. Raise ValueError for an argument without effect on it."""
    if isinstance(source, DataLoader):
        for value, name in ((batch_size, "batch_size"), (shuffle, "shuffle"), (drop_last, "drop_last"), (collate, "collate")):
            if value:
                raise ValueError(f"feed: {name}= has no effect on a DataLoader; give it to the DataLoader itself.")
        return Loader(source, seed)
    kind = type(source).__name__
    if isinstance(source, dict | str | bytes) or (isinstance(source, Tensor | np.ndarray) and batch_size is None):
        raise ValueError(
            f"feed: source: got a {kind}, wanted a list or iterable of batches, a DataLoader, a map dataset with batch_size= "
            f"or a Corpus; to serve one batch again and again pass [batch]."
        )
    if batch_size is not None:
        return Items(source, batch_size, seed or 0, shuffle, drop_last, collate)
    for value, name in ((drop_last, "drop_last"), (collate, "collate")):
        if value:
            raise ValueError(f"feed: {name}= has an effect only where the feed makes the batches; pass batch_size= too.")
    if isinstance(source, list | tuple):
        return BatchList(source, seed or 0, shuffle)
    mapped = isinstance(source, Dataset) and not isinstance(source, IterableDataset)
    if mapped or hasattr(source, "__getitems__"):  # such as Hugging Face's datasets, which iterate over single rows
        raise ValueError(f"feed: source: got the map dataset {kind} of single items; pass batch_size= to have them collated.")
    if not isinstance(source, Iterable) and not callable(source):
        raise ValueError(f"feed: source: got a {kind}, wanted a list or iterable of batches, a DataLoader or a Corpus.")
    if shuffle:
        raise ValueError(
            f"feed: shuffle=True needs a list of batches, or items and batch_size=; a {kind} yields in its own order."
        )
    return Stream(source, seed or 0)


def mix(*words: int) -> int:
    """Return a 64-bit hash of integers: `_hashes`, chained.

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    state = 0
    for word in words:
        state = int(_hashes(1, state ^ (word & _ALL), "cpu")) & _ALL
    return state


def signed(word: int) -> int:
    """Return the int64 with the same bits: torch has no arithmetic on uint64."""
    return word - (1 << 64) if word >> 63 else word


def order(n: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a permutation of range(n)."""
    return torch.argsort(_hashes(n, mix(seed, epoch), device), stable=True)


def _hashes(n: int, word: int, device: torch.device | str) -> Tensor:
    """Return n random int64: splitmix64 started at `word`. int64 products wrap like uint64 ones, on the CPU and on CUDA."""
    z = torch.arange(1, n + 1, device=device) * signed(_GOLDEN) + signed(word)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class Scatter:
    """Bijection index -> row over `n` rows, keyed by the epoch: elementwise, with static shapes and no host read."""

    def __init__(self, n: int, seed: int, device: torch.device | str = "cpu"):
        self.n = n
        self.columns = max(min(2, n), math.isqrt(n))
        self.grid_rows = n // self.columns
        self.cells = self.columns * self.grid_rows
        self.keys = _hashes(EPOCHS * KEYS, mix(seed), device).view(EPOCHS, KEYS)  # 196 kB
        self.keys[:, ::3] %= n  # the rotations; the others are salts

    def __call__(self, index: Tensor, epoch: Tensor) -> Tensor:
        """Return the rows (..., B) of `index` (..., B) in [0, n) and `epoch` (...)."""
        # index_select, because indexing with a tensor of no dimensions reads it on the host
        keys = self.keys.index_select(0, (epoch % EPOCHS).reshape(-1)).view(*epoch.shape, 1, KEYS)
        for k in range(0, KEYS, 3):
            index = self._pass(index, keys[..., k], keys[..., k + 1], keys[..., k + 2])
        return index

    def _pass(self, index: Tensor, rotation: Tensor, column_salt: Tensor, row_salt: Tensor) -> Tensor:
        rotated = (index + rotation) % self.n
        row = torch.div(rotated, self.columns, rounding_mode="floor")
        column = torch.sub(rotated, row, alpha=self.columns)
        column = (column + _noise(column_salt, row)) % self.columns
        row = (row + _noise(row_salt, column)) % self.grid_rows
        permuted = torch.add(column, row, alpha=self.columns)
        return permuted if self.cells == self.n else torch.where(rotated < self.cells, permuted, rotated)


def _noise(salt: Tensor, x: Tensor) -> Tensor:
    """Return the upper bits of a square: 30 bits and a sign, nonlinear in x."""
    z = torch.add(salt, x, alpha=signed(_GOLDEN))
    return (z * z) >> 33
