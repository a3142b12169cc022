"""Folders of this family: config.json has the fields of RichardsConfig by their own names, under the model_type "richards"."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import torch

from ...data import Tokenizer
from ...errors import DataError
from ...formatting import hint
from ..folder import LARGEST, SPECIAL_IDS, Beyond, read_config
from ..storing import Weights, read_model, unread_model, write_model
from .config import RichardsConfig
from .model import RichardsDecoder

MODEL_TYPE = "richards"
BESIDE = ("model_type", "architectures", "dtype", *SPECIAL_IDS)  # what config.json holds besides


def load_richards(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> RichardsDecoder:
    """The model in a folder that `save_richards` wrote. `dtype` None keeps the one that was saved."""
    return read_model(Path(path), RichardsDecoder, config_of, device, dtype, layers="layers")


def unread(path: str | Path) -> RichardsDecoder:
    """The same on the meta device, for `read_parts` (storing.py) to fill."""
    return unread_model(Path(path), RichardsDecoder, config_of, layers="layers")


def outline(path: str | Path) -> RichardsDecoder:
    """The model of a folder on the meta device, without its weights."""
    return RichardsDecoder(config_of(read_config(Path(path)), Path(path)), device="meta")


def save_richards(
    model: RichardsDecoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
) -> Path:
    """Write config.json, the weights as safetensors and, with `tokenizer`, all that `gpubound generate` needs. A model that is
    there is replaced only with `overwrite`."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    about = {"model_type": MODEL_TYPE, "architectures": [type(model).__name__], "dtype": dtype}
    return write_model(model, about | asdict(model.config), Path(path), tokenizer, weights, overwrite)


def config_of(about: dict[str, Any], path: Path) -> RichardsConfig:
    """Every field is checked before it is used."""
    file, known = path / "config.json", {field.name: field for field in fields(RichardsConfig)}
    if about.get("model_type") != MODEL_TYPE:
        raise Beyond(f"{path}: model_type is {about.get('model_type')!r}, wanted {MODEL_TYPE!r}.")
    values = {name: value for name, value in about.items() if name not in BESIDE}
    for name, value in values.items():
        if name not in known:
            raise DataError(f"{file}: {name} is unknown; {hint(name, known, 'the fields are')}")
        if not _fits(value, known[name].type):
            raise DataError(f"{file}: {name}: got {value!r}, wanted {_named(known[name].type)}.")
    try:
        return RichardsConfig(**values)
    except (TypeError, ValueError) as error:  # a field is missing, or they do not go together
        raise DataError(f"{file}: {error}") from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a field's type; whole numbers are small enough to multiply."""
    kinds = get_args(kind) or (kind,)
    if type(value) is int:
        return bool({int, float} & {*kinds}) and abs(value) <= LARGEST
    return type(value) in kinds


def _named(kind: Any) -> str:
    return " or ".join("null" if one is type(None) else one.__name__ for one in get_args(kind) or (kind,))
