"""Conversions that change nothing, such as `x.to(device)` of what lies there. They dispatch no op, so that no mode sees them.

Each costs its host some time and the device none. A module counts once, with the time that going through its parameters takes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import local
from typing import Any

import torch

from .rows import LedgerRow
from .site import TORCH, Place, here, owner
from .unseen import replaced

CONVERSIONS = ("to", "cuda", "float", "half", "bfloat16")


class _Inside(local):
    """The conversion of a module that this thread is in: whether any tensor of it has changed."""

    changed: bool | None = None


@contextmanager
def unchanged() -> Iterator[dict[tuple[str, Place], LedgerRow]]:
    """Inside, a row of kind "noop" for each line of the user's that converts what needs no conversion."""
    rows: dict[tuple[str, Place], LedgerRow] = {}
    inside = _Inside()
    with ExitStack() as stack:
        for name in CONVERSIONS:
            stack.enter_context(replaced(torch.Tensor, name, functools.partial(_of_tensors, name, rows, inside)))
            stack.enter_context(replaced(torch.nn.Module, name, functools.partial(_of_modules, name, rows, inside)))
        yield rows


def _of_tensors(name: str, rows: dict, inside: _Inside, original: Callable) -> Callable:
    @functools.wraps(original)
    def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(tensor, *args, **kwargs)
        took = time.perf_counter() - began
        if inside.changed is not None:
            inside.changed |= result is not tensor
        elif result is tensor:
            _add(rows, name, took)
        return result

    return converted


def _of_modules(name: str, rows: dict, inside: _Inside, original: Callable) -> Callable:
    @functools.wraps(original)
    def converted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer, inside.changed = inside.changed, False
        began = time.perf_counter()
        try:
            result = original(module, *args, **kwargs)
            took = time.perf_counter() - began
            if outer is None and not inside.changed:
                _add(rows, name, took)
        finally:
            inside.changed = None if outer is None else outer or inside.changed
        return result

    return converted


def _add(rows: dict, name: str, seconds: float) -> None:
    place = here()
    if place.site is None or (place.via is not None and owner(place.via.file) is not TORCH):
        return  # a library's own, which the user cannot mend
    row = rows.setdefault((name, place), LedgerRow("noop", f".{name}()", place))
    row.count += 1
    row.ms += 1e3 * seconds
