"""Load a saved model for generation: a Hugging Face folder, a model on the hub, a run of `gpubound train` or `demo`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import lora
from ..data import Tokenizer
from ..data.tokenizer import adapt, has_tokenizer
from ..device import host_bytes, label, usable_bytes
from ..errors import DataError
from ..layers.embedding_and_head import head_of
from ..models.decoding import ends_of
from ..models.folder import (
    Beyond,
    attempt,
    dtype_asked,
    needs_transformers,
    read_config,
    read_generation,
)
from ..models.hf_loading import load_foreign
from ..models.quantized.schemes import scheme_of
from ..models.registry import family_of, is_named, is_quantized
from ..trace import fallback
from ..train.adapters import base_of, check_base, load_trained_state, merge, trained_state
from ..train.checkpoint import Checkpoint, path_from_here
from ..train.objectives import objective_named
from ..train.prepare import build_model
from ..train.recipe import Recipe
from .options import base_of_adapter, find_source, is_adapter

SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # tokenizers that only transformers reads


@dataclass(frozen=True)
class Saved:
    """A model on its device, in eval mode, and what its files specify for generation."""

    model: nn.Module
    tokenizer: Tokenizer
    folder: Path
    ends: tuple[int, ...]
    """Tokens that end a text: the tokenizer's, and those in the model's files."""
    generation: dict[str, Any]
    """The model's generation_config.json."""
    positions: int | None
    """Context length that the model's config names."""
    devices: tuple[torch.device, ...]
    """Devices that share the model; tokens are chosen on the first."""
    started: float
    """Time when loading began."""

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def device_label(self) -> str:
        return label(self.device) if len(self.devices) == 1 else f"{len(self.devices)} x {label(self.device)}"

    def checked_ends(self) -> list[int]:
        """Return the tokens that end a text. Raise ValueError for one outside the model's vocabulary: it would end none."""
        size = head_of(self.model).weight.shape[0]
        for token in self.ends:
            if not 0 <= token < size:
                raise ValueError(
                    f"{self.folder}: eos_token_id: got {token}, outside the model's vocabulary of {size}; correct it in "
                    f"generation_config.json, config.json or the tokenizer, or give --ignore-eos."
                )
        return list(self.ends)


def open_saved(
    path: str | Path,
    device: torch.device | Sequence[torch.device],
    dtype: str = "auto",
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | Path | None = None,
    split: str = "layers",
    rounds: bool = False,
) -> Saved:
    """Load the model that `path` names.

    device     one device, or several that share the model by `split`. Shared weights stay in host memory until the decoder
               gives each device a part. Quantised weights are read onto the devices directly if they are split by layers, or
               if the host's memory has no room for them.
    dtype      "auto" is the dtype that was saved
    rounds     the decoder will round the weights: a folder's that would not fit a GPU besides stay in host memory
    tokenizer  a folder with another tokenizer than the model's
    adapter    a folder with an adapter, which is merged into the weights if they can hold all of it
    """
    started, dtype_ = time.perf_counter(), dtype_asked(dtype)
    devices = (device,) if isinstance(device, torch.device) else tuple(device)
    target = devices[0] if len(devices) == 1 else torch.device("cpu")
    tok = Tokenizer.load(tokenizer) if tokenizer else None
    source = find_source(path, trust_remote_code)
    if isinstance(source, Path) and is_adapter(source):
        if adapter is not None:
            raise ValueError(f"adapter: got {adapter}, and {source} is an adapter itself; give the base in its place.")
        adapter = source
        source = find_source(base_of_adapter(source), trust_remote_code)
    if isinstance(source, Checkpoint):
        tok, generation, folder = tok or _run_tokenizer(source), dict[str, Any](), source.path
        model = _from_checkpoint(source, tok, target, dtype_)
    else:
        config, folder = read_config(source), source
        tok, generation = tok or _folder_tokenizer(source, trust_remote_code), read_generation(source, config)
        if rounds and len(devices) == 1 and not _fits_rounded(source, devices[0]):
            target = torch.device("cpu")
        direct = len(devices) > 1 and is_quantized(config) and (split == "layers" or not _fits_host(source))
        model = _from_folder(source, config, devices if direct else target, dtype_, trust_remote_code, devices[0])
    if adapter is not None:
        lora.load(model, adapter, name="given")
    if lora.parameters(model):
        try:
            merge(model)
        except ValueError as error:  # nothing was merged: it adds a bias, or has a copy of a tied embedding
            fallback("generate: an adapter merged into the weights", str(error))
    ends = [*([] if tok.eos is None else [tok.eos]), *ends_of(generation)]
    return Saved(model.eval(), tok, folder, tuple(dict.fromkeys(ends)), generation, _positions(model), devices, started)


def _fits_host(folder: Path) -> bool:
    free = host_bytes()
    return free is None or sum(file.stat().st_size for file in folder.glob("*.safetensors")) < free


def _fits_rounded(folder: Path, device: torch.device) -> bool:
    """Return whether the folder's weights fit a GPU beside their rounded copies, of at most half their size, and 1 GiB."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return device.type != "cuda" or 1.5 * size + (1 << 30) < usable_bytes(device)


def _from_folder(
    folder: Path,
    config: dict[str, Any],
    device: Any,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    computes: torch.device,
) -> nn.Module:
    """Load a folder with the loader of one of the library's families, or with transformers. `device` and `computes` of
    quantised weights: see `load_coded`."""
    reason = None
    try:
        family_of(str(folder)).config_of(config, folder)
        scheme_of(folder, config)
    except Beyond:
        reason = f"it is a {config.get('model_type')!r} model beyond our own decoder"
    if reason is None:
        return family_of(str(folder)).load(folder, device, dtype)
    needs_transformers(f"{folder}: {reason}")
    return load_foreign(folder, device, dtype, trust_remote_code, computes)


def _from_checkpoint(
    checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """Load the weights that the run would have exported at that step: their average, if the run keeps one."""
    facts, weights = checkpoint.facts["recipe"], dict[str, Tensor]()
    name = facts["model"] if is_named(facts["model"]) else path_from_here(checkpoint, facts["model"])
    recipe = Recipe(model=name, seq=facts["seq"], lora=facts.get("lora", {}))
    if not is_named(recipe.model) and not Path(recipe.model).is_dir():
        raise DataError(
            f"{checkpoint.path}: its run began with the model in {recipe.model}, which does not exist; restore it, or start "
            f"this in the folder where the run began."
        )
    if recipe.lora:
        check_base(recipe.model, base_of(recipe.model), checkpoint)
    tensors = checkpoint.tensors(device, begin=("model.", "average."))  # without moments and master weights
    for prefix in ("model.", "average."):
        weights |= {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    stored = next(t.dtype for name, t in tensors.items() if name.startswith("model."))
    model = build_model(recipe, tokenizer, device)
    if recipe.adapters is not None:
        recipe.adapters.add(model)
    first: dict[int, str] = {}
    for name, tensor in trained_state(model).items():  # an average holds a tied weight only under its first name
        weights[name] = weights[first.setdefault(tensor.data_ptr(), name)]
    load_trained_state(model.to(dtype or stored), weights)
    return model


def _folder_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    if has_tokenizer(folder):
        return Tokenizer.load(folder)
    if not any((folder / name).exists() for name in SLOW):
        raise ValueError(f"{folder} has no tokenizer.json, and texts must become tokens; give one with --tokenizer FOLDER.")
    needs_transformers(f"{folder}: its tokenizer is not a tokenizer.json")
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    loaded = attempt(folder, lambda: AutoTokenizer.from_pretrained(folder, **options))
    return adapt(loaded)  # type: ignore[return-value]  # a backend_tokenizer becomes a Tokenizer


def _run_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of the checkpoint's run: from its corpus, or from a folder in its recipe. Tokens that the objectives
    of the recipe add are added."""
    recipe, corpus = checkpoint.facts["recipe"], checkpoint.path.parent.parent / "corpus"
    named = [recipe.get("tokenizer"), recipe["model"], *recipe["data"]]
    for folder in (corpus, *sorted(corpus.glob("*")), *(Path(path_from_here(checkpoint, name)) for name in named if name)):
        if folder.name == "tokenizer.json" or (folder / "tokenizer.json").exists():
            break
    else:
        raise ValueError(f"{checkpoint.path}: the tokenizer of its run is not in {corpus}; give it with --tokenizer FOLDER.")
    tokenizer = Tokenizer.load(folder)
    for stage in (recipe, *recipe.get("phases", ())):
        if (objective := stage.get("objective")) is not None:
            tokenizer = objective_named(objective, stage.get("objective_options", {})).extended(tokenizer)
    return tokenizer


def _positions(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    return getattr(config, "positions", None) or getattr(config, "max_position_embeddings", None)
