"""Low-rank adapters of a run: what a recipe's `lora` says, and what a run keeps of its model when the model itself is frozen.

A checkpoint holds the adapters alone, and says by checksums which base they belong to. The base stays in its folder.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import lora
from ..errors import DataError
from ..formatting import hint
from ..layers.quantized_base import Base
from ..lora.base import FORMATS, suited
from ..lora.layers import adapted_layers
from ..lora.model import INITS
from ..models.folder import weight_files
from ..models.registry import is_named
from ..trace import notice
from .checkpoint import Checkpoint
from .checkpoint.files import checksum
from .kinds import check_kind

WHERE = "recipe: lora"
LARGEST_RANK = 1 << 16


@dataclass(frozen=True)
class Lora:
    """The options of gpubound.lora.add that a recipe may give."""

    rank: int
    alpha: float | None = None
    targets: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: bool | str = True
    base: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Lora":
        """From a recipe's keys and values: a tuple again where YAML or JSON made a list."""
        known = {field.name: field for field in fields(cls)}
        if unknown := [key for key in given if key not in known]:
            raise ValueError(f"{WHERE}: {unknown[0]!r} is unknown; {hint(str(unknown[0]), known, 'its options are')}")
        if missing := [name for name, field in known.items() if field.default is MISSING and name not in given]:
            raise ValueError(f"{WHERE}: {missing[0]} is missing; give one, such as {missing[0]}: 16.")
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return cls(**values)

    def __post_init__(self) -> None:
        """What the model's shapes decide, lora.add refuses."""
        for field in fields(self):
            check_kind(field, getattr(self, field.name), WHERE)
        if not 1 <= self.rank <= LARGEST_RANK:
            raise ValueError(f"{WHERE}: rank must lie between 1 and {LARGEST_RANK:,}, got {self.rank:,}.")
        if self.alpha == 0:
            raise ValueError(f"{WHERE}: alpha must not be 0, the scale's numerator: the adapters would learn nothing.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{WHERE}: dropout must be from 0 up to, not including, 1, got {self.dropout}.")
        if self.init not in INITS:
            raise ValueError(f"{WHERE}: init must be true, false, gaussian or orthogonal, got {self.init!r}.")
        if self.base is not None and self.base not in FORMATS:
            raise ValueError(f"{WHERE}: base must be one of {', '.join(FORMATS)}, got {self.base!r}.")

    def check_beside(self, model: str, optimizer: str, precision: str) -> None:
        """Refuse what the rest of a recipe may not be with adapters."""
        if is_named(model):
            raise ValueError(
                f"{WHERE}: adapters learn what a trained model lacks, and the preset {model} begins with random weights; "
                f"give a Hugging Face folder as model."
            )
        if optimizer == "muon":
            raise ValueError(
                f"{WHERE}: got optimizer muon, which moves the weights of whole layers, and these are frozen; take adamw."
            )
        if precision == "fp8":
            raise ValueError(
                f"{WHERE}: got precision fp8, which rounds weights that train, and these are frozen; take bf16, "
                f"and base: fp8 in lora."
            )

    def add(self, model: nn.Module) -> None:
        lora.add(model, **{field.name: getattr(self, field.name) for field in fields(self)})

    def merged(self, base: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        """The base, which was read anew in its own dtype, with the adapters of `state` in its weights."""
        self.add(base)
        load_kept_state(base, state)
        merge(base)
        return base

    def frozen_bytes(self, outline: nn.Module, dtype: torch.dtype) -> int:
        """What the base takes in `dtype`, or in its codes; `outline` has the adapters."""
        frozen = {name: p.numel() for name, p in outline.named_parameters() if not p.requires_grad}
        codes = 0.0
        if self.base is not None:
            kind = FORMATS[self.base]
            inside = {key: f"{key}.base_layer" for key, _ in adapted_layers(outline)}
            codes = kind.bits / 8 * sum(frozen.pop(f"{inside.get(key, key)}.weight") for key in suited(outline, kind))
        return int(codes) + dtype.itemsize * sum(frozen.values())

    def check_model(self, outline: nn.Module) -> None:
        """What lora.add refuses, on a model without weights."""
        replace(self, base=None).add(outline)


def kept_state(model: nn.Module) -> dict[str, Tensor]:
    """What of the model's state a run may change: all but the frozen parameters and what their codes are read by."""
    state = model.state_dict(keep_vars=True)
    coded = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Base))
    frozen = {name for name, t in state.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    return {name: t.detach() for name, t in state.items() if name not in frozen and not name.startswith(coded)}


@torch.no_grad()
def load_kept_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    wanted = kept_state(model)
    assert wanted.keys() == state.keys(), f"a state of another model: {sorted(wanted.keys() ^ state.keys())[:3]}"
    model.load_state_dict(state, strict=False)


def base_of(folder: str | Path) -> dict[str, int]:
    """The checksums of a Hugging Face folder's config and weights, at 2.8 GB/s."""
    return {file.name: checksum(file) for file in (Path(folder, "config.json"), *weight_files(Path(folder)))}


def check_base(folder: str | Path, now: dict[str, int], found: Checkpoint) -> None:
    """DataError when `now`, of `folder`, is not the base that the adapters in `found` were trained on."""
    was = found.facts["base"]
    if changed := sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name)):
        raise DataError(
            f"{found.path}: its adapters were trained on another base than {folder} holds now: {', '.join(changed)} changed; "
            f"put the files of that base back, or begin anew in another --out."
        )


def merge(model: nn.Module) -> None:
    """Make the adapters part of the weights for good, and say what that cost. Weights in codes become numbers first."""
    lora.dequantize_base(model)
    dtype = str(next(p for p in model.parameters() if not p.requires_grad).dtype).removeprefix("torch.")
    error = lora.merge(model, for_good=True)
    notice(f"lora: merged into weights in {dtype}, whose rounding took {error:.1%} of what the adapters add.")
