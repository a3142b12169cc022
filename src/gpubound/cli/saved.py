"""A saved model, ready to generate: a Hugging Face folder, a run of `gpubound train` or `demo`, or one of its checkpoints."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..errors import DataError
from ..feed.tokenizer import Tokenizer
from ..models import load_hf
from ..models.weights import config_of
from ..train.checkpoint import STATE, TENSORS, Checkpoint, Checkpoints, open_checkpoint
from ..train.prepare import build_model
from ..train.recipe import Recipe

WANTED = "wanted a Hugging Face folder, or a run of gpubound train or demo"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPORTS = ("model", "hf")  # where `demo` and `train --export hf` leave the trained model
POSITIONS = 4096  # of a model that does not say for how many it is made


@dataclass(frozen=True)
class Saved:
    """A model on its device, in eval mode, and what its files say about using it."""

    model: nn.Module
    tokenizer: Tokenizer
    folder: Path  # where the weights were read
    ends: tuple[int, ...]  # tokens that end a text
    positions: int  # tokens that the model is made for


def open_saved(path: str | Path, device: torch.device, dtype: str = "auto", tokenizer: str | None = None) -> Saved:
    """`dtype` auto is the one that was saved. `tokenizer`: another folder's instead of its own."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, wanted auto, {', '.join(DTYPES)}.")
    source = find(Path(path))
    own = Tokenizer.load(tokenizer) if tokenizer else None
    if isinstance(source, Checkpoint):
        own = own or _run_tokenizer(source)
        model, folder = _from_checkpoint(source, own, device, DTYPES.get(dtype)), source.path
    else:
        own = own or _folder_tokenizer(source)
        model, folder = _from_folder(source, device, DTYPES.get(dtype)), source
    return Saved(model.eval(), own, folder, _ends(folder, own), _positions(model))


def find(path: Path) -> Path | Checkpoint:
    """The Hugging Face folder or checkpoint that `path` means. Of a run: its export, or a checkpoint that is newer."""
    if not path.is_dir():
        raise ValueError(f"{path}: {'this is a file' if path.exists() else 'there is no such folder'}; {WANTED}.")
    if (path / "config.json").exists():
        return path
    if (path / STATE).exists():
        return open_checkpoint(path)
    exports = [path / name for name in EXPORTS if (path / name / "config.json").exists()]
    newest = Checkpoints(path / "checkpoints").latest() or Checkpoints(path).latest()
    if exports:
        export = max(exports, key=lambda folder: _written(folder / "config.json"))
        if newest is None or _written(export / "config.json") >= _written(newest.path / STATE):
            return export
    if newest is None:
        raise ValueError(f"{path} holds neither a config.json nor a whole checkpoint; {WANTED}.")
    return newest


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """By our own loader, whose decoder the fused kernels know; what it does not read, by transformers."""
    if (foreign := _foreign(folder)) is None:
        return load_hf(folder, device, dtype)
    if find_spec("transformers") is None:
        raise ValueError(f"{folder}: {foreign}, which transformers reads, and it is not installed: pip install 'gpubound[hf]'.")
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
    return model.to(device)


def _foreign(folder: Path) -> str | None:
    """None for a model of ours, else what kind it is."""
    about = _json(folder / "config.json")
    if "quantization_config" in about:
        return "its weights are quantised"
    try:
        config_of(about, folder)
    except DataError:
        return f"it is a {about.get('model_type')!r} model beyond our own decoder"
    except KeyError as missing:
        raise DataError(f"{folder}: its config.json has no {missing}; is it a model's?") from missing
    return None


def _from_checkpoint(found: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """What the run would have exported at that step: the average of its weights if it keeps one."""
    recipe, weights = found.facts["recipe"], dict[str, Tensor]()
    with safe_open(found.path / TENSORS, framework="pt", device=str(device)) as file:  # which holds moments and masters, too
        names = list(file.keys())
        for part in ("model.", "average."):
            weights |= {name.removeprefix(part): file.get_tensor(name) for name in names if name.startswith(part)}
        stored = file.get_tensor("model.model.embed_tokens.weight").dtype
    model = build_model(Recipe(model=recipe["model"], seq=recipe["seq"]), tokenizer, device)
    if model.config.tied:  # an average holds the one tensor under its first name
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.to(dtype or stored).load_state_dict(weights)
    return model


def _folder_tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").exists():
        raise ValueError(f"{folder} has no tokenizer.json, and texts must become tokens; give one with --tokenizer FOLDER.")
    return Tokenizer.load(folder)


def _run_tokenizer(found: Checkpoint) -> Tokenizer:
    """The one that the run was trained with: beside its corpus, or where its recipe says."""
    recipe, run = found.facts["recipe"], found.path.parent.parent
    told = [recipe.get("tokenizer"), recipe["model"], *recipe["data"]]
    for folder in (run / "corpus", *sorted((run / "corpus").glob("*")), *(Path(name) for name in told if name)):
        if folder.name == "tokenizer.json" or (folder / "tokenizer.json").exists():
            return Tokenizer.load(folder)
    raise ValueError(f"{found.path}: the tokenizer of its run is not in {run / 'corpus'}; give it with --tokenizer FOLDER.")


def _ends(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a text: the tokenizer's, and those that the model's files name."""
    found = [] if tokenizer.eos is None else [tokenizer.eos]
    for name in ("generation_config.json", "config.json"):
        told = _json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        found += told if isinstance(told, list) else [] if told is None else [told]
    return tuple(dict.fromkeys(found))


def _positions(model: Any) -> int:
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    return getattr(config, "positions", None) or getattr(config, "max_position_embeddings", None) or POSITIONS


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a {type(found).__name__}, wanted an object.")
    return found
