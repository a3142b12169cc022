"""Models that a run trains, by family: a preset's name or a Hugging Face folder in, a folder out.

A family that can be trained by name has a file `training.py` in its folder, and its folder's name in TRAINABLE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

TRAINABLE = ("llama",)


@dataclass(frozen=True)
class Sizes:
    """What a run must know of a model's shape: how many ids it takes, and what its arithmetic comes to."""

    vocabulary: int
    product_parameters: int  # multiplied with every token
    layers: int
    width: int  # of a layer's attention: all heads together


class Trainable(Protocol):
    """What a family's `training.py` holds."""

    PRESETS: Mapping[str, Any]
    """The models that have a name, for people to choose from."""
    MODELS: Mapping[str, Any]
    """All that `make` knows: the presets, and small ones like them."""

    def make(self, name: str, vocabulary: int, positions: int, device: torch.device) -> nn.Module:
        """A new model of MODELS, for so many ids and rows of up to so many positions."""

    def reads(self, folder: Path) -> bool: ...
    def load(self, folder: str, device: torch.device) -> nn.Module: ...
    def save(self, model: Any, folder: str | Path, tokenizer: Any) -> Path: ...
    def sizes(self, model: Any) -> Sizes: ...

    def table(self) -> list[str]:
        """PRESETS in lines for a person."""


def trainable() -> list[Trainable]:
    return [import_module(f".{folder}.training", __package__) for folder in TRAINABLE]  # type: ignore[misc]


def presets() -> list[str]:
    return [name for family in trainable() for name in family.PRESETS]


def is_named(model: str) -> bool:
    """Whether `model` is a name, and no folder's."""
    return any(model in family.MODELS for family in trainable())


def family_of(model: str) -> Trainable:
    """The family that makes the model of this name, or reads the one in this folder. The first where none does: its `load`
    says what it wants."""
    families = trainable()
    named = next((family for family in families if model in family.MODELS), None)
    return named or next((family for family in families if family.reads(Path(model))), families[0])
