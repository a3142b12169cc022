"""Types of a recipe's fields, and the check of a value against them."""

import sys
from dataclasses import Field
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args

from ..formatting import shown

TYPES: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
    bool | str: ((bool, str), "true, false or a text"),
    dict[str, Any]: (dict, "keys and values"),
    tuple[str, ...]: (tuple, "a text, such as a path, or a list of them"),
    tuple[float, float]: (tuple, "two numbers"),
    tuple[float, ...]: (tuple, "a number or a list of them"),
    str | tuple[str, ...]: ((str, tuple), "a text or a list of them"),
    tuple[dict[str, Any], ...]: (tuple, "a list, each with keys and values such as 'steps: 2000'"),
}
"""(accepted types of values, their description) by the type of a field."""


def check_type(field: Field, value: Any, where: str = "recipe") -> None:
    """Raise ValueError for a value of the wrong type, an infinite number, or an empty or unprintable text."""
    name, type_ = field.name, field.type
    if type_ not in TYPES and isinstance(type_, UnionType):  # an optional value
        if value is None:
            return
        type_ = get_args(type_)[0]
    wanted, description = TYPES[type_]
    of_numbers = type_ in (tuple[float, float], tuple[float, ...])
    of_texts = type_ != tuple[dict[str, Any], ...] and not of_numbers
    texts = value if isinstance(value, tuple) and of_texts else (value,) if wanted is str else ()
    right = isinstance(value, wanted) and all(isinstance(text, str) for text in texts)
    if right and of_numbers:
        right = all(isinstance(n, Real) and not isinstance(n, bool) for n in value)
        right = right and (type_ == tuple[float, ...] or len(value) == 2)
    if not right or (isinstance(value, bool) and type_ not in (bool, bool | str)):
        raise ValueError(f"{where}: {name} must be {description}, got {shown(value)}.")
    if type_ is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where}: {name} must be a finite number, got {value}.")
    for text in texts:
        if not text.strip() or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in text):
            raise ValueError(f"{where}: {name} must be UTF-8 text, not empty, without control characters, got {shown(text)}.")
