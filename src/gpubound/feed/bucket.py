"""Padding: batches of a few fixed shapes, so that kernels are tuned once a shape and graphs are captured once a shape.

A leaf is padded only when the caller names it with the value to pad with, because no value is right for every leaf (labels
want -100, a mask wants 0). A name is the last key of a leaf's path: "input_ids", or 0 in a tuple.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from .tree import Tree, name

Bucket = str | int | Sequence[int] | None


def bucket_size(size: int, bucket: Bucket) -> int | None:
    """The smallest size of `bucket` that holds `size`; None when the largest is too small.

    >>> bucket_size(100, "pow2"), bucket_size(100, 96), bucket_size(100, [64, 256]), bucket_size(100, None)
    (128, 192, 256, 100)
    """
    if bucket is None or size == 0:
        return size
    if isinstance(bucket, str):
        return 1 << (size - 1).bit_length()
    if isinstance(bucket, int):
        return -(-size // bucket) * bucket
    return min((wanted for wanted in bucket if wanted >= size), default=None)


@dataclass(frozen=True)
class Padding:
    """`values` {leaf name: value, or (value, dimension)}; `bucket` for that dimension; `rows` for dimension 0, where the
    last batch may have fewer."""

    values: Mapping[Any, Any] = field(default_factory=dict)
    bucket: Bucket = None
    rows: int | None = None

    def __post_init__(self) -> None:
        good = self.bucket is None or self.bucket == "pow2" or _positive(self.bucket)
        if not good and isinstance(self.bucket, Sequence) and not isinstance(self.bucket, str):
            good = len(self.bucket) > 0 and all(_positive(size) for size in self.bucket)
        if not good:
            raise ValueError(f"feed: bucket: got {self.bucket!r}, wanted 'pow2', a multiple, or a list of sizes.")
        if self.rows is not None and not _positive(self.rows):
            raise ValueError(f"feed: rows: got {self.rows!r}, wanted the number of rows of a whole batch.")
        if (self.bucket is not None or self.rows is not None) and not self.values:
            raise ValueError(
                "feed: bucket= and rows= pad only the leaves that pad= names; pass pad={'input_ids': 0, 'labels': -100} or "
                "the like."
            )

    def apply(self, tree: Tree) -> None:
        """Pad the named leaves of `tree` in its list."""
        if not self.values:
            return
        found = set()
        for i, leaf in tree.tensors():
            path = tree.paths[i]
            if path and path[-1] in self.values:
                found.add(path[-1])
                value = self.values[path[-1]]
                tree.leaves[i] = self._pad(leaf, name(path), *(value if isinstance(value, tuple) else (value, -1)))
        if missing := [key for key in self.values if key not in found]:
            there = ", ".join(name(tree.paths[i]) for i, _ in tree.tensors()) or "no tensors"
            raise ValueError(f"feed: pad: no leaf is called {missing[0]!r}; this batch has {there}.")

    def _pad(self, leaf: torch.Tensor, what: str, value: Any, dimension: int) -> torch.Tensor:
        if not -leaf.dim() <= dimension < leaf.dim():
            raise ValueError(f"feed: pad: {what} has {leaf.dim()} dimensions, wanted one numbered {dimension}; name another.")
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
        grow = [amount for now, then in zip(reversed(leaf.shape), reversed(sizes)) for amount in (0, then - now)]
        return functional.pad(leaf, grow, value=value)


def _positive(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0
