"""How a module is swapped: its class is changed, on this instance alone.

The new class inherits from the part that computes faster and from the module's own class, and is marked `Fused`. So the
instance keeps its parameters, buffers, hooks, attributes and name in the tree; isinstance() and everything that goes by the
class's name hold; the original forward stays within reach (`self.original.forward(self, ...)`); and undoing is setting the
class back. Nothing is patched for other instances.

norms.py has the parts for norms, in any model; those for families are in models/.
"""

from functools import cache, wraps
from types import FunctionType
from typing import Any

from torch import nn


class Fused:
    """The mark of a swapped module. `part` and `original` are the two classes that the instance's class is made of."""

    part: type
    original: Any
    forwards: tuple[Any, Any]  # its own and the original's, when the class was made
    _added: tuple[str, ...]  # the attributes that it got beside its own

    def __repr__(self) -> str:  # not by _get_name(), by which Trainer knows whether labels are to be shifted
        return f"Fused{super().__repr__()}"

    def __reduce_ex__(self, protocol):  # the class is made at run time: pickle and copy find it by its two bases
        return _blank, (self.part, self.original), object.__reduce_ex__(self, 2)[2]


@cache
def fused_class(part: Any, original: Any) -> Any:
    """The class of an `original` swapped for `part`. It goes by the original's name: save_pretrained writes that name into
    config.json, and wrapping policies look for it."""
    names = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    forward = wraps(original.forward)(_copy(part.forward))  # Trainer and generate read the signature
    forwards = {"forward": forward, "forwards": (forward, original.forward)}
    return type(original.__name__, (Fused, part, original), {**names, "part": part, "original": original, **forwards})


def _copy(function: Any) -> FunctionType:
    """A function of its own, so that wrapping it for one class leaves it as it is for the next."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _blank(part: Any, original: Any) -> nn.Module:
    cls = fused_class(part, original)
    return cls.__new__(cls)


def adopt(module: Any, part: type, attributes: dict[str, Any]) -> None:
    """Make `module` a `part`, with these attributes beside its own."""
    taken = [name for name in attributes if name in module.__dict__ or name in module._modules or name in module._parameters]
    assert not taken, f"{type(module).__name__} has {taken} already"
    module.__dict__.update(attributes, _added=tuple(attributes))
    original: Any = type(module)
    module.__class__ = fused_class(part, original)


def release(module: nn.Module) -> None:
    """The exact reverse of `adopt`, where a module is swapped. The parameters stay where they lie."""
    if isinstance(module, Fused):
        original = module.original
        for name in (*module._added, "_added"):
            del module.__dict__[name]
        module.__class__ = original


MARK = "_placed"


def is_placed(model: nn.Module) -> bool:
    """Return whether a placement of `model`, or of a part of it, has not been undone."""
    return any(isinstance(module, Fused) or MARK in vars(module) for module in model.modules())
