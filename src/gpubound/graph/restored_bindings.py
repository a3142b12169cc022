"""Restore each attribute, item or name that a refused function bound to another tensor.

An object whose tensors were exchanged gets all of its attributes back, for they belong together: a table and the length that it
was made for. Objects in which only numbers changed are not restored: the number may be another component's count.
"""

import types
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .reachable import closed, names_in

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)
EMPTY = types.CellType()  # of a name that has no value yet: equal to all such cells, and to no other
_DEEPEST = 3  # of dicts, lists and tuples in one another: an optimizer's state has two


class Bindings:
    """Bindings of the objects in `nodes`, which a function reaches, and of the names of `functions`."""

    def __init__(self, nodes: Iterable[Any], functions: Iterable[types.FunctionType]) -> None:
        self._dicts = [(place, dict(place)) for node in nodes for place in _dicts(node)]
        self._lists = [(node, list(node)) for node in nodes if isinstance(node, list)]
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for function in functions:
            self._cells += [(cell, cell.cell_contents) for cell in function.__closure__ or () if cell != EMPTY]
            there = function.__globals__
            self._globals += [(there, name, there[name]) for name in names_in(function.__code__) & there.keys()]

    def put_back(self) -> None:
        for place, before in self._dicts:
            if any(_exchanged(place.get(key), before.get(key)) for key in {**before, **place}):
                for key in [key for key in place if key not in before]:
                    del place[key]
                place.update(before)
        for items, were in self._lists:
            if any(_exchanged(*pair) for pair in zip_longest(items, were)):
                items[:] = were
        for cell, contents in self._cells:
            if cell == EMPTY or _exchanged(cell.cell_contents, contents):
                cell.cell_contents = contents
        for names, name, value in self._globals:
            if _exchanged(names.get(name), value):
                names[name] = value


def _dicts(node: Any) -> Iterator[dict]:
    """Yield the dicts of an object that the walk traverses. Parameters are left out: sharding exchanges them repeatedly."""
    if isinstance(node, dict):
        yield node
    elif isinstance(node, nn.Module):
        yield vars(node)
        yield vars(node).get("_buffers", {})
    elif not isinstance(node, (Tensor, torch.optim.Optimizer, list, tuple, *_FUNCTIONS)) and not closed(node):
        yield from [vars(node)] if hasattr(node, "__dict__") else ()


def _exchanged(now: Any, then: Any) -> bool:
    return now is not then and (_holds(now) or _holds(then))


def _holds(value: Any, depth: int = 0) -> bool:
    """Return whether the value contains a tensor."""
    if depth < _DEEPEST and isinstance(value, dict | list | tuple):
        return any(_holds(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)
