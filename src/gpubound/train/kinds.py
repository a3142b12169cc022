"""Of which kind a recipe's values must be: what YAML read, or Python gave, beside the type of a field."""

import sys
from dataclasses import Field
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args

from ..formatting import shown

KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
    bool | str: ((bool, str), "true, false or a text"),
    dict[str, Any]: (dict, "keys and values"),
    tuple[str, ...]: (tuple, "a path or a list of them"),
    str | tuple[str, ...]: ((str, tuple), "a text or a list of them"),
    tuple[dict[str, Any], ...]: (tuple, "a list, each with keys and values such as 'steps: 2000'"),
}
"""A field's type -> what its values are, and in words."""


def check_kind(field: Field, value: Any, where: str = "recipe") -> None:
    """Refuse what is not of the field's kind, or not usable whatever the field."""
    name, kind = field.name, field.type
    if kind not in KINDS and isinstance(kind, UnionType):  # None, too
        if value is None:
            return
        kind = get_args(kind)[0]
    wanted, words = KINDS[kind]
    texts = value if isinstance(value, tuple) and kind != tuple[dict[str, Any], ...] else (value,) if wanted is str else ()
    right = isinstance(value, wanted) and all(isinstance(text, str) for text in texts)
    if not right or (isinstance(value, bool) and kind not in (bool, bool | str)):
        raise ValueError(f"{where}: {name} must be {words}, got {shown(value)}.")
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where}: {name} must be a finite number, got {value}.")
    for text in texts:
        if not text.strip() or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in text):
            raise ValueError(f"{where}: {name} must be UTF-8 text, not empty, without control characters, got {shown(text)}.")
