"""Tensors reachable from a function's closure, globals, `self` and the `state` argument, each with a name and an access path.

The name is for messages ("model.layers.0.weight"). The path is followed again later, to check that it leads to the same tensor.
`Bindings` restores attributes and names that a refused function has bound to other tensors.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A step from an object to the next: an entry of its __dict__, an item, or a tensor's gradient.
Step = tuple[str, Any]

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # registries, which are traversed separately, and hooks, which are not
PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = ("torch", "triton", "numpy", "logging", "threading", "_pytest")  # packages whose objects are not traversed
_MAX_DEPTH = 8
_MAX_OBJECTS = 50_000  # a function that reaches more holds a data set, not a model
_MAX_NESTING = 3  # dicts, lists and tuples that `Bindings` searches for tensors: an optimizer's state has two levels

MISSING = object()


class AccessPath(NamedTuple):
    """A name, the object where the path starts, and its steps."""

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
        """Return the container and key of the last step, for a comparison without the walk; None if there is no such pair."""
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
    """Objects reachable from a function, its state and the objects among its arguments.

    `roots` are the paths where the walk starts, `constants` the scalars that a graph bakes in.
    """

    def __init__(self, fn: Callable, state: Any, arguments: Iterable[tuple[str, Any]] = ()) -> None:
        self.tensors: list[tuple[AccessPath, Tensor]] = []
        self._names: dict[int, str] = {}  # by the tensor's id
        self._storage_names: dict[int, str] = {}
        self.generators: list[torch.Generator] = []
        self.constants: Values = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.modes: Values = []  # every module's `training`
        self.functions: list[types.FunctionType] = _python_function(fn)  # fn, and those that it reaches
        self.nodes: list[Any] = []  # every object traversed; it keeps the ids of `_visited` unique
        self._visited: set[int] = set()
        roots = _roots(fn) + [_constant_root(name, value) for name, value in arguments]
        self.roots = sorted(roots, key=lambda path: _rank(path.find()))
        self.plain = [(path, value) for path in self.roots if isinstance(value := path.find(), PRIMITIVES)]
        for path in self.roots:
            self._walk(path, path.find(), 0)
        self.of_state: list[tuple[AccessPath, Tensor]] = []
        if state is not None:
            _check_state(state, "state")
            before, self._visited = len(self.tensors), set()
            self._walk(AccessPath("state", lambda: state), state, 0)
            self.of_state = self.tensors[before:]

    def name(self, tensor: Tensor) -> str | None:
        """Return the first name of this tensor, else of one that shares its memory."""
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if not self._storage_names:
            for path, other in reversed(self.tensors):
                self._storage_names[storage_key(other)] = path.name
        key = storage_key(tensor)
        return self._storage_names.get(key) if key else None

    def _walk(self, path: AccessPath, node: Any, depth: int) -> None:
        kind = _kind(node.__class__)
        if kind is Tensor:
            self._tensor(path, node)
            return
        if kind is None or depth > _MAX_DEPTH or id(node) in self._visited or len(self._visited) > _MAX_OBJECTS:
            return
        if kind is torch.Generator:
            self.generators.append(node)
        if kind is type and path.steps:
            return
        self._visited.add(id(node))
        self.nodes.append(node)
        if kind is nn.Module and "training" in vars(node):  # torch.compile's wrapper forwards to the module inside
            self.modes.append((path.to(".training", ("attribute", "training")), node.training))
        for label, steps, value in self._children(kind, node):
            # Most are numbers or were seen before. Without their paths, and with kinds kept, 8b takes two thirds of the time.
            of = _kind(value.__class__)
            if of is Tensor or (of is not None and id(value) not in self._visited):
                self._walk(path.to(label, *steps), value, depth + 1)
        if kind is Callable and not opaque(node):
            self.functions += _python_function(node)
            for root in _roots(node):
                self._walk(root, root.find(), depth + 1)
        if kind is torch.optim.Optimizer:
            self.optimizers.append(node)
            self._scalars_of(path, node)

    def _tensor(self, path: AccessPath, tensor: Tensor) -> None:
        self.tensors.append((path, tensor))
        self._names.setdefault(id(tensor), path.name)
        if id(tensor) in self._visited:
            return
        self._visited.add(id(tensor))
        self.nodes.append(tensor)
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
            self._tensor(path.to(".grad", ("grad", None)), tensor.grad)
        for key, value in getattr(tensor, "__dict__", {}).items():  # main_grad and its kin
            if isinstance(value, Tensor):
                self._tensor(path.to(f".{key}", ("attribute", key)), value)

    def _scalars_of(self, path: AccessPath, optimizer: torch.optim.Optimizer) -> None:
        """Add learning rates and other Python numbers that a graph bakes in and a scheduler changes."""
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

    def _children(self, kind: Any, node: Any) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
        """Yield the label, the steps and the value of everything that an object holds."""
        attributes: Iterable[str] = ()
        if kind is nn.Module:
            for registry in ("_parameters", "_buffers", "_modules"):
                for key, value in list(vars(node).get(registry, {}).items()):  # a scripted module has none
                    yield f".{key}", (("attribute", registry), ("item", key)), value
            attributes = [key for key in vars(node) if key not in _MODULE_ATTRIBUTES]
        elif kind is torch.optim.Optimizer:
            attributes = "param_groups", "state"
        elif kind is dict:
            for key, value in _items(node):
                yield f"[{self._label(key)}]", (("item", key),), value
        elif kind is object and hasattr(node, "__dict__") and not opaque(node):
            attributes = list(vars(node))
        for key in attributes:
            yield f".{key}", (("attribute", key),), vars(node)[key]


@functools.cache
def _kind(cls: type) -> Any:
    """Return how objects of a class are traversed: as one of its bases that are named here. None: not at all, as numbers."""
    bases: dict[Any, tuple[type, ...]] = {
        Tensor: (Tensor,),
        None: PRIMITIVES,
        torch.Generator: (torch.Generator,),
        nn.Module: (nn.Module,),
        torch.optim.Optimizer: (torch.optim.Optimizer,),
        dict: (dict, list, tuple),
        type: (types.BuiltinFunctionType, type),
        types.ModuleType: (types.ModuleType,),
        Callable: (types.FunctionType, types.MethodType, functools.partial),
    }
    return next((kind for kind, of in bases.items() if issubclass(cls, of)), object)


def storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage, equal for all its views; 0 for a tensor without a storage."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) and tensor.layout == torch.strided else 0


def opaque(node: Any) -> bool:
    """Return whether an object is not traversed, by the package of the function or of the object's class."""
    owner = node if isinstance(node, types.FunctionType) else type(node)
    return (owner.__module__ or "").partition(".")[0] in _OPAQUE


def _items(node: dict | list | tuple) -> list[tuple[Any, Any]]:
    return list(node.items() if isinstance(node, dict) else enumerate(node))


def _roots(fn: Callable) -> list[AccessPath]:
    """Return paths to the function's closure cells, the globals that its code names, its defaults and its `self`."""
    if isinstance(fn, functools.partial):
        arguments = [_constant_root(f"argument {i}", value) for i, value in enumerate(fn.args)]
        return _roots(fn.func) + arguments + [_constant_root(f"argument {key!r}", value) for key, value in fn.keywords.items()]
    if isinstance(fn, types.MethodType):
        return [_constant_root("" if isinstance(fn.__self__, nn.Module) else "self", fn.__self__), *_roots(fn.__func__)]
    if not isinstance(fn, types.FunctionType):
        return [_constant_root("", fn)] if isinstance(fn, nn.Module) else [_constant_root("self", fn)]
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or ())
    roots = [AccessPath(name, functools.partial(getattr, cell, "cell_contents")) for name, cell in cells]
    for name in sorted(names_in(fn.__code__) & fn.__globals__.keys()):
        if not isinstance(fn.__globals__[name], (types.ModuleType, type, types.BuiltinFunctionType)):
            roots.append(AccessPath(name, functools.partial(fn.__globals__.get, name)))
    return roots + [_constant_root(f"default {i}", value) for i, value in enumerate(fn.__defaults__ or ())]


def _python_function(fn: Any) -> list[types.FunctionType]:
    """Return the Python function inside a method or a partial; an empty list if there is none."""
    while isinstance(fn, (types.MethodType, functools.partial)):
        fn = fn.__func__ if isinstance(fn, types.MethodType) else fn.func
    return [fn] if isinstance(fn, types.FunctionType) else []


def names_in(code: types.CodeType) -> set[str]:
    """Return the global names that the code and the functions defined inside it use."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _constant_root(name: str, value: Any) -> AccessPath:
    return AccessPath(name, lambda: value)


def _rank(node: Any) -> int:
    """Return the order of the walk: models first, whose names for tensors are the clearest, optimizers last."""
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


class Bindings:
    """Attributes, items and names of a function and the objects that it reaches, with the values bound to them at first.

    An object whose tensors were exchanged gets all of its attributes back, because they belong together: a table and the
    length that it was made for. An object in which only numbers changed is left alone: another component may count there.
    """

    def __init__(self, reachable: Reachable) -> None:
        self._dicts = [(attributes, dict(attributes)) for node in reachable.nodes for attributes in _dicts(node)]
        self._lists = [(node, list(node)) for node in reachable.nodes if isinstance(node, list)]
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for function in reachable.functions:
            self._cells += [(cell, cell.cell_contents) for cell in function.__closure__ or () if cell != EMPTY_CELL]
            names = function.__globals__
            self._globals += [(names, name, names[name]) for name in names_in(function.__code__) & names.keys()]

    def restore(self) -> None:
        for attributes, before in self._dicts:
            if any(_exchanged(attributes.get(key), before.get(key)) for key in {**before, **attributes}):
                for key in [key for key in attributes if key not in before]:
                    del attributes[key]
                attributes.update(before)
        for items, items_before in self._lists:
            if any(_exchanged(*pair) for pair in zip_longest(items, items_before)):
                items[:] = items_before
        for cell, contents in self._cells:
            if cell == EMPTY_CELL or _exchanged(cell.cell_contents, contents):
                cell.cell_contents = contents
        for names, name, value in self._globals:
            if _exchanged(names.get(name), value):
                names[name] = value


EMPTY_CELL = types.CellType()  # equal to every closure cell whose name has no value yet, and to no other


def _dicts(node: Any) -> Iterator[dict]:
    """Yield the dicts that hold an object's attributes. Parameters are left out: sharding exchanges them repeatedly."""
    if isinstance(node, dict):
        yield node
    elif isinstance(node, nn.Module):
        yield vars(node)
        yield vars(node).get("_buffers", {})
    elif isinstance(node, (Tensor, torch.optim.Optimizer, list, tuple, types.ModuleType, type)):
        return
    elif not isinstance(node, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)) and not opaque(node):
        yield from [vars(node)] if hasattr(node, "__dict__") else ()


def _exchanged(now: Any, before: Any) -> bool:
    return now is not before and (_has_tensor(now) or _has_tensor(before))


def _has_tensor(value: Any, depth: int = 0) -> bool:
    if depth < _MAX_NESTING and isinstance(value, dict | list | tuple):
        return any(_has_tensor(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)
