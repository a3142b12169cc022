"""The leaves of a batch: every tensor in nested dicts, lists, tuples and dataclasses, each with the key path that errors name.

numpy arrays of numbers count as tensors and become them. Strings, numbers and other plain objects are leaves that stay as
they are. An object that has its own `.to(...)` is refused: it may hold tensors that nobody here can see, and they would stay
behind in silence.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

Path = tuple[Any, ...]

_LEAF = object()


@dataclass(frozen=True, slots=True)
class Tree:
    """A batch taken apart: `rebuild(leaves)` puts new leaves into fresh containers of the same kinds."""

    leaves: list[Any]
    paths: list[Path]
    _form: Any

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        return _build(self._form, iter(leaves))

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(index, leaf) of the leaves that are tensors."""
        return ((i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))


def flatten(batch: Any) -> Tree:
    leaves: list[Any] = []
    paths: list[Path] = []
    return Tree(leaves, paths, _take_apart(batch, (), leaves, paths))


def name(path: Path) -> str:
    """The path as it is written in Python.

    >>> name(("image", 0))
    "batch['image'][0]"
    """
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _take_apart(node: Any, path: Path, leaves: list[Any], paths: list[Path]) -> Any:
    opened = _open(node, path)
    if opened is None:
        leaves.append(_as_tensor(node) if isinstance(node, np.ndarray) else node)
        paths.append(path)
        return _LEAF
    make, children = opened
    return make, [_take_apart(child, (*path, key), leaves, paths) for key, child in children]


def _open(node: Any, path: Path) -> tuple[Callable[[list[Any]], Any], list[tuple[Any, Any]]] | None:
    """How to make the container again from its children, and those children by key; None for a leaf."""
    kind = type(node)
    if kind is dict:
        keys = list(node)
        return lambda values: dict(zip(keys, values)), list(node.items())
    if kind is list or kind is tuple:
        return kind, list(enumerate(node))
    if isinstance(node, torch.Tensor | np.ndarray | str | bytes):
        return None
    if isinstance(node, Mapping):
        return _refill(node, "item", list(node)), list(node.items())
    if callable(getattr(node, "to", None)):
        raise ValueError(
            f"feed: {name(path)}: got a {kind.__name__}, whose tensors cannot be seen from outside, wanted tensors in dicts, "
            f"lists, tuples or dataclasses; return its tensors under names of their own."
        )
    if isinstance(node, tuple):
        return (kind._make if hasattr(kind, "_make") else kind), list(enumerate(node))
    if isinstance(node, list):
        return _refill(node, "item", list(range(len(node)))), list(enumerate(node))
    if is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in fields(node)]
        return _refill(node, "attribute", names), [(key, getattr(node, key)) for key in names]
    return None


def _refill(node: Any, how: str, keys: list[Any]) -> Callable[[list[Any]], Any]:
    """For containers with more to them than their children (a BatchEncoding, a frozen dataclass): copy the shell, set the
    children."""
    shell = copy.copy(node)

    def make(values: list[Any]) -> Any:
        new = copy.copy(shell)
        for key, value in zip(keys, values):
            if how == "item":
                new[key] = value
            else:
                object.__setattr__(new, key, value)
        return new

    return make


def _build(form: Any, leaves: Iterator[Any]) -> Any:
    if form is _LEAF:
        return next(leaves)
    make, children = form
    return make([_build(child, leaves) for child in children])


def _as_tensor(array: np.ndarray) -> Any:
    if array.dtype.kind not in "biufc":  # strings, objects, dates: no tensor can hold them
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())
