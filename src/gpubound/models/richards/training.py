"""What a run needs of this family: presets by name, a new model of one, and a folder read and written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...files import read_json
from ..llama.decoder import PRESETS as LLAMA
from ..llama.training import for_text, shrunk, sizes as sizes
from .config import RichardsConfig
from .model import RichardsDecoder
from .parts import MIXERS, TABLES
from .weights import (
    MODEL_TYPE,
    config_of as config_of,
    load_richards as load,
    outline as outline,
    save_richards as save,
    unread as unread,
)

__all__ = ["FOREIGN", "MODELS", "PRESETS", "config_of", "load", "make", "outline", "reads", "save", "sizes", "table", "unread"]

FOREIGN = False
KINDS: dict[str, dict[str, Any]] = {"richards": {"mlp": "richards_glu"}, "diffusion": {"causal": False}}
"""Each differs in one thing from the preset of its size, so that a comparison with that one says what the thing does."""

PRESETS = {
    f"{kind}-{size}": RichardsConfig(**vars(LLAMA[size]) | parts)
    for kind, parts in KINDS.items()
    for size in ("tiny", "10m", "350m")
}
WORDS = {part: field for field, table in TABLES.items() for part in table}


class NamedConfigs(dict[str, RichardsConfig]):
    """Also of names with parts behind them: richards-tiny+poly+dyt is richards-tiny with that attention and that norm."""

    def __contains__(self, name: object) -> bool:
        base, *parts = str(name).split("+")
        return super().__contains__(base) and all(part in WORDS for part in parts)

    def __missing__(self, name: str) -> RichardsConfig:
        base, *parts = name.split("+")
        if not parts or name not in self:
            raise KeyError(name)
        fields = [WORDS[part] for part in parts]
        if len(set(fields)) < len(fields):
            raise ValueError(
                f"model: {name} names two of {', '.join(TABLES[max(fields, key=fields.count)])}; leave one of them."
            )
        chosen: dict[str, Any] = dict(zip(fields, parts))
        return replace(self[base], **chosen)


MODELS = NamedConfigs(
    PRESETS | {f"{name}-tiny": shrunk(config) for name, config in PRESETS.items() if not name.endswith("tiny")}
)


def make(name: str, vocabulary: int, positions: int, device: torch.device) -> RichardsDecoder:
    return RichardsDecoder(for_text(MODELS[name], vocabulary, positions), device=device)


def reads(folder: Path) -> bool:
    about = folder / "config.json"
    return about.exists() and read_json(about).get("model_type") == MODEL_TYPE


def table() -> list[str]:
    lines = ["preset          hidden  intermediate  layers  heads  kv heads  attention  mlp          norm      causal"]
    for name, c in PRESETS.items():
        causal = "yes" if c.causal else "no"
        lines.append(
            f"{name:14}  {c.hidden:6}  {c.intermediate:12}  {c.layers:6}  {c.heads:5}  {c.kv_heads:8}  {c.attention:9}  "
            f"{c.mlp:11}  {c.norm:8}  {causal}"
        )
    return [*lines, f"richards-tiny+{list(MIXERS)[-1]} and so on: with other parts, of {', '.join(WORDS)}"]
