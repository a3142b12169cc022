"""The modules that one call passes through, each with what it was given: what an audit tries one by one.

A part keeps copies, because calls change what they are given: a cache grows. Each trial of a part gets fresh ones.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...graph.captured import name_of
from ...watch.unseen import replaced

_SHARED = (nn.Module, str, bytes, bool, int, float, complex, type(None))


@dataclass
class AuditedPart:
    """A function or module, and what its first call was given."""

    name: str
    fn: Callable
    args: tuple
    kwargs: dict[str, Any]
    parts: list["AuditedPart"] = field(default_factory=list)
    calls: int = 1
    shared: list[str] = field(default_factory=list)  # types of arguments that cannot be copied: trials share them

    def given(self) -> tuple[tuple, dict[str, Any]]:
        """Copies of its arguments, for one trial."""
        return self._copies(self.args), self._copies(self.kwargs)

    def keep(self) -> "AuditedPart":
        """Itself, with copies of the arguments in place of the caller's own."""
        self.args, self.kwargs = self.given()
        return self

    def run(self) -> Any:
        args, kwargs = self.given()
        return self.fn(*args, **kwargs)

    def walk(self) -> Iterator["AuditedPart"]:
        """Itself and all parts inside, in the order of their calls."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def _copies(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if type(value) in (tuple, list):
            return type(value)(map(self._copies, value))
        if type(value) is dict:
            return {key: self._copies(item) for key, item in value.items()}
        if isinstance(value, _SHARED) or callable(value):
            return value
        try:
            return copy.deepcopy(value)
        except (RuntimeError, TypeError):  # it holds a lock, or a tensor that belongs to a backward pass
            self.shared.append(type(value).__name__)
            return value


def parts_of(root: AuditedPart) -> AuditedPart:
    """`root`, with the parts that one call of it passes through. The call is made, on copies of what it was given."""
    open_parts, known, names = [root], {id(root.fn): root}, _Names(root)
    caller = threading.get_ident()

    def watched(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != caller or module is root.fn:
                return original(module, *args, **kwargs)
            if (part := known.get(id(module))) is not None:
                part.calls += 1
                return original(module, *args, **kwargs)
            part = known[id(module)] = AuditedPart(names.of(module), module, args, kwargs).keep()
            open_parts[-1].parts.append(part)
            open_parts.append(part)
            try:
                return original(module, *args, **kwargs)
            finally:
                open_parts.pop()

        return call

    with replaced(nn.Module, "__call__", watched):
        root.run()
    return root


class _Names:
    """What to call each module: its name within the root, or within the outermost module that a function calls."""

    def __init__(self, root: AuditedPart) -> None:
        self._names: dict[int, str] = {}
        self._tops: dict[str, int] = {}
        if isinstance(root.fn, nn.Module):
            self._enter(root.fn, "")

    def of(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            name = name_of(module)
            self._tops[name] = again = self._tops.get(name, 0) + 1
            self._enter(module, name if again == 1 else f"{name}#{again}")
        return self._names[id(module)]

    def _enter(self, module: nn.Module, prefix: str) -> None:
        for name, child in module.named_modules(prefix=prefix):
            self._names.setdefault(id(child), name)
