"""Hugging Face folders, of any family: config.json, generation_config.json and the headers of the weights' files.

Every field is checked before it is used, and named when it is not what it should be.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import DataError
from ..files import beside, read_json, regular

WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CURE = "download the model again"
LARGEST = 2**24  # of any size: two of them multiplied still fit into the 63 bits that torch counts bytes in


class Beyond(DataError):
    """The config is whole, but our decoder cannot compute such a model."""


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise DataError(f"{folder} is not a Hugging Face model folder: it has no config.json; give a folder with one.")
    return read_json(folder / "config.json", CURE)


def dtype_of(about: dict[str, Any], folder: Path) -> torch.dtype:
    """The dtype that the weights were saved in."""
    told = about.get("dtype") or about.get("torch_dtype") or "float32"
    name = told.removeprefix("torch.") if isinstance(told, str) else None
    if name not in DTYPES:
        raise DataError(f"{folder / 'config.json'}: dtype: got {told!r}, wanted one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def dtype_asked(name: str) -> torch.dtype | None:
    """Return the dtype that --dtype names, or None for the dtype of the checkpoint."""
    names = ("float32", "bfloat16", "float16")
    if name != "auto" and name not in names:
        raise ValueError(f"dtype: got {name!r}, wanted one of auto, {', '.join(names)}.")
    return DTYPES.get(name)


class ConfigFields:
    """Fields of a config.json, each named when it is not what it should be."""

    def __init__(self, about: dict[str, Any], file: Path) -> None:
        self.about, self.file = about, file

    def size(self, name: str, default: int | None = None, largest: int = LARGEST) -> int:
        value = self.about.get(name)
        value = self._there(name, default if value is None else value)
        if not isinstance(value, int) or isinstance(value, bool) or not (0 < value <= largest or value == default):
            raise self._wrong(name, value, f"a whole number from 1 to {largest}")
        return value

    def number(self, name: str, value: Any) -> float:
        value = self._there(name, value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        return self._of_kind(name, bool, "true or false") or False

    def table(self, name: str) -> dict[str, Any]:
        return self._of_kind(name, dict, "an object or null") or {}

    def _there(self, name: str, value: Any) -> Any:
        if value is None:
            raise DataError(f"{self.file} has no {name!r}; is it a model's?")
        return value

    def _of_kind(self, name: str, kind: type, wanted: str) -> Any:
        value = self.about.get(name)
        if value is not None and not isinstance(value, kind):
            raise self._wrong(name, value, wanted)
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> DataError:
        return DataError(f"{self.file}: {name}: got {value!r}, wanted {wanted}.")


def read_generation(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of generation_config.json, and the special tokens that only config.json names."""
    file = path / GENERATION
    own = read_json(file, CURE) if file.exists() else {}
    for source, told in ((path / "config.json", about), (file, own)):
        for name in SPECIAL_IDS:
            value = told.get(name)
            tokens = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
                raise DataError(f"{source}: {name}: got {value!r}, wanted a token's number, a list of them, or null.")
    return {name: about.get(name) for name in SPECIAL_IDS} | {k: v for k, v in own.items() if v is not None}


def ends_of(generation: dict[str, Any]) -> list[int]:
    """The tokens that end a text, in the words of a generation_config.json: none, one or several."""
    told = generation.get("eos_token_id")
    return [] if told is None else list(told) if isinstance(told, list | tuple) else [told]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, before it is read."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor in the folder's safetensors files, by name, from the files' headers."""
    found: dict[str, Stored] = {}
    for file in weight_files(path):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                about = tensors.get_slice(name)
                found[name] = Stored(file, tuple(about.get_shape()), about.get_dtype())
    return found


def check_layers(file: Path, counts: Iterable[tuple[str, int]], tensors: Iterable[str]) -> None:
    """A config.json that asks for a billion layers is refused before they begin to be built.

    counts  (field, number of layers) of its fields that have one
    """
    found = 1 + max((int(n) for name in tensors for n in re.findall(r"\.(\d+)\.", name)), default=-1)
    for name, layers in counts:
        if not 1 <= layers <= max(found, 1):
            raise DataError(
                f"{file}: {name}: got {layers}, but its tensors have {found} layers; check that config.json belongs to these "
                "weights."
            )


def weight_files(path: Path) -> list[Path]:
    """One file, or those that the index names. The one file goes first, as it does in transformers."""
    index = path / INDEX
    if (path / WEIGHTS).exists() or not index.exists():
        names = [WEIGHTS]
    else:
        table = read_json(index, CURE).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise DataError(f"{index}: weight_map: wanted an object that gives a file's name for each tensor; {CURE}.")
        names = sorted(set(table.values()))
    for name in names:
        if not beside(index, name).exists():
            raise DataError(f"{path} has no {name}; download the whole model, in safetensors.")
    return [path / name for name in names]


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """safe_open, whose complaints name the file, and whose slices lie on the CPU whatever the caller's default device."""
    try:
        with torch.device("cpu"), safe_open(regular(file), framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is no whole safetensors file: {error}; copy or download it again.") from error
