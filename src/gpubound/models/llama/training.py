"""What a run needs of this family: presets by name, a new model of one, and a folder read and written."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ...files import read_json
from ..own import LanguageModel
from ..registry import Sizes
from .decoder import PRESETS as SIZES, Decoder, DecoderConfig
from .weights import (
    COMPUTED,
    config_of as config_of,
    load_hf as load,
    outline as outline,
    save_hf as save,
    unread as unread,
)

__all__ = ["FOREIGN", "MODELS", "PRESETS", "config_of", "load", "make", "outline", "reads", "save", "sizes", "table", "unread"]

FOREIGN = True
PRESETS = SIZES | {"1m": DecoderConfig(128, 384, 4, 4, 2, 1024, tied=True)}
"""The last one is what two CPU cores teach some Python in two minutes (the demo's)."""

Shape = TypeVar("Shape", bound=DecoderConfig)


def shrunk(config: Shape) -> Shape:
    """What sets a preset apart, two layers deep and 16 wide a head: to try its recipe on any machine."""
    heads = 2 * config.heads // config.kv_heads
    hidden = 16 * heads
    intermediate = round(hidden * config.intermediate / config.hidden / 16) * 16
    return replace(config, hidden=hidden, intermediate=intermediate, layers=2, heads=heads, kv_heads=2)


MODELS = PRESETS | {f"{name}-tiny": shrunk(config) for name, config in PRESETS.items() if name != "tiny"}


def for_text(config: Shape, vocabulary: int, positions: int) -> Shape:
    """The same for a tokenizer's ids and rows of that length."""
    # Rows of the head, rounded up to a multiple of 64: tensor cores want it, and ids beyond the tokenizer's never occur.
    return replace(config, vocabulary=-(-vocabulary // 64) * 64, positions=max(positions, 4096))


def make(name: str, vocabulary: int, positions: int, device: torch.device) -> Decoder:
    return Decoder(for_text(MODELS[name], vocabulary, positions), device=device)


def reads(folder: Path) -> bool:
    about = folder / "config.json"
    return about.exists() and read_json(about).get("model_type") in COMPUTED


def sizes(model: LanguageModel) -> Sizes:
    config = model.config
    return Sizes(config.vocabulary, config.product_parameters, config.layers, config.heads * config.head_dim)


def table() -> list[str]:
    lines = ["preset  hidden  intermediate  layers  heads  kv heads  vocabulary  tied"]
    for name, c in PRESETS.items():
        tied = "yes" if c.tied else "no"
        lines.append(
            f"{name:6}  {c.hidden:6}  {c.intermediate:12}  {c.layers:6}  {c.heads:5}  {c.kv_heads:8}  {c.vocabulary:10}  {tied}"
        )
    return lines
