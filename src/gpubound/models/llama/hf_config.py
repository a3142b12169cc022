"""config.json in and out: the shape of a decoder in Hugging Face's words. Every field is checked before it is used."""

from pathlib import Path
from typing import Any

import torch

from ...errors import DataError
from ..folder import Beyond, ConfigFields
from ..registry import FAMILIES
from .decoder import DecoderConfig

COMPUTED = ("llama", "mistral", "qwen2", "qwen3")  # what our decoder computes, of the kind's model_types


def config_of(about: dict[str, Any], path: Path) -> DecoderConfig:
    """The decoder's shape from a config.json; what the decoder cannot do is refused by name."""
    fields = ConfigFields(about, path / "config.json")
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
