"""config.json in and out: the shape of a decoder in Hugging Face's words. Every field is checked before it is used."""

from pathlib import Path
from typing import Any

import torch

from ...errors import DataError
from ...files import read_json
from ..registry import FAMILIES
from .decoder import DecoderConfig

COMPUTED = ("llama", "mistral", "qwen2", "qwen3")  # what our decoder computes, of the kind's model_types
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CURE = "download the model again"
LARGEST = 2**24  # of any size: two of them multiplied still fit into the 63 bits that torch counts bytes in


class Beyond(DataError):
    """The config is whole, but our decoder cannot compute such a model."""


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise DataError(f"{folder} is not a Hugging Face model folder: it has no config.json; give a folder with one.")
    return read_json(folder / "config.json", CURE)


def dtype_of(about: dict[str, Any], folder: Path) -> torch.dtype:
    """The dtype that the weights were saved in."""
    told = about.get("dtype") or about.get("torch_dtype") or "float32"
    name = told.removeprefix("torch.") if isinstance(told, str) else None
    if name not in DTYPES:
        raise DataError(f"{folder / 'config.json'}: dtype: got {told!r}, wanted one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def config_of(about: dict[str, Any], path: Path) -> DecoderConfig:
    """The decoder's shape from a config.json; what the decoder cannot do is refused by name."""
    fields = _Fields(about, path / "config.json")
    family = about.get("model_type")
    if family not in COMPUTED:
        raise Beyond(
            f"{path}: model_type is {family!r}, wanted one of {', '.join(COMPUTED)}; use transformers with gb.place instead."
        )
    rope, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    kind = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    positions, heads = fields.size("max_position_embeddings", largest=2**31), fields.size("num_attention_heads")
    window = about.get("sliding_window") if about.get("use_sliding_window", family == "mistral") else None
    if window is not None:
        fields.size("sliding_window", largest=2**31)
    for name, there in (
        (f"rope scaling {kind!r}", kind != "default"),
        (f"hidden_act {about.get('hidden_act')!r}", about.get("hidden_act", "silu") != "silu"),
        ("a sliding window shorter than its positions", window is not None and window < positions),
        ("a bias on o_proj or the MLP", family == "llama" and (about.get("attention_bias") or about.get("mlp_bias"))),
    ):
        if there:
            raise Beyond(f"{path}: the decoder has no {name}; use transformers with gb.place, which does.")
    kv_heads = fields.size("num_key_value_heads", heads)
    hidden, head_dim = fields.size("hidden_size"), fields.size("head_dim", 0) or None
    if (heads % kv_heads) or (head_dim is None and hidden % heads) or (head_dim or hidden // heads) % 2:
        raise DataError(
            f"{path / 'config.json'}: got hidden_size {hidden}, num_attention_heads {heads}, num_key_value_heads {kv_heads}, "
            f"head_dim {head_dim}; wanted heads that divide hidden_size, key and value heads that divide the heads, and heads "
            "of an even width."
        )
    return DecoderConfig(
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        head_width=head_dim,
        rope_theta=fields.number("rope_theta", rope.get("rope_theta", about.get("rope_theta", 10000.0))),
        eps=fields.number("rms_norm_eps", about.get("rms_norm_eps")),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        positions=positions,
    )


class _Fields:
    """Fields of a config.json, each named when it is not what it should be."""

    def __init__(self, about: dict[str, Any], file: Path) -> None:
        self.about, self.file = about, file

    def size(self, name: str, default: int | None = None, largest: int = LARGEST) -> int:
        value = self.about.get(name)
        value = default if value is None else value
        if value is None:
            raise DataError(f"{self.file} has no {name!r}; is it a model's?")
        if not isinstance(value, int) or isinstance(value, bool) or not (0 < value <= largest or value == default):
            raise self._wrong(name, value, f"a whole number from 1 to {largest}")
        return value

    def number(self, name: str, value: Any) -> float:
        if value is None:
            raise DataError(f"{self.file} has no {name!r}; is it a model's?")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.about.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self.about.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, value, "an object or null")
        return value or {}

    def _wrong(self, name: str, value: Any, wanted: str) -> DataError:
        return DataError(f"{self.file}: {name}: got {value!r}, wanted {wanted}.")


def hf_config(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model of this shape."""
    if config.qkv_bias and config.qk_norm:
        raise ValueError("save_hf: no Hugging Face family has both q/k/v biases and normed heads; set one of them off.")
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    return {
        "architectures": [f"{FAMILIES['llama'][family]}ForCausalLM"],
        "model_type": family,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
