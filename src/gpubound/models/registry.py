"""Registry of model families: the module that implements a family, and the class names that transformers gives its models.

Hugging Face modules are recognised by class name and module: `LlamaMLP` of transformers.models.llama.modeling_llama. A user's
subclass lives elsewhere, may compute something else, and is not recognised.

A family's module has two tables by role of a module (Attention, MLP, ForCausalLM, ...): SWAPS, how placing replaces modules
(placing.py), and DECODING, how a model is decoded (decoding.py). It is imported on first use. A family with more than one file
is a package, which has these tables in `family.py`.

A family that is trained by name, or loaded into our own model, is a package in TRAINABLE with a module `checkpoint.py`:

PRESETS, MODELS   configs by name: those that are listed for users; and all that `make` knows, which includes smaller variants
                  (NAME-tiny) and, for models of named parts, NAME+PART
FOREIGN           True if transformers has these models too
make              (name, vocabulary, positions, device) -> a new model
reads, load, save True if a folder is the family's; (folder, device, dtype or None) -> model; (model, folder, tokenizer,
                  iterator over weights or None, overwrite)
config_of         (config.json, folder) -> config; raises Beyond if our own model does not implement it
outline, unread   model of a folder on the meta device, from config.json; the same with checked tensors, for storing.read_parts
sizes, table      `Sizes` of a model; PRESETS as lines of text
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
    # module: {model_type: prefix of its class names}
    "hf_modules": {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"},
    "mixtral": {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"},
    "gemma": {"gemma": "Gemma", "gemma2": "Gemma2"},
    "gemma3": {"gemma3": "Gemma3"},
    "olmo2": {"olmo2": "Olmo2"},
    "phi3": {"phi3": "Phi3"},
    "deepseek_v4": {"deepseek_v4": "DeepseekV4"},
}
# Modules with the runners of families that the fused kernels do not decode, imported when a decoder is built.
RUNNERS = {"deepseek_v4": ".deepseek_v4.decode"}
# (model_type, quant_method) of quantised checkpoints that a family's `checkpoint.load_coded` reads
QUANTIZED = {("deepseek_v4", "fp8")}
TRAINABLE = ("llama", "richards")


def role_of(module: nn.Module) -> str | None:
    """Return the role of a module of a known family ('RMSNorm', 'Attention', 'MLP', 'Model', 'ForCausalLM', ...), or None."""
    return _known(module)[1]


def swaps_of(module: nn.Module) -> Mapping[str, Maker]:
    """Return the SWAPS table of the module's family, empty for an unknown family."""
    family, _ = _known(module)
    return _module(family).SWAPS if family else {}


def fused_types() -> Iterator[str]:
    """Yield the model_types whose attention and MLP have fused replacements."""
    return (
        kind for family, types in FAMILIES.items() if {"Attention", "MLP"} <= _module(family).SWAPS.keys() for kind in types
    )


def reader_of(model: Any) -> Reader | None:
    """Return the model's Reader, or None for an unknown family. Our own models have a class attribute `reader`."""
    if (own := getattr(type(model), "reader", None)) is not None:
        return own(model)
    family, role = _known(model)
    maker = _module(family).DECODING.get(role) if family else None
    return None if maker is None else maker(model)


def runner_of(model: nn.Module) -> Any:
    """Return the module with the runners of a model's family, or None if decode/ runs the model itself."""
    name = RUNNERS.get(_known(model)[0] or "")
    return None if name is None else import_module(name, __package__)


def decoded() -> Iterator[str]:
    """Yield the class name prefixes of models that the fused kernels decode."""
    return (prefix for family, types in FAMILIES.items() if family not in RUNNERS for prefix in types.values())


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return True if this config.json is of a quantised checkpoint that `load_quantized` reads instead of transformers."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and (config.get("model_type"), quantization.get("quant_method")) in QUANTIZED


def load_quantized(config: Mapping[str, Any], *args: Any, **options: Any) -> nn.Module:
    """Load a quantised checkpoint by its family's `checkpoint.load_coded`."""
    return import_module(f".{config['model_type']}.checkpoint", __package__).load_coded(*args, **options)


def _module(family: str) -> Any:
    """Import a family's module, which imports transformers."""
    module = import_module(f".{family}", __package__)
    return import_module(".family", module.__name__) if hasattr(module, "__path__") else module


def _known(module: nn.Module) -> tuple[str | None, str | None]:
    """Return (family, role) of a module, or (None, None)."""
    kind = getattr(type(module), "original", type(module))
    for family, types in FAMILIES.items():
        for model_type, prefix in types.items():
            if kind.__module__ == f"transformers.models.{model_type}.modeling_{model_type}":
                return family, kind.__name__.removeprefix(prefix)
    return None, None


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model that a training run needs: its vocabulary, and those that determine its FLOPs."""

    vocabulary: int
    product_parameters: int  # parameters that every token is multiplied by
    layers: int
    width: int  # of attention: all heads together


def trainable() -> list[Any]:
    """Return the `checkpoint` module of each trainable family."""
    return [import_module(f".{folder}.checkpoint", __package__) for folder in TRAINABLE]


def presets() -> list[str]:
    return [name for family in trainable() for name in family.PRESETS]


def is_named(model: str) -> bool:
    """Return True if `model` is the name of a model, and not a folder."""
    return any(model in family.MODELS for family in trainable())


def family_of(model: str) -> Any:
    """Return the `checkpoint` module of the family that makes the named model, or reads the folder.

    If no family reads the folder, return the first: its `load` raises an error that names the supported models.
    """
    families = trainable()
    named = next((family for family in families if model in family.MODELS), None)
    return named or next((family for family in families if family.reads(Path(model))), families[0])
