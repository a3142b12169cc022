"""Triton's interpreter without its longest waits: it computes the same, in a third of the time.

Nothing here decides what a kernel computes, or what is checked of it. Triton makes some things anew at each operation (the
functions that stand in for the language's, the types and shapes of tensors), and computes one that nobody asks for.
"""

import inspect
from functools import cache, partial

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_theirs: dict = {}  # Triton's own, by the name of what replaces it


def hasten() -> None:
    """Called once a process, before any kernel runs. A Triton that does these things another way is left as it is."""
    for owner, name, ours in (
        (interpreter, "_patch_lang", replace_language),
        (interpreter, "_patch_builtin", replace_builtins),
        (interpreter, "_get_np_dtype", numpy_type),
        (TritonSemantic, "binary_op_sanitize_overflow_impl", sanitize_overflow),
        (TritonSemantic, "broadcast_impl_value", broadcast),
        (TritonSemantic, "binary_op_type_checking_impl", make_alike),
        (tl.core, "_unwrap_if_constexpr", unwrap),
        (tl.dtype, "__eq__", is_type),
        (tl.block_type, "__init__", make_block_type),
        (tl.block_type, "with_element_ty", with_element),
        (tl.tensor, "__init__", make_tensor),
        (interpreter.TensorHandle, "__init__", make_handle),
        (interpreter, "_convert_float", convert_float),
    ):
        if hasattr(owner, name):
            _theirs[ours.__name__] = getattr(owner, name)
            setattr(owner, name, ours)
    tl.dtype.of_tensors = _of_scalars


class Replaced:
    """The language's functions, replaced for as long as a kernel runs: Triton does it again at each call within the kernel."""

    def __init__(self):
        self.modules: set = set()
        self.scopes: list = []

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.modules.clear()


_now = Replaced()


def replace_language(function) -> Replaced:
    modules = language_of(function)
    if not modules <= _now.modules:
        _now.scopes.append(_theirs["replace_language"](function))
        _now.modules |= modules
    return _now


@cache
def language_of(function) -> frozenset:
    """The modules of the language that a function can name."""
    return frozenset(value for value in function.__globals__.values() if value is tl or value is tl.core)


def replace_builtins(module, builder, scope) -> None:
    """Triton looks through all 400 members of a module for its builtins."""
    for name, builtin in builtins_of(module):
        if not tl.core.is_builtin(getattr(module, name)):
            return  # they are replaced, and put back, all together
        scope.set_attr(module, name, interpreted(builtin, isinstance(module, type)))


@cache
def builtins_of(module) -> list:
    return [(name, member) for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]


@cache
def interpreted(builtin, method: bool):
    """A builtin of the language as the interpreter calls it."""
    function = getattr(builtin, "__wrapped__", builtin)  # around it stands only the demand for `_semantic`
    bound = partial(function, _semantic=interpreter.interpreter_semantic)
    if not method:
        return bound
    quick = QUICK.get(builtin.__name__)

    def call(left, *others, **named):
        if quick is not None and len(others) == 1 and alike(left, others[0]):
            return tl.tensor(interpreter.TensorHandle(quick(left.handle.data, others[0].handle.data), left.dtype), left.type)
        return bound(left, *others, **named)

    return call


QUICK = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
NUMBERS = (tl.float32, tl.int32, tl.int64)


def alike(left, right) -> bool:
    """Two tensors of one shape and type: their sum needs none of Triton's ten calls to find both out."""
    return type(right) is tl.tensor and left.type.of_tensors is right.type.of_tensors and left.dtype is right.dtype in NUMBERS


_types: dict = {}


def numpy_type(dtype):
    """Triton makes its table of types anew at each question."""
    name = dtype.scalar.name
    if name not in _types:
        _types[name] = _theirs["numpy_type"](dtype)
    return _types[name]


def sanitize_overflow(semantic, left, right, operation) -> None:
    """Triton computes each integer operation again in 64 bits, and only where it debugs looks at what comes out."""
    if semantic.builder.options.debug:
        _theirs["sanitize_overflow"](semantic, left, right, operation)


_blocks: dict = {}
_of_scalars: dict = {}  # what all tensors of a shape have in common, as `of_tensors` of a block type
_of_blocks: dict = {}
_numbers: dict = {}  # what numbers became beside a tensor of a type, by the type's name; a block type has its own
_kin: dict = {}  # block types of a shape, by the names of their elements


def make_block_type(block, element, shape) -> None:
    """Types of the same elements and shape are made once. All of them know what their tensors have in common."""
    pointer = isinstance(element, tl.pointer_type)
    shape = tuple(map(tl.core._unwrap_if_constexpr, shape))
    key = (element.name, pointer and (element.address_space, element.const), shape)
    if key not in _blocks:
        _theirs["make_block_type"](block, element, list(shape))
        shared = {"of_tensors": _of_blocks.setdefault(shape, {}), "kin": _kin.setdefault(shape, {}), "numbers": {}}
        _blocks[key] = vars(block) | shared
    vars(block).update(_blocks[key])


def with_element(block, element):
    """A block type of the same shape."""
    if element.is_ptr():
        return _theirs["with_element"](block, element)
    if element.name not in block.kin:
        block.kin[element.name] = _theirs["with_element"](block, element)
    return block.kin[element.name]


def make_tensor(tensor, handle, type) -> None:
    """A tensor's shape is a tuple of constants, which Triton makes for each tensor."""
    common = type.of_tensors
    if not common:
        _theirs["make_tensor"](tensor, handle, type)
        common.update(shape=tensor.shape, numel=tensor.numel)
    tensor.handle, tensor.type = handle, type
    tensor.dtype = type.scalar if common is _of_scalars else type.element_ty
    tensor.shape, tensor.numel = common["shape"], common["numel"]


def make_handle(handle, data, dtype, attr=None) -> None:
    """Triton compares the sizes of each array's elements and of its type's; where it has computed, it has done so before."""
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr


def convert_float(data, given, wanted, rounding):
    """bf16 is the upper half of fp32. Triton takes exponents and fractions apart, and is wrong for numbers below 2^-126."""
    if given is tl.bfloat16 and wanted is tl.float32:
        return data.astype(np.uint32, order="C") << 16
    if given is tl.float32 and wanted is tl.bfloat16 and rounding is None:
        return (data.view(np.uint32) >> 16).astype(np.uint16, order="C")
    return _theirs["convert_float"](data, given, wanted, rounding)


def broadcast(semantic, left, right) -> tuple:
    """Triton compares two shapes element by element, also where they are one, and for a scalar makes types in vain."""
    if left.type.of_tensors is right.type.of_tensors:
        return left, right
    if right.type.of_tensors is _of_scalars:
        return left, spread(semantic, right, left.type)
    if left.type.of_tensors is _of_scalars:
        return spread(semantic, left, right.type), right
    return _theirs["broadcast"](semantic, left, right)


def spread(semantic, scalar, block):
    """Of the block's type, only the shape is read."""
    return tl.tensor(semantic.builder.create_splat(block, scalar.handle), block.with_element_ty(scalar.dtype))


def make_alike(semantic, left, right, left_ptr=False, right_ptr=False, arithmetic_check=True, div_or_mod=False) -> tuple:
    """Triton looks for the type and shape that two operands have in common, also where they have them already.

    A division may have another type than both, and a pointer may not be allowed: those are Triton's.
    """
    rules = left_ptr, right_ptr, arithmetic_check, div_or_mod
    if type(left) is not tl.tensor:
        return beside(semantic, left, right, 1, rules)
    if type(right) is not tl.tensor:
        return beside(semantic, left, right, 0, rules)
    if left.dtype.is_ptr():
        alike = left_ptr and right.dtype.is_int()
    else:
        alike = not div_or_mod and left.dtype.name == right.dtype.name
    return broadcast(semantic, left, right) if alike else _theirs["make_alike"](semantic, left, right, *rules)


def beside(semantic, left, right, which: int, rules: tuple) -> tuple:
    """A number beside a tensor that stays as it is. What Triton makes of it is kept for the next time."""
    tensor, number = (left, right) if which == 0 else (right, left)
    if type(tensor) is not tl.tensor or type(number) not in (int, float):
        return _theirs["make_alike"](semantic, left, right, *rules)
    kind = tensor.type
    known = kind.numbers if kind.is_block() else _numbers.setdefault(kind.name, {})
    key = type(number), number or str(number), which, rules  # 0.0 and -0.0 are equal
    if key not in known:
        pair = _theirs["make_alike"](semantic, left, right, *rules)
        if pair[which] is not tensor or len(known) > 1000:
            return pair
        known[key] = pair[1 - which]
        known[key].handle.data.flags.writeable = False
    return (tensor, known[key]) if which == 0 else (known[key], tensor)


PLAIN = frozenset((tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)))


def unwrap(value):
    """Triton asks four times what it holds. Most often that is no constant, and nothing that holds some."""
    return value if type(value) in PLAIN else _theirs["unwrap"](value)


def is_type(dtype, other) -> bool:
    return dtype is other or _theirs["is_type"](dtype, other)
