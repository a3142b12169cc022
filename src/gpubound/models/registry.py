"""Which families there are, a line each: the folder here that knows one, and what transformers calls its models.

Hugging Face's modules are known by name and home: `LlamaMLP` of transformers.models.llama.modeling_llama, and its like. A
subclass of a user's own lives elsewhere, may compute something else, and is left alone.

A folder answers what the rest of the library asks of its family, each question in a file of its own that is imported when it
is first asked: how its modules are swapped in `placing.py` (models/placing.py has the words).
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from torch import nn

from .placing import Maker

FAMILIES = {
    # folder: {model_type: how its classes' names begin}
    "llama": {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"},
    "mixtral": {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"},
    "gemma2": {"gemma2": "Gemma2"},
    "gemma3": {"gemma3": "Gemma3"},
    "olmo2": {"olmo2": "Olmo2"},
    "phi3": {"phi3": "Phi3"},
}


def role_of(module: nn.Module, family: str | None = None) -> str | None:
    """'RMSNorm', 'Attention', 'MLP', 'DecoderLayer', 'Model', 'ForCausalLM' or the like for a module of a known family, or of
    the one that is named; None for any other."""
    known, role = _known(module)
    return role if family in (None, known) else None


def swaps_of(module: nn.Module) -> Mapping[str, Maker]:
    """How modules of this one's family are swapped, by their roles; nothing for a module of no known family."""
    family, _ = _known(module)
    return _swaps(family) if family else {}


def fused_types() -> Iterator[str]:
    """The model_types whose attention and MLP have fused forms."""
    return (kind for family, types in FAMILIES.items() if {"Attention", "MLP"} <= _swaps(family).keys() for kind in types)


def _swaps(family: str) -> Mapping[str, Maker]:
    """Imports transformers, as the model has that leads here."""
    return import_module(f".{family}.placing", __package__).SWAPS


def _known(module: nn.Module) -> tuple[str | None, str | None]:
    """(family, role), or two Nones."""
    kind = getattr(type(module), "original", type(module))
    for family, types in FAMILIES.items():
        for model_type, prefix in types.items():
            if kind.__module__ == f"transformers.models.{model_type}.modeling_{model_type}":
                return family, kind.__name__.removeprefix(prefix)
    return None, None
