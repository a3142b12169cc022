"""The leaves of a batch: every tensor in nested dicts, lists, tuples and dataclasses, with the key path that errors name.

numpy arrays of numbers become tensors. Strings, numbers and other plain objects are leaves that pass unchanged. An object with
a `.to(...)` is refused: it may hold tensors that `flatten` cannot see, which would not be copied.

Padding gives leaves a few fixed shapes, so that kernels are tuned and graphs are captured once a shape. A leaf is padded only
if the caller names it with a padding value, because no value is right for every leaf (labels need -100, a mask 0). The name is
the last key of a leaf's path: "input_ids", or 0 in a tuple.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from operator import setitem
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Path = tuple[Any, ...]
Bucket = str | int | Sequence[int] | None

ALIGN = 512  # of a leaf in the staged bytes, as of torch's allocations on a GPU


class _LEAF:
    """Marker of a leaf in a tree's structure. A class, because a copied feed must find the same object."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A flattened batch: `rebuild(leaves)` puts new leaves into new containers of the same types."""

    leaves: list[Any]
    paths: list[Path]
    _structure: Any

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        return _build(self._structure, iter(leaves))

    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        """Return (index, leaf) of the leaves that are tensors."""
        return ((i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor))


def flatten(batch: Any) -> Tree:
    leaves: list[Any] = []
    paths: list[Path] = []
    return Tree(leaves, paths, _flatten(batch, (), leaves, paths))


def name(path: Path) -> str:
    """Return the path as a Python expression.

    >>> name(("image", 0))
    "batch['image'][0]"
    """
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _flatten(node: Any, path: Path, leaves: list[Any], paths: list[Path]) -> Any:
    container = _container(node, path)
    if container is None:
        leaves.append(_as_tensor(node) if isinstance(node, np.ndarray) else node)
        paths.append(path)
        return _LEAF
    make, children = container
    return make, [_flatten(child, (*path, key), leaves, paths) for key, child in children]


def _container(node: Any, path: Path) -> tuple[Callable[[list[Any]], Any], list[tuple[Any, Any]]] | None:
    """Return a function that makes the container from new children, and its (key, child) pairs; None for a leaf."""
    kind = type(node)
    if kind is dict:
        return partial(_refilled, {}, setitem, list(node)), list(node.items())
    if isinstance(node, Tensor | np.ndarray | str | bytes):
        return None
    if isinstance(node, Mapping):
        return partial(_refilled, copy.copy(node), setitem, list(node)), list(node.items())
    if callable(getattr(node, "to", None)):
        raise ValueError(
            f"feed: {name(path)}: got a {kind.__name__}, whose tensors cannot be seen from outside, wanted tensors in dicts, "
            f"lists, tuples or dataclasses; return its tensors under separate names."
        )
    if isinstance(node, tuple):
        return (kind._make if hasattr(kind, "_make") else kind), list(enumerate(node))
    if isinstance(node, list):
        make = list if kind is list else partial(_refilled, copy.copy(node), setitem, list(range(len(node))))
        return make, list(enumerate(node))
    if isinstance(node, Set | deque) and any(isinstance(child, Tensor | np.ndarray) for child in node):
        raise ValueError(
            f"feed: {name(path)}: got a {kind.__name__} of tensors, which would stay where they are, wanted them in dicts, "
            f"lists, tuples or dataclasses."
        )
    if is_dataclass(node) and not isinstance(node, type):
        names = [part.name for part in fields(node)]
        return partial(_refilled, copy.copy(node), object.__setattr__, names), [(key, getattr(node, key)) for key in names]
    return None


def _refilled(container: Any, set_item: Callable[[Any, Any, Any], None], keys: list[Any], values: list[Any]) -> Any:
    """Return a copy of a container, which may have further state (a BatchEncoding, a frozen dataclass), with new children."""
    new = copy.copy(container)
    for key, value in zip(keys, values):
        set_item(new, key, value)
    return new


def _build(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is _LEAF:
        return next(leaves)
    make, children = structure
    return make([_build(child, leaves) for child in children])


def _as_tensor(array: np.ndarray) -> Any:
    if array.dtype.kind not in "biufc":  # strings, objects and dates, which have no dtype in torch
        return array
    is_reversed = any(stride < 0 for stride in array.strides)
    if is_reversed or not array.dtype.isnative or not array.flags.writeable:  # a tensor cannot share this memory
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def bucket_size(size: int, bucket: Bucket) -> int | None:
    """Return the smallest size of `bucket` that holds `size`; None if the largest is too small.

    >>> bucket_size(100, "pow2"), bucket_size(100, 96), bucket_size(100, [64, 256]), bucket_size(100, None)
    (128, 192, 256, 100)
    """
    if bucket is None or size == 0:
        return size
    if isinstance(bucket, str):
        return 1 << (size - 1).bit_length()
    if isinstance(bucket, int):
        return -(-size // bucket) * bucket
    return min((candidate for candidate in bucket if candidate >= size), default=None)


@dataclass(frozen=True)
class Padding:
    """Padding of leaves: `values` {leaf name: value, or (value, dimension)}; `bucket` for that dimension; `rows` for dimension
    0, of which the last batch may have fewer."""

    values: Mapping[Any, Any] = field(default_factory=dict)
    bucket: Bucket = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ValueError(
                f"feed: pad: got {self.values!r}, wanted a value for each leaf, as in {{'input_ids': 0, 'labels': -100}}."
            )
        for key, value in self.values.items():
            number, dimension = value if isinstance(value, tuple) and len(value) == 2 else (value, -1)
            if not isinstance(number, Real) or not isinstance(dimension, Integral):
                raise ValueError(f"feed: pad: {key!r}: got {value!r}, wanted a number, or (number, dimension).")
        sizes = self.bucket if isinstance(self.bucket, Sequence) and not isinstance(self.bucket, str) else [self.bucket]
        if self.bucket not in (None, "pow2") and not (sizes and all(map(_is_positive_int, sizes))):
            raise ValueError(f"feed: bucket: got {self.bucket!r}, wanted 'pow2', a multiple, or a list of sizes.")
        if self.rows is not None and not _is_positive_int(self.rows):
            raise ValueError(f"feed: rows: got {self.rows!r}, wanted the number of rows of a whole batch.")
        if (self.bucket is not None or self.rows is not None) and not self.values:
            raise ValueError(
                "feed: bucket= and rows= pad only the leaves that pad= names; pass pad={'input_ids': 0, 'labels': -100} or "
                "the like."
            )

    def apply(self, tree: Tree) -> None:
        """Pad the named leaves of `tree` in place."""
        if not self.values:
            return
        padded = set()
        for i, leaf in tree.tensors():
            path = tree.paths[i]
            if path and path[-1] in self.values:
                padded.add(path[-1])
                value = self.values[path[-1]]
                tree.leaves[i] = self._pad(leaf, name(path), *(value if isinstance(value, tuple) else (value, -1)))
        if missing := [key for key in self.values if key not in padded]:
            names = ", ".join(name(tree.paths[i]) for i, _ in tree.tensors()) or "no tensors"
            raise ValueError(f"feed: pad: no leaf is called {missing[0]!r}; this batch has {names}.")

    def _pad(self, leaf: Tensor, what: str, value: Any, dimension: int) -> Tensor:
        if not -leaf.dim() <= dimension < leaf.dim():
            raise ValueError(f"feed: pad: {what} has {leaf.dim()} dimensions, wanted one numbered {dimension}; name another.")
        if not _holds(leaf.dtype, value):
            raise ValueError(f"feed: pad: {what} is of {leaf.dtype}, which cannot hold {value!r}, wanted a value that it can.")
        wanted = bucket_size(leaf.shape[dimension], self.bucket)
        if wanted is None:
            raise ValueError(
                f"feed: {what} is {leaf.shape[dimension]} long, wanted at most {max(self.bucket)}, the largest bucket; "  # type: ignore[type-var, arg-type]
                f"add a larger bucket or cut the data."
            )
        sizes = list(leaf.shape)
        sizes[dimension] = wanted
        if self.rows is not None:
            if leaf.shape[0] > self.rows:
                raise ValueError(
                    f"feed: rows: {what} has {leaf.shape[0]} rows, wanted at most {self.rows}; raise rows= or make smaller "
                    f"batches."
                )
            sizes[0] = self.rows
        if sizes == list(leaf.shape):
            return leaf
        amounts = [amount for old, new in zip(reversed(leaf.shape), reversed(sizes)) for amount in (0, new - old)]
        return functional.pad(leaf, amounts, value=value)


def _holds(dtype: torch.dtype, value: Any) -> bool:
    """Return True if `dtype` represents `value`; torch would round it without an error."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= value <= most and int(value) == value


def _is_positive_int(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


@dataclass(frozen=True)
class Parcel:
    """A host batch with the layout of the leaves to copy in one flat buffer."""

    tree: Tree
    copied: Sequence[tuple[int, int]]  # (leaf, offset)
    size: int  # bytes of the buffer
    payload: int  # bytes of the leaves themselves
    passed: int  # leaves already on the device

    def stage(self, staged: Tensor) -> None:
        """Write the leaves into one host buffer: one copy costs less than nine small ones."""
        with torch.no_grad():
            for leaf, offset in self.copied:
                _view(staged, offset, self.tree.leaves[leaf]).copy_(self.tree.leaves[leaf])

    def unpack(self, sent: Tensor) -> Any:
        """Return the batch, with views of `sent` for the copied leaves."""
        leaves = list(self.tree.leaves)
        for leaf, offset in self.copied:
            leaves[leaf] = _view(sent, offset, leaves[leaf])
        return self.tree.rebuild(leaves)


def pack(batch: Any, device: torch.device, padding: Padding, always: bool = False) -> Parcel:
    """Lay out the leaves that are not on `device` in one buffer; with `always` all leaves."""
    tree = flatten(batch)
    padding.apply(tree)
    copied, offset, payload, passed = [], 0, 0, 0
    for i, leaf in tree.tensors():
        if leaf.device == device and not always:
            passed += 1
            continue
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
            raise ValueError(
                f"feed: got a leaf with layout {leaf.layout}, wanted plain dense tensors; send its indices and values, or put "
                f"it on the device in the source."
            )
        copied.append((i, offset))
        size = leaf.numel() * leaf.element_size()
        payload += size
        offset += -(-size // ALIGN) * ALIGN
    return Parcel(tree, copied, offset, payload, passed)


def _view(buffer: Tensor, offset: int, leaf: Tensor) -> Tensor:
    """Return the leaf's part of the buffer: channels last if the leaf is, else contiguous."""
    flat = buffer[offset : offset + leaf.numel() * leaf.element_size()].view(leaf.dtype)
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(leaf.dim())
    if memory_format is not None and leaf.is_contiguous(memory_format=memory_format):
        return flat.as_strided(leaf.shape, leaf.stride())
    return flat.view(leaf.shape)
