"""Hugging Face folders of any family: config.json, generation_config.json, the headers of the weight files, and models that
transformers computes.

Every field is checked before it is used, and an error names the field. transformers initialises weights that a folder lacks at
random and logs it; here that is an error. A folder with Python code is refused unless the caller trusts it; by default
transformers would ask on stdout and read stdin.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..data.gguf_file import CURE as CURE, GgufFile, gguf_in
from ..errors import DataError
from ..files import read_json, reading, regular, sibling
from .registry import WRAPPERS

WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MASK_ID = "mask_token_id"  # of masked diffusion models
# Dtypes of weights that are not quantised, by their names in safetensors.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Names of LLaDA's modules, and of a Decoder's. N is the number of a layer.
LLADA_NAMES = {
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.blocks.N.attn_norm": "model.layers.N.input_layernorm",
    "model.transformer.blocks.N.q_proj": "model.layers.N.self_attn.q_proj",
    "model.transformer.blocks.N.k_proj": "model.layers.N.self_attn.k_proj",
    "model.transformer.blocks.N.v_proj": "model.layers.N.self_attn.v_proj",
    "model.transformer.blocks.N.attn_out": "model.layers.N.self_attn.o_proj",
    "model.transformer.blocks.N.ff_norm": "model.layers.N.post_attention_layernorm",
    "model.transformer.blocks.N.ff_proj": "model.layers.N.mlp.gate_proj",
    "model.transformer.blocks.N.up_proj": "model.layers.N.mlp.up_proj",
    "model.transformer.blocks.N.ff_out": "model.layers.N.mlp.down_proj",
    "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head",
}
LFS = b"version https://git-lfs"  # begins a pointer, which git leaves where git lfs is not installed
LARGEST = 2**24  # of a size: the product of two still fits into the 63 bits in which torch counts bytes


class Beyond(DataError):
    """Raised for a valid config of a model that our decoder does not implement."""


def has_config(folder: Path) -> bool:
    """Return whether `read_config` finds a config, in config.json or in a GGUF file."""
    return (folder / "config.json").exists() or gguf_in(folder) is not None


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        if (file := gguf_in(folder)) is not None:
            return GgufFile(file).config()
        raise DataError(f"{folder} is not a Hugging Face model folder: it has no config.json; give a folder with one.")
    return read_json(folder / "config.json", CURE)


def dtype_of(about: dict[str, Any], folder: Path) -> torch.dtype:
    """Return the dtype of the saved weights, by config.json; where that names none, of their first floating-point tensor."""
    value = about.get("dtype") or about.get("torch_dtype")
    if value is None and gguf_in(folder) is None:
        with opened(weight_files(folder)[0]) as tensors:
            stored = [tensors.get_slice(name).get_dtype() for name in sorted(tensors.keys())]
        return next((FLOATS[dtype] for dtype in stored if dtype in FLOATS), torch.float32)
    value = value or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name not in DTYPES:
        raise DataError(f"{folder / 'config.json'}: dtype: got {value!r}, wanted one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def dtype_asked(name: str) -> torch.dtype | None:
    """Return the dtype that --dtype names, or None for the dtype of the checkpoint."""
    names = ("float32", "bfloat16", "float16")
    if name != "auto" and name not in names:
        raise ValueError(f"dtype: got {name!r}, wanted one of auto, {', '.join(names)}.")
    return DTYPES.get(name)


class ConfigFields:
    """Checked access to the fields of a config.json."""

    def __init__(self, about: dict[str, Any], file: Path) -> None:
        self.about, self.file = about, file

    def size(self, name: str, default: int | None = None, largest: int = LARGEST) -> int:
        value = self.about.get(name)
        value = self._required(name, default if value is None else value)
        if not isinstance(value, int) or isinstance(value, bool) or not (0 < value <= largest or value == default):
            raise self._wrong(name, value, f"a whole number from 1 to {largest}")
        return value

    def number(self, name: str, value: Any) -> float:
        """Check the value of a field that several places of a config.json may have."""
        value = self._required(name, value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        return self._optional(name, bool, "true or false") or False

    def table(self, name: str) -> dict[str, Any]:
        return self._optional(name, dict, "an object or null") or {}

    def _required(self, name: str, value: Any) -> Any:
        if value is None:
            raise DataError(f"{self.file} has no {name!r}; is it a model's?")
        return value

    def _optional(self, name: str, kind: type, wanted: str) -> Any:
        value = self.about.get(name)
        if value is not None and not isinstance(value, kind):
            raise self._wrong(name, value, wanted)
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> DataError:
        return DataError(f"{self.file}: {name}: got {value!r}, wanted {wanted}.")


def read_generation(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of generation_config.json, and the special tokens that only config.json names."""
    file = path / GENERATION
    generation = read_json(file, CURE) if file.exists() else {}
    for source, fields in ((path / "config.json", about), (file, generation)):
        for name in (*SPECIAL_IDS, MASK_ID):
            value = fields.get(name)
            tokens = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
                raise DataError(f"{source}: {name}: got {value!r}, wanted a token's number, a list of them, or null.")
    mask = {} if about.get(MASK_ID) is None else {MASK_ID: about[MASK_ID]}
    return {name: about.get(name) for name in SPECIAL_IDS} | mask | {k: v for k, v in generation.items() if v is not None}


@dataclass(frozen=True)
class Stored:
    """Metadata of a tensor in a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # by safetensors' names


def decoder_name(stored: str) -> str:
    """Return a Decoder's name of a stored tensor: another one for LLaDA's."""
    return renamed(stored, LLADA_NAMES) if stored.startswith("model.transformer.") else stored


def llada_name(name: str) -> str:
    """Return LLaDA's name of a Decoder's tensor."""
    return renamed(name, {ours: theirs for theirs, ours in LLADA_NAMES.items()})


def renamed(name: str, names: dict[str, str]) -> str:
    """Return the name of a tensor whose module has another name by `names`; unknown ones stay."""
    module, _, tensor = name.rpartition(".")
    number = next((part for part in module.split(".") if part.isdecimal()), "N")
    other = names.get(module.replace(f".{number}.", ".N."))
    return name if other is None else f"{other.replace('.N.', f'.{number}.')}.{tensor}"


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Return the metadata of all tensors in the folder by a Decoder's names, from the headers of its safetensors files."""
    stored: dict[str, Stored] = {}
    for file in weight_files(path):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                header = tensors.get_slice(name)
                stored[decoder_name(name)] = Stored(file, tuple(header.get_shape()), header.get_dtype())
    return stored


def check_layers(file: Path, counts: Iterable[tuple[str, int]], tensors: Iterable[str]) -> None:
    """Raise DataError if a config.json asks for more layers than its tensors have, before the layers are built.

    counts  (field, number of layers) of the fields that have one
    """
    stored = 1 + max((int(n) for name in tensors for n in re.findall(r"\.(\d+)\.", name)), default=-1)
    for name, layers in counts:
        if not 1 <= layers <= max(stored, 1):
            raise DataError(
                f"{file}: {name}: got {layers}, but its tensors have {stored} layers; check that config.json belongs to these "
                "weights."
            )


def layer_counts(about: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (field, number of layers) of each field of a config.json that has one."""
    parts = [part for part in (about, about.get("text_config")) if isinstance(part, dict)]
    return [(name, part[name]) for part in parts for name in LAYERS if isinstance(part.get(name), int)]


def weight_files(path: Path) -> list[Path]:
    """Return the single weight file, which has priority as in transformers, or the files that the index names, or the GGUF
    file."""
    index = path / INDEX
    if (gguf := gguf_in(path)) is not None:
        return [gguf]
    if (path / WEIGHTS).exists() or not index.exists():
        names = [WEIGHTS]
    else:
        table = read_json(index, CURE).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise DataError(f"{index}: weight_map: wanted an object that gives a file's name for each tensor; {CURE}.")
        names = sorted(set(table.values()))
    for name in names:
        if not sibling(index, name).exists():
            raise DataError(f"{path} has no {name}; download the whole model, in safetensors.")
    return [path / name for name in names]


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Its errors name the file, and its slices are on the CPU whatever the default device."""
    with reading(file), regular(file).open("rb") as first:
        if first.read(len(LFS)) == LFS:
            raise DataError(f"{file} is a pointer of git lfs, without the weights; run git lfs pull in its folder.")
    try:
        with torch.device("cpu"), safe_open(regular(file), framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is not a complete safetensors file: {error}; copy or download it again.") from error


def auto_class(config: dict[str, Any]) -> Any:
    """Return the class of transformers that makes a language model by its config.json."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if config.get("model_type") in WRAPPERS else AutoModelForCausalLM


def needs_transformers(what: Any) -> None:
    if find_spec("transformers") is None:
        raise ValueError(f"{what}: transformers reads it, and it is not installed: pip install 'gpubound[hf]'.")


def attempt(folder: Path, load: Callable[[], Any]) -> Any:
    """Return the result of `load`; raise a DataError for any exception that transformers raises on a damaged folder."""
    try:
        return load()
    except (torch.OutOfMemoryError, DataError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{folder}: this model is computed by Python code in its own folder, which was not run; read the code, and if "
                "you trust it pass --trust-remote-code."
            ) from error
        text = " ".join(str(error).split())
        raise DataError(f"{folder}: transformers cannot load it: {type(error).__name__}: {text[:400]}") from error
