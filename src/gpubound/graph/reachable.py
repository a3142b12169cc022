"""Tensors reachable from a function's closure, globals, `self` and the `state` argument, each with a name and an access path.

The name is for messages ("model.layers.0.weight"). The path is followed again later, to check that it leads to the same tensor.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# A step from an object to the next: an entry of its __dict__, an item, or a tensor's gradient.
Step = tuple[str, Any]

_MODULE_PARTS = frozenset(vars(nn.Module()))  # its registries, which are walked by themselves, and its hooks, which are not
PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))
_CLOSED = ("torch", "triton", "numpy", "logging", "threading", "_pytest")  # packages whose objects are not looked into
_DEEPEST = 8
_MOST = 50_000  # objects looked at: a function that reaches more holds a data set, not a model

MISSING = object()


@dataclass(frozen=True)
class AccessPath:
    """A name, where the walk starts, and its steps."""

    name: str
    root: Callable[[], Any]
    steps: tuple[Step, ...] = ()

    def to(self, label: str, *steps: Step) -> "AccessPath":
        return AccessPath(self.name + label if self.name else label.lstrip("."), self.root, self.steps + steps)

    def find(self) -> Any:
        """Return the current object at the path, or MISSING."""
        try:
            node = self.root()
            for kind, key in self.steps:
                node = node.grad if kind == "grad" else vars(node)[key] if kind == "attribute" else node[key]
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):  # ValueError: an emptied closure cell
            return MISSING
        return node

    def slot(self) -> tuple[Any, Any] | None:
        """The container and key of the last step, for a comparison without the walk; None where there is no such pair."""
        if not self.steps or self.steps[-1][0] == "grad":
            return None
        owner = AccessPath(self.name, self.root, self.steps[:-1]).find()
        kind, key = self.steps[-1]
        return (vars(owner) if kind == "attribute" else owner), key

    @property
    def in_registry(self) -> bool:
        """True for a parameter, buffer or optimizer state: their number is large, and replacing one is noticed otherwise."""
        registries = {("attribute", "_parameters"), ("attribute", "_buffers")}
        return any(step in registries or (step[0] == "item" and isinstance(step[1], Tensor)) for step in self.steps)


Values = list[tuple[AccessPath, Any]]


def same(now: Any, value: Any) -> bool:
    """Return whether a Python value is unchanged; a tensor in its place counts as a change."""
    if now is value:
        return True
    # NaN is not equal to itself
    return type(now) is type(value) and bool(now == value or (now != now and value != value))


class Reachable:
    """Everything found from a function, its state and the objects it is given.

    `roots` are where the walk began, `constants` the scalars baked in.
    """

    def __init__(self, fn: Callable, state: Any, given: Iterable[tuple[str, Any]] = ()) -> None:
        self.tensors: list[tuple[AccessPath, Tensor]] = []
        self._names: dict[int, str] = {}  # by the tensor's id
        self._lying: dict[int, str] = {}  # by its memory
        self.generators: list[torch.Generator] = []
        self.constants: Values = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.modes: Values = []  # every module's `training`
        self.functions: list[types.FunctionType] = [*_bare(fn)]  # fn, and those that it reaches
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # ids stay taken while we look
        arguments = [_fixed(name, value) for name, value in given]
        self.roots = sorted(_roots(fn) + arguments, key=lambda path: _rank(path.find()))
        self.plain = [(path, value) for path in self.roots if isinstance(value := path.find(), PRIMITIVES)]
        for path in self.roots:
            self._walk(path, path.find(), 0)
        self.of_state: list[tuple[AccessPath, Tensor]] = []
        if state is not None:
            _check_state(state, "state")
            before, self._seen = len(self.tensors), set()
            self._walk(AccessPath("state", lambda: state), state, 0)
            self.of_state = self.tensors[before:]

    def name(self, tensor: Tensor) -> str | None:
        """The first name of this very tensor, else of one that shares its memory."""
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if not self._lying:
            for path, found in reversed(self.tensors):
                self._lying[storage_key(found)] = path.name
        key = storage_key(tensor)
        return self._lying.get(key) if key else None

    def nodes(self) -> list[Any]:
        """Every object on the way."""
        return self._keep

    def _walk(self, path: AccessPath, node: Any, depth: int) -> None:
        if isinstance(node, Tensor):
            self._tensor(path, node)
        if isinstance(node, (Tensor, *PRIMITIVES)):
            return
        if depth > _DEEPEST or id(node) in self._seen or len(self._seen) > _MOST:
            return
        if isinstance(node, torch.Generator):
            self.generators.append(node)
        if isinstance(node, (types.BuiltinFunctionType, type)) and path.steps:
            return
        self._seen.add(id(node))
        self._keep.append(node)
        if isinstance(node, nn.Module) and "training" in vars(node):  # torch.compile's wrapper asks the module inside
            self.modes.append((path.to(".training", ("attribute", "training")), node.training))
        for following, value in self._children(path, node):
            self._walk(following, value, depth + 1)
        if isinstance(node, torch.optim.Optimizer):
            self.optimizers.append(node)
            self._scalars_of(path, node)

    def _tensor(self, path: AccessPath, tensor: Tensor) -> None:
        self.tensors.append((path, tensor))
        self._names.setdefault(id(tensor), path.name)
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        self._keep.append(tensor)
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
            self._tensor(path.to(".grad", ("grad", None)), tensor.grad)
        for key, value in getattr(tensor, "__dict__", {}).items():  # main_grad and its kin
            if isinstance(value, Tensor):
                self._tensor(path.to(f".{key}", ("attribute", key)), value)

    def _scalars_of(self, path: AccessPath, optimizer: torch.optim.Optimizer) -> None:
        """Learning rates and the like: Python numbers that a graph bakes in and a scheduler changes."""
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and _plain(value):
                    steps: tuple[Step, ...] = (("attribute", "param_groups"), ("item", index), ("item", key))
                    self.constants.append((path.to(f".param_groups[{index}][{key!r}]", *steps), value))
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, (int, float)):
                    steps = (("attribute", "state"), ("item", parameter), ("item", key))
                    self.constants.append((path.to(f".state[{self._label(parameter)}][{key!r}]", *steps), value))

    def _label(self, key: Any) -> str:
        return self._names.get(id(key), "...") if isinstance(key, Tensor) else repr(key)

    def _children(self, path: AccessPath, node: Any) -> Iterator[tuple[AccessPath, Any]]:
        if isinstance(node, nn.Module):
            for registry in ("_parameters", "_buffers", "_modules"):
                for key, value in list(vars(node).get(registry, {}).items()):  # a traced module's are those of one inside
                    yield path.to(f".{key}", ("attribute", registry), ("item", key)), value
            yield from _attributes(path, node, [key for key in vars(node) if key not in _MODULE_PARTS])
        elif isinstance(node, torch.optim.Optimizer):
            yield from _attributes(path, node, ("param_groups", "state"))
        elif isinstance(node, (dict, list, tuple)):
            for key, value in _items(node):
                yield path.to(f"[{self._label(key)}]", ("item", key)), value
        elif isinstance(node, (types.ModuleType, type)) or closed(node):
            return
        elif isinstance(node, (types.FunctionType, types.MethodType, functools.partial)):
            self.functions += _bare(node)
            for root in _roots(node):
                yield root, root.find()
        elif hasattr(node, "__dict__"):
            yield from _attributes(path, node, list(vars(node)))


def storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage, equal for all its views; 0 for a tensor without a storage."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) and tensor.layout == torch.strided else 0


def closed(node: Any) -> bool:
    """Return whether an object is not traversed, by the package of the function or of the object's class."""
    owner = node if isinstance(node, types.FunctionType) else type(node)
    return (owner.__module__ or "").partition(".")[0] in _CLOSED


def _items(node: dict | list | tuple) -> list[tuple[Any, Any]]:
    return list(node.items() if isinstance(node, dict) else enumerate(node))


def _attributes(path: AccessPath, node: Any, keys) -> Iterator[tuple[AccessPath, Any]]:
    for key in keys:
        yield path.to(f".{key}", ("attribute", key)), vars(node)[key]


def _roots(fn: Callable) -> list[AccessPath]:
    """The function's closure cells, the globals its code names, its defaults, its `self`."""
    if isinstance(fn, functools.partial):
        bound = [_fixed(f"argument {i}", value) for i, value in enumerate(fn.args)]
        return _roots(fn.func) + bound + [_fixed(f"argument {key!r}", value) for key, value in fn.keywords.items()]
    if isinstance(fn, types.MethodType):
        return [_fixed("" if isinstance(fn.__self__, nn.Module) else "self", fn.__self__), *_roots(fn.__func__)]
    if not isinstance(fn, types.FunctionType):
        return [_fixed("", fn)] if isinstance(fn, nn.Module) else [_fixed("self", fn)]
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or ())
    roots = [AccessPath(name, functools.partial(getattr, cell, "cell_contents")) for name, cell in cells]
    for name in sorted(names_in(fn.__code__) & fn.__globals__.keys()):
        if not isinstance(fn.__globals__[name], (types.ModuleType, type, types.BuiltinFunctionType)):
            roots.append(AccessPath(name, functools.partial(fn.__globals__.get, name)))
    return roots + [_fixed(f"default {i}", value) for i, value in enumerate(fn.__defaults__ or ())]


def _bare(fn: Any) -> Iterator[types.FunctionType]:
    """The Python function inside a method or a partial, if there is one."""
    while isinstance(fn, (types.MethodType, functools.partial)):
        fn = fn.__func__ if isinstance(fn, types.MethodType) else fn.func
    if isinstance(fn, types.FunctionType):
        yield fn


def names_in(code: types.CodeType) -> set[str]:
    """The global names that the code and the functions defined inside it use."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _fixed(name: str, value: Any) -> AccessPath:
    return AccessPath(name, lambda: value)


def _rank(node: Any) -> int:
    """Models name their tensors best, optimizers worst."""
    order = (nn.Module, Tensor, object)
    if isinstance(node, torch.optim.Optimizer):
        return len(order)
    return next(rank for rank, kind in enumerate(order) if isinstance(node, kind))


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, tuple) and all(map(_plain, value)))


def _check_state(state: Any, name: str) -> None:
    if isinstance(state, (list, tuple, dict)):
        for key, item in _items(state):
            _check_state(item, f"{name}[{key!r}]")
    elif not isinstance(state, (nn.Module, torch.optim.Optimizer, Tensor, torch.Generator)):
        raise ValueError(
            f"{name}: got {type(state).__name__}, wanted modules, optimizers, tensors or generators in any nesting; "
            "leave it out."
        )
