"""Which families there are, a line each: the file here that knows one, and what transformers calls its models.

Hugging Face's modules are known by name and home: `LlamaMLP` of transformers.models.llama.modeling_llama, and its like. A
subclass of a user's own lives elsewhere, may compute something else, and is left alone.

The file says what the rest of the library asks of its family, in tables by role: SWAPS, how its modules are swapped (placing.py
has the words), and DECODING, how its models are decoded (decoding.py). It is imported when it is first asked. A family that has
outgrown a file is a folder, which has these tables in `family.py`.

A family that can be trained by name, from a preset or a Hugging Face folder to a folder, has its folder's name in TRAINABLE and
a file `training.py` there:

PRESETS, MODELS   the models that have a name, for people to choose from; and all that `make` knows, small ones like them too,
                  and NAME+PART where models are made of parts that have names
FOREIGN           whether transformers has these models, too
make              a new one of MODELS: (name, vocabulary, positions, device) -> model
reads, load, save of a folder: whether it is this family's; (folder, device, dtype or None) -> model; (model, folder, tokenizer,
                  its weights one by one or None, overwrite)
config_of         (what config.json says, folder) -> a config; Beyond where our own model cannot compute it
outline, unread   the model of a folder's config.json on the meta device; and the same where the folder was seen to hold its
                  tensors, for storing.read_parts to fill
sizes, table      the `Sizes` of a model; PRESETS in lines for a person
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from .decoding import Reader
from .placing import Maker

FAMILIES = {
    # file: {model_type: how its classes' names begin}
    "llama": {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"},
    "mixtral": {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"},
    "gemma": {"gemma": "Gemma", "gemma2": "Gemma2"},
    "gemma3": {"gemma3": "Gemma3"},
    "olmo2": {"olmo2": "Olmo2"},
    "phi3": {"phi3": "Phi3"},
    "deepseek_v4": {"deepseek_v4": "DeepseekV4"},
}
# Families that the fused kernels do not fit: the module with their runners, imported when a decoder is built.
RUNNERS = {"deepseek_v4": ".deepseek_v4.decode"}
TRAINABLE = ("llama", "richards")


def role_of(module: nn.Module) -> str | None:
    """'RMSNorm', 'Attention', 'MLP', 'Model', 'ForCausalLM' or the like for a module of a known family; None for any other."""
    return _known(module)[1]


def swaps_of(module: nn.Module) -> Mapping[str, Maker]:
    """How modules of this one's family are swapped, by their roles; nothing for a module of no known family."""
    family, _ = _known(module)
    return _file(family).SWAPS if family else {}


def fused_types() -> Iterator[str]:
    """The model_types whose attention and MLP have fused forms."""
    return (kind for family, types in FAMILIES.items() if {"Attention", "MLP"} <= _file(family).SWAPS.keys() for kind in types)


def reader_of(model: Any) -> Reader | None:
    """How it is decoded; None for a model of no known family. One of our own says so itself."""
    if (own := getattr(type(model), "reader", None)) is not None:
        return own(model)
    family, role = _known(model)
    maker = _file(family).DECODING.get(role) if family else None
    return None if maker is None else maker(model)


def runner_of(model: nn.Module) -> Any:
    """Return the module with the runners of a model's family; None where decode/ runs the model itself."""
    name = RUNNERS.get(_known(model)[0] or "")
    return None if name is None else import_module(name, __package__)


def decoded() -> Iterator[str]:
    """How the classes' names begin of models that the fused kernels decode."""
    return (prefix for family, types in FAMILIES.items() if family not in RUNNERS for prefix in types.values())


def _file(family: str) -> Any:
    """Imports transformers, as the model has that leads here."""
    found = import_module(f".{family}", __package__)
    return import_module(".family", found.__name__) if hasattr(found, "__path__") else found


def _known(module: nn.Module) -> tuple[str | None, str | None]:
    """(family, role), or two Nones."""
    kind = getattr(type(module), "original", type(module))
    for family, types in FAMILIES.items():
        for model_type, prefix in types.items():
            if kind.__module__ == f"transformers.models.{model_type}.modeling_{model_type}":
                return family, kind.__name__.removeprefix(prefix)
    return None, None


@dataclass(frozen=True)
class Sizes:
    """What a run must know of a model's shape: how many ids it takes, and what its arithmetic comes to."""

    vocabulary: int
    product_parameters: int  # multiplied with every token
    layers: int
    width: int  # of a layer's attention: all heads together


def trainable() -> list[Any]:
    """The `training.py` of each family."""
    return [import_module(f".{folder}.training", __package__) for folder in TRAINABLE]


def presets() -> list[str]:
    return [name for family in trainable() for name in family.PRESETS]


def is_named(model: str) -> bool:
    """Whether `model` is a name, and no folder's."""
    return any(model in family.MODELS for family in trainable())


def family_of(model: str) -> Any:
    """The family that makes the model of this name, or reads the one in this folder. The first where none does: its `load`
    says what it wants."""
    families = trainable()
    named = next((family for family in families if model in family.MODELS), None)
    return named or next((family for family in families if family.reads(Path(model))), families[0])
