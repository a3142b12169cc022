"""A model of ours (models/own.py) in a folder: config.json, model.safetensors, generation_config.json, and the way back.

What config.json says is the family's; the tensors are checked against it before a model of its size is made.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_IMODE
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..corpus import Tokenizer
from ..corpus.tokenizer import ends_of_turn
from ..errors import DataError
from ..files import write_whole, writing
from ..lora.merge import plain_state
from .folder import (
    GENERATION,
    INDEX,
    SPECIAL_IDS,
    WEIGHTS,
    Stored,
    check_layers,
    dtype_of,
    ends_of,
    opened,
    read_config,
    read_generation,
    stored_tensors,
)
from .own import LanguageModel

BUFFERS = "rotary_emb.inv_freq"  # old checkpoints hold it beside the weights; it follows from the config
FLOATS = ("F64", "F32", "F16", "BF16")

Made = TypeVar("Made", bound=LanguageModel)


def read_model(
    path: Path,
    kind: Callable[..., Made],
    config_of: Callable[[dict[str, Any], Path], Any],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    layers: str = "num_hidden_layers",
) -> Made:
    """The model in a folder. `config_of` makes its config of what config.json says, where the number of layers is `layers`.
    `dtype` None keeps the one named there."""
    about = read_config(path)
    config, stored = config_of(about, path), stored_tensors(path)
    generation = read_generation(path, about)
    check_layers(path / "config.json", [(layers, config.layers)], stored)
    _check_tensors(path, kind(config, device="meta").state_dict(), stored, config.tied)
    model = kind(config, device=device, dtype=dtype or dtype_of(about, path))
    model.generation, model.name_or_path = generation, str(path.resolve())  # found from anywhere
    wanted = model.state_dict()
    if config.tied:
        del wanted["lm_head.weight"]  # the same tensor as the embedding
    for file in {tensor.file for tensor in stored.values()}:
        with opened(file) as tensors, torch.no_grad():
            for name in (name for name, tensor in stored.items() if tensor.file == file and name in wanted):
                wanted[name].copy_(tensors.get_tensor(name))
    return model


def write_model(model: LanguageModel, config: dict[str, Any], path: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write the model's folder. One that is already there is replaced."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in plain_state(model).items()}
    if model.config.tied:
        del tensors["lm_head.weight"]
    generation = dict(model.generation) | (special_ids(model, tokenizer) if tokenizer else {})
    # Where config.json is silent, transformers takes bos = 1 and eos = 2, whatever those tokens are.
    config = config | {name: generation.get(name) for name in SPECIAL_IDS}
    _write_tensors(tensors, path / WEIGHTS)
    (path / INDEX).unlink(missing_ok=True)  # of a model in several files; it would name those instead of what was just written
    for name, content in (("config.json", config), (GENERATION, generation)):
        write_whole(path / name, json.dumps(content, indent=2) + "\n")
    if tokenizer:
        tokenizer.save(path)
    return path


def special_ids(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """The special tokens by number, as generation_config.json names them: all that end a text or a turn of a chat."""
    ends = ends_of(model.generation)
    ends = [*([] if tokenizer.eos is None else [tokenizer.eos]), *ends_of_turn(tokenizer), *ends]
    ends = [end for end in dict.fromkeys(ends) if end < model.config.vocabulary]
    found = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    for name in ("bos", "pad"):
        token = tokenizer.special.get(f"{name}_token")
        found[f"{name}_token_id"] = None if token is None else tokenizer.inner.token_to_id(token)
    return found


def _check_tensors(path: Path, state: dict[str, Tensor], stored: dict[str, Stored], tied: bool) -> None:
    """That the tensors are those of the config, before a model of its size is made."""
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    names = {name for name in stored if not name.endswith(BUFFERS)}
    if tied:
        wanted.pop("lm_head.weight")
        names.discard("lm_head.weight")
    missing, extra = sorted(wanted.keys() - names), sorted(names - wanted.keys())
    if missing or extra:
        raise DataError(
            f"{path}: its tensors are not those of its config: missing {missing[:3] or 'none'}, unknown {extra[:3] or 'none'} "
            f"({len(missing)} and {len(extra)} in all); check that config.json belongs to these weights."
        )
    coded = [name for name in wanted if stored[name].dtype not in FLOATS]
    if coded:
        raise DataError(
            f"{stored[coded[0]].file}: {coded[0]} is {stored[coded[0]].dtype}, wanted one of {', '.join(FLOATS)}; quantised "
            "weights need a quantization_config in config.json, and transformers."
        )
    wrong = [name for name in wanted if stored[name].shape != wanted[name]]
    if wrong:
        raise DataError(
            f"{stored[wrong[0]].file}: {wrong[0]} has the shape {stored[wrong[0]].shape}, but config.json wants "
            f"{wanted[wrong[0]]} ({len(wrong)} such tensors); check that config.json belongs to these weights."
        )


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """As write_whole does, and readable for whom the umask allows: what save_file makes, only its owner may read."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with writing(file):
            temporary.touch()
            mode = S_IMODE(temporary.stat().st_mode)
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
