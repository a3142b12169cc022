"""The interface of the formats of quantised folders, and how published levels become a format of ours.

Legend: O outputs (a weight's rows), K inputs (its columns), G groups of columns that share a scale.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...kernels.packed_weights import TABLE, pack_levels
from ...layers.quantized_base import KINDS, Frozen, InPacked
from ..folder import CURE, FLOATS, Stored, opened

OTHER = "take another quantisation of the model"
# Parts that do not change a layer's weight: its bias, and scales by which others round what it reads and returns.
IGNORED = ("bias", "input_scale", "output_scale", "k_scale", "v_scale", "input_zero_point", "output_zero_point")

Take = Callable[[str], Tensor]
"""name of a stored tensor -> the tensor, on the device that the model is read to"""


class Coded(NamedTuple):
    """Codes and scales of a weight in a format."""

    kind: type[Frozen]
    codes: Tensor
    scales: dict[str, Tensor]


class Values(NamedTuple):
    """Numbers (O, K) of a weight that no format can hold, in fp32, and the reason."""

    values: Tensor
    why: str


Weight = Coded | Values


class Scheme:
    """The quantised layers of a folder."""

    name: str  # for the user
    PARTS: ClassVar[tuple[str, ...]] = ()  # last parts of the names of a weight's tensors, the codes first

    def __init__(self, folder: Path, stored: dict[str, Stored], options: dict[str, Any]) -> None:
        """options: the folder's quantization_config"""
        self.folder, self.stored, self.options = folder, stored, options
        self.layers: dict[str, tuple[int, int]] = {}  # (O, K) by the layer's name

    def tensors(self, layer: str) -> list[str]:
        """Return the names of the stored tensors of a layer's weight."""
        return [name for part in self.PARTS if (name := f"{layer}.{part}") in self.stored]

    def read(self, layer: str, take: Take) -> Weight:
        raise NotImplementedError

    def raw(self, name: str) -> Tensor:
        """Read a stored tensor to host memory."""
        self.shape(name)
        with opened(self.stored[name].file) as tensors:
            return tensors.get_tensor(name)

    def dense(self, name: str, take: Take) -> Tensor:
        """Read a tensor that is not quantised."""
        return take(name)

    def read_modules(self, model: nn.Module, take: Take) -> int:
        """Read the weights of modules that are no linear layers. Return their bytes."""
        return 0

    def plain_names(self) -> set[str]:
        """Return the names of tensors that are not quantised."""
        coded = {name for layer in self.layers for name in self.tensors(layer)}
        return self.stored.keys() - coded

    def check(self) -> None:
        """Raise DataError for a tensor that changes a weight in a way unknown to `read`, and for codes without scales."""
        known = {name for layer in self.layers for name in self.tensors(layer)}
        for name, about in self.stored.items():
            layer, _, part = name.rpartition(".")
            if layer in self.layers and name not in known and part not in IGNORED:
                raise DataError(f"{about.file}: {name}: got a part of a weight that {self.name} does not have; {OTHER}.")
            if part in ("weight", "bias") and name not in known and about.dtype not in FLOATS:
                raise DataError(f"{about.file}: {name}: got {about.dtype} without scales, wanted {', '.join(FLOATS)}; {OTHER}.")

    def small(self, ends: str) -> dict[str, Tensor]:
        """Read all tensors whose names have this part: those that say how others are stored."""
        tensors_by_name: dict[str, Tensor] = {}
        names = [name for name in self.stored if ends in name]
        for file in dict.fromkeys(self.stored[name].file for name in names):
            with opened(file) as tensors:
                tensors_by_name |= {name: tensors.get_tensor(name) for name in names if self.stored[name].file == file}
        return tensors_by_name

    def wrong(self, what: str, got: Any, wanted: str) -> DataError:
        return DataError(f"{self.folder / 'config.json'}: quantization_config: {what}: got {got!r}, wanted {wanted}.")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.stored:
            raise DataError(f"{self.folder} lacks {name}, part of a quantised weight; {CURE}.")
        return self.stored[name].shape


class Renamed(Scheme):
    """A folder's layers under the names of a model that transformers loads from other names."""

    def __init__(self, scheme: Scheme, rename: Callable[[str], str]) -> None:
        super().__init__(scheme.folder, {rename(name): about for name, about in scheme.stored.items()}, scheme.options)
        self.scheme, self.name = scheme, scheme.name
        self._theirs = {rename(name): name for name in scheme.plain_names()}
        self._layers = {rename(f"{layer}.weight").removesuffix(".weight"): layer for layer in scheme.layers}
        self.layers = {layer: scheme.layers[theirs] for layer, theirs in self._layers.items()}

    def plain_names(self) -> set[str]:
        return set(self._theirs)

    def tensors(self, layer: str) -> list[str]:
        return self.scheme.tensors(self._layers[layer])

    def read(self, layer: str, take: Take) -> Weight:
        return self.scheme.read(self._layers[layer], take)

    def raw(self, name: str) -> Tensor:
        return self.scheme.raw(name)

    def dense(self, name: str, take: Take) -> Tensor:
        return self.scheme.dense(self._theirs.get(name, name), take)  # one that is missing is named there

    def read_modules(self, model: nn.Module, take: Take) -> int:
        return self.scheme.read_modules(model, take)


def hold_levels(levels: Tensor, scale: Tensor, bits: int, zero: int, offset: Tensor | None = None) -> Weight:
    """Return (level - zero) · scale, or level · scale - offset where there are offsets, in the format that holds these numbers.

    levels         (O, K) uint8, from 0
    scale, offset  (O or 1, G)
    """
    (rows, columns), groups = levels.shape, scale.shape[1]
    size = columns // groups
    suffix = "" if groups == 1 or size % 128 == 0 else "_32" if size % 32 == 0 else "_16"
    name = f"{'int' if offset is None else 'uint'}{bits}{suffix}"
    if name in TABLE and columns % groups == 0 and (groups == 1 or size % TABLE[name].group == 0):
        if offset is None and TABLE[name].zero != zero:
            levels = levels + (TABLE[name].zero - zero)
        expanded = (scale.expand(rows, groups), None if offset is None else offset.expand(rows, groups))
        return Coded(KINDS[name], *InPacked.split(pack_levels(levels, expanded[0], name, expanded[1])))
    index = torch.arange(columns, device=levels.device) // -(-columns // groups)
    return Values(by_group(levels, scale, zero, offset, index), f"it has {size} columns a scale, no multiple of 16 or 32")


def by_group(levels: Tensor, scale: Tensor, zero: int, offset: Tensor | None, index: Tensor) -> Tensor:
    """Return the numbers of levels whose column k has the scale of group index[k]."""
    values = levels.float()
    if offset is None:
        return (values - zero) * scale.float()[:, index]
    return values * scale.float()[:, index] - offset.float()[:, index]


def fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of each int32 word (..., N) as uint8 (..., N · 32 / bits), the lowest bits first."""
    unpacked = torch.empty(*words.shape, 32 // bits, device=words.device, dtype=torch.uint8)
    for place in range(32 // bits):  # one after the other: in int32 all of them take four times the memory
        unpacked[..., place] = (words >> (bits * place)) & ((1 << bits) - 1)
    return unpacked.flatten(-2)
