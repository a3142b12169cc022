"""Richards models by the name of a preset, and their folders in and out.

config.json has the fields of RichardsConfig, with the model_type "richards". models/registry.py describes the interface.
"""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...data import Tokenizer
from ...errors import DataError
from ...files import read_json
from ...formatting import hint
from ..folder import LARGEST, SPECIAL_IDS, Beyond, read_config
from ..llama.checkpoint import for_text, sizes as sizes, small_variant
from ..llama.decoder import PRESETS as LLAMA
from ..storing import Weights, read_model, unread_model, write_model
from .model import MIXERS, TABLES, RichardsConfig, RichardsDecoder

FOREIGN = False
MODEL_TYPE = "richards"
NO_FIELDS = ("model_type", "architectures", "dtype", *SPECIAL_IDS)  # keys of config.json that are no fields of RichardsConfig

# Each kind differs in one option from the Llama preset of the same size, so that a comparison shows that option's effect.
KINDS: dict[str, dict[str, Any]] = {"richards": {"mlp": "richards_glu"}, "diffusion": {"causal": False}}
PRESETS = {
    f"{kind}-{size}": RichardsConfig(**vars(LLAMA[size]) | parts)
    for kind, parts in KINDS.items()
    for size in ("tiny", "10m", "350m")
}
FIELD_OF_PART = {part: field for field, table in TABLES.items() for part in table}
NOTE = f"richards-tiny+{list(MIXERS)[-1]} and so on: with other parts, of {', '.join(FIELD_OF_PART)}"


class NamedConfigs(dict[str, RichardsConfig]):
    """Configs by name, also with parts: richards-tiny+poly+dyt is richards-tiny with that attention and that norm."""

    def __contains__(self, name: object) -> bool:
        base, *parts = str(name).split("+")
        return super().__contains__(base) and all(part in FIELD_OF_PART for part in parts)

    def __missing__(self, name: str) -> RichardsConfig:
        base, *parts = name.split("+")
        if not parts or name not in self:
            raise KeyError(name)
        names = [FIELD_OF_PART[part] for part in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"model: {name} names two of {', '.join(TABLES[max(names, key=names.count)])}; leave one of them.")
        chosen: dict[str, Any] = dict(zip(names, parts))
        return replace(self[base], **chosen)


MODELS = NamedConfigs(
    PRESETS | {f"{name}-tiny": small_variant(config) for name, config in PRESETS.items() if not name.endswith("tiny")}
)


def make(name: str, vocabulary: int, positions: int, device: torch.device) -> RichardsDecoder:
    return RichardsDecoder(for_text(MODELS[name], vocabulary, positions), device=device)


def reads(folder: Path) -> bool:
    file = folder / "config.json"
    return file.exists() and read_json(file).get("model_type") == MODEL_TYPE


def load_richards(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> RichardsDecoder:
    """Load the model in a folder that `save_richards` wrote. `dtype` None keeps the saved one."""
    return read_model(Path(path), RichardsDecoder, config_of, device, dtype, layers="layers")


def unread(path: str | Path) -> RichardsDecoder:
    """Return the folder's model on the meta device, for `read_parts` (storing.py) to fill."""
    return unread_model(Path(path), RichardsDecoder, config_of, layers="layers")


def outline(path: str | Path) -> RichardsDecoder:
    """Return a model with the folder's config on the meta device."""
    return RichardsDecoder(config_of(read_config(Path(path)), Path(path)), device="meta")


def save_richards(
    model: RichardsDecoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
) -> Path:
    """Write config.json, the weights as safetensors and, with `tokenizer`, everything that `gpubound generate` needs.

    An existing model is replaced only with `overwrite`.
    """
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    about = {"model_type": MODEL_TYPE, "architectures": [type(model).__name__], "dtype": dtype}
    return write_model(model, about | asdict(model.config), Path(path), tokenizer, weights, overwrite)


load, save = load_richards, save_richards


def config_of(about: dict[str, Any], path: Path) -> RichardsConfig:
    """Convert a config.json to a RichardsConfig, checking every field."""
    file, known = path / "config.json", [field.name for field in fields(RichardsConfig)]
    if about.get("model_type") != MODEL_TYPE:
        raise Beyond(f"{path}: model_type is {about.get('model_type')!r}, wanted {MODEL_TYPE!r}.")
    values = {name: value for name, value in about.items() if name not in NO_FIELDS}
    for name, value in values.items():
        if name not in known:
            raise DataError(f"{file}: {name} is unknown; {hint(name, known, 'the fields are')}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise DataError(f"{file}: {name}: got {value}, wanted {LARGEST} at most.")
    try:
        return RichardsConfig(**values)
    except ValueError as error:  # a field is missing or of another type, or the fields contradict each other
        raise DataError(f"{file}: {error}") from error
