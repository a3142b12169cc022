"""A model of ours (models/own.py) in a folder: config.json, model.safetensors, generation_config.json, and the way back.

What config.json says is the family's; the tensors are checked against it before a model of its size is made.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from stat import S_IMODE
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..data import Tokenizer
from ..data.tokenizer import ends_of_turn
from ..errors import DataError
from ..files import check_replaceable, make_folder, partial, write_whole
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
    weight_files,
)
from .own import LanguageModel

BUFFERS = "rotary_emb.inv_freq"  # old checkpoints hold it beside the weights; it follows from the config
PART, PARTS = "model-{:05d}-of-{:05d}.safetensors", "model-?????-of-?????.safetensors"
LARGEST_FILE = 5_000_000_000  # bytes: what a host holds of a model while it is written
FLOATS = ("F64", "F32", "F16", "BF16")

Weights = Iterable[tuple[str, Tensor]]
"""The tensors of `stored_state` by name, in its order, each whole."""

Made = TypeVar("Made", bound=LanguageModel)

Part = tuple[Tensor, tuple[slice, ...]]
"""Memory, and which part of a stored tensor it is to hold; () is all of it."""


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
    empty = unread_model(path, kind, config_of, layers)
    model = kind(empty.config, device=device, dtype=dtype or dtype_of(read_config(path), path))
    model.generation, model.name_or_path = empty.generation, empty.name_or_path
    read_parts(path, {name: (tensor, ()) for name, tensor in stored_state(model).items()})
    return model


def unread_model(
    path: Path,
    kind: Callable[..., Made],
    config_of: Callable[[dict[str, Any], Path], Any],
    layers: str = "num_hidden_layers",
) -> Made:
    """The same on the meta device. The folder was seen to hold its tensors, for `read_parts` to fill it with."""
    about = read_config(path)
    config, stored = config_of(about, path), stored_tensors(path)
    generation = read_generation(path, about)
    check_layers(path / "config.json", [(layers, config.layers)], stored)
    model = kind(config, device="meta")
    _check_tensors(path, model.state_dict(), stored, config.tied)
    model.generation, model.name_or_path = generation, str(path.resolve())  # found from anywhere
    return model


@torch.no_grad()
def read_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Fill each memory with its part of the stored tensor of that name. No more is read than that."""
    for file in weight_files(path):
        with opened(file) as tensors:
            for name in (name for name in tensors.keys() if name in parts):  # noqa: SIM118 (it is no dict)
                memory, part = parts[name]
                if memory.numel():
                    memory.copy_(tensors.get_slice(name)[part] if part else tensors.get_tensor(name))


def write_model(
    model: LanguageModel,
    config: dict[str, Any],
    path: Path,
    tokenizer: Tokenizer | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model's folder. A model that is there is replaced only with `overwrite`.

    `weights` None takes the model's own. Sharded ones are put together one by one, and one file's are held at a time.
    """
    own = ("config.json", GENERATION, WEIGHTS, INDEX, *(part.name for part in path.glob(PARTS)))
    check_replaceable(path, "save", own, overwrite=overwrite)
    make_folder(path)
    state = stored_state(model)
    generation = dict(model.generation) | (special_ids(model, tokenizer) if tokenizer else {})
    # Where config.json is silent, transformers takes bos = 1 and eos = 2, whatever those tokens are.
    config = config | {name: generation.get(name) for name in SPECIAL_IDS}
    _write_weights(path, state, iter(state.items() if weights is None else weights))
    for name, content in (("config.json", config), (GENERATION, generation)):
        write_whole(path / name, json.dumps(content, indent=2) + "\n")
    if tokenizer:
        tokenizer.save(path, overwrite=overwrite)
    return path


def stored_state(model: Any) -> dict[str, Tensor]:
    """The tensors that a model's folder has, in their order."""
    state = plain_state(model)
    if getattr(getattr(model, "config", None), "tied", False):
        del state["lm_head.weight"]  # the same tensor as the embedding
    return state


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


def _write_weights(path: Path, state: dict[str, Tensor], weights: Iterator[tuple[str, Tensor]]) -> None:
    """One file, or several and their index, as transformers has them. Until all are written an old model stays as it is."""
    parts = _parts(state)
    files = [path / (WEIGHTS if len(parts) == 1 else PART.format(n, len(parts))) for n in range(1, len(parts) + 1)]
    with ExitStack() as undo:
        temporary = [undo.enter_context(partial(file)) for file in files]
        for names, file in zip(parts, temporary):
            write_tensors(dict(_on_host(names, weights)), file)
        for old in (path / INDEX, *path.glob(PARTS)):  # an old index would name old files, or half of them new ones
            old.unlink(missing_ok=True)
        if len(parts) > 1:
            (path / WEIGHTS).unlink(missing_ok=True)  # which goes before an index
        for whole, file in zip(temporary, files):
            os.replace(whole, file)
    if len(parts) > 1:
        size = sum(t.numel() * t.itemsize for t in state.values())
        table = {name: file.name for names, file in zip(parts, files) for name in names}
        write_whole(path / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": table}, indent=2) + "\n")


def _parts(state: dict[str, Tensor]) -> list[list[str]]:
    """The names of each file's tensors."""
    parts: list[list[str]] = [[]]
    room = LARGEST_FILE
    for name, tensor in state.items():
        size = tensor.numel() * tensor.itemsize
        if size > room and parts[-1]:
            parts.append([])
            room = LARGEST_FILE
        parts[-1].append(name)
        room -= size
    return parts


def _on_host(names: list[str], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        given, tensor = next(weights)
        assert given == name, f"{given} where {name} belongs"
        yield name, tensor.detach().contiguous().cpu()
        del tensor  # the next one is put together now


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Readable for whom the umask allows: what save_file makes, only its owner may read."""
    file.touch()
    mode = S_IMODE(file.stat().st_mode)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)
