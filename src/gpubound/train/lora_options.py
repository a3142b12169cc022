"""The `lora` section of a recipe."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..formatting import hint
from .field_types import check_type

if TYPE_CHECKING:  # a command reads its options before it imports torch
    from torch import nn

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
