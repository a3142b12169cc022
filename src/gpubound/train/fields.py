"""Types of a recipe's fields, the check of a value against them, and the `lora` section."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

from ..formatting import hint, shown

if TYPE_CHECKING:
    from torch import nn


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


LORA = "recipe: lora"
LARGEST_RANK = 1 << 16


@dataclass(frozen=True)
class Lora:
    """The `lora` section of a recipe: options of gpubound.lora.add."""

    rank: int
    alpha: float | None = None
    targets: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: bool | str = True
    base: str | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "Lora":
        """Return the options of a recipe's section: lists of YAML or JSON become tuples."""
        known = {f.name: f for f in fields(cls)}
        if unknown := [key for key in section if key not in known]:
            raise ValueError(f"{LORA}: {unknown[0]!r} is unknown; {hint(str(unknown[0]), known, 'its options are')}")
        if missing := [name for name, f in known.items() if f.default is MISSING and name not in section]:
            raise ValueError(f"{LORA}: {missing[0]} is missing; give one, such as {missing[0]}: 16.")
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}
        return cls(**values)

    def __post_init__(self) -> None:
        """Check the options alone; lora.add checks them against the model."""
        from ..lora.base import FORMATS
        from ..lora.model import INITS

        for f in fields(self):
            check_type(f, getattr(self, f.name), LORA)
        if not 1 <= self.rank <= LARGEST_RANK:
            raise ValueError(f"{LORA}: rank must lie between 1 and {LARGEST_RANK:,}, got {self.rank:,}.")
        if self.alpha == 0:
            raise ValueError(f"{LORA}: alpha must not be 0, the scale's numerator: the adapters would learn nothing.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{LORA}: dropout must be from 0 up to, not including, 1, got {self.dropout}.")
        if self.init not in INITS:
            raise ValueError(f"{LORA}: init must be true, false, gaussian or orthogonal, got {self.init!r}.")
        if self.base is not None and self.base not in FORMATS:
            raise ValueError(f"{LORA}: base must be one of {', '.join(FORMATS)}, got {self.base!r}.")

    def add(self, model: "nn.Module") -> None:
        from .. import lora

        lora.add(model, **asdict(self))

    def check_model(self, outline: "nn.Module") -> None:
        """Raise what lora.add raises, on a model without weights."""
        replace(self, base=None).add(outline)
