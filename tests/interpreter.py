"""Triton's interpreter without two of its longest waits, which are a fifth of the kernels' tests."""

import inspect

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Called once a process, before any kernel runs. A Triton that does these things another way is left as it is."""
    if hasattr(interpreter, "_patch_builtin"):
        interpreter._patch_builtin = replace_builtins
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = numpy_type


_members: dict[object, list[str]] = {}
_types: dict[str, object] = {}
_numpy_type = getattr(interpreter, "_get_np_dtype", None)


def replace_builtins(module, builder, *scope) -> None:
    """Triton looks through all 400 members of a module for its builtins, at every call of every function in a kernel."""
    if module not in _members:
        _members[module] = [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]
    for name in _members[module]:
        member = getattr(module, name)
        if not tl.core.is_builtin(member):
            return  # they are replaced, and put back, all together
        interpreter._patch_attr(module, name, member, builder, *scope)


def numpy_type(dtype):
    """Triton makes its table of types anew at each question."""
    name = dtype.scalar.name
    if name not in _types:
        _types[name] = _numpy_type(dtype)
    return _types[name]
