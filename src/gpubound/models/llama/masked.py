"""config.json of masked diffusion checkpoints that a Decoder computes: LLaDA and Dream. Their Python code is not run.

LLaDA is a Llama that attends in both directions, with OLMo's names of fields and tensors (models/storing.py renames these).
Dream is a Qwen2 that attends in both directions, and still predicts a token at the position before it.

A config may ask for another computation by many fields. Each field is one of those that are read here, or known to change
nothing in eval mode, or has the one value that a Decoder computes; all others are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..folder import LARGEST, ConfigFields
from .decoder import DecoderConfig

LLADA, DREAM = "llada", "Dream"  # model_type
NO_EFFECT = frozenset((
    "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "bos_token_id", "eos_token_id",
    "pad_token_id", "mask_token_id", "use_cache", "attention_dropout", "initializer_range",
    # LLaDA
    "attention_layer_norm_with_affine", "alibi_bias_max", "embedding_dropout", "residual_dropout", "flash_attention",
    "init_cutoff_factor", "init_device", "init_fn", "init_std", "precision", "rope_full_precision",
    # Dream
    "max_window_layers", "sliding_window",
))  # fmt: skip
LLADA_READ = frozenset((
    "d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_hidden_size", "mlp_ratio", "vocab_size", "embedding_size",
    "weight_tying", "rope_theta", "rms_norm_eps", "max_sequence_length", "include_qkv_bias",
))  # fmt: skip
DREAM_READ = frozenset((
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings", "rope_theta", "rms_norm_eps", "max_position_embeddings",
))  # fmt: skip
# Values that a Decoder computes; the first is written. None where a missing field means the same.
LLADA_FIXED: dict[str, tuple[Any, ...]] = {
    "architectures": (["LLaDAModelLM"], None), "block_type": ("llama",), "activation_type": ("silu",),
    "layer_norm_type": ("rms",), "rope": (True,), "include_bias": (False,), "layer_norm_with_affine": (True, None),
    "bias_for_layer_norm": (False,), "attention_layer_norm": (False, None), "alibi": (False, None),
    "input_emb_norm": (False, None), "scale_logits": (False, None), "block_group_size": (1, None),
    "multi_query_attention": (None, False), "clip_qkv": (None,),
}  # fmt: skip
DREAM_FIXED: dict[str, tuple[Any, ...]] = {
    "architectures": (["DreamModel"], None), "hidden_act": ("silu",), "rope_scaling": (None,), "use_mrope": (False, None),
    "use_sliding_window": (False, None), "attention_bias": (True, None),
}  # fmt: skip


def masked_config(about: dict[str, Any], path: Path) -> DecoderConfig:
    """Convert a config.json of LLaDA or Dream to a DecoderConfig."""
    file, llada = path / "config.json", about["model_type"] == LLADA
    _check(about, file, LLADA_FIXED if llada else DREAM_FIXED, LLADA_READ if llada else DREAM_READ)
    fields = ConfigFields(about, file)
    mask = about.get("mask_token_id")
    if mask is not None:
        fields.size("mask_token_id")
    config = _llada(fields, path) if llada else _dream(fields, path)
    if mask is not None and mask >= config.vocabulary:
        raise DataError(f"{file}: mask_token_id: got {mask}, but the vocabulary has {config.vocabulary} tokens; correct one.")
    return config


def _check(about: Mapping[str, Any], file: Path, fixed: Mapping[str, tuple[Any, ...]], read: Collection[str]) -> None:
    for name in sorted(about.keys() | fixed.keys()):
        value = about.get(name)
        if name in fixed:
            if value not in fixed[name]:
                raise DataError(f"{file}: {name}: got {value!r}, and the decoder computes {fixed[name][0]!r} alone.")
        elif name not in read and name not in NO_EFFECT and value is not None:
            raise DataError(f"{file}: {name}: got {value!r}, an option that the reader of {about['model_type']} does not know.")


def _llada(fields: ConfigFields, path: Path) -> DecoderConfig:
    hidden, heads = fields.size("d_model"), fields.size("n_heads")
    return _config(
        path,
        hidden=hidden,
        intermediate=fields.size("mlp_hidden_size", min(hidden * fields.size("mlp_ratio", 4), LARGEST)),
        layers=fields.size("n_layers"),
        heads=heads,
        kv_heads=fields.size("n_kv_heads", heads),
        vocabulary=fields.size("embedding_size", fields.size("vocab_size")),
        tied=fields.flag("weight_tying"),
        rope_theta=fields.number("rope_theta", fields.about.get("rope_theta")),
        eps=fields.number("rms_norm_eps", fields.about.get("rms_norm_eps")),
        qkv_bias=fields.flag("include_qkv_bias"),
        positions=fields.size("max_sequence_length", largest=2**31),
    )


def _dream(fields: ConfigFields, path: Path) -> DecoderConfig:
    heads = fields.size("num_attention_heads")
    config = _config(
        path,
        hidden=fields.size("hidden_size"),
        intermediate=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        vocabulary=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        rope_theta=fields.number("rope_theta", fields.about.get("rope_theta")),
        eps=fields.number("rms_norm_eps", fields.about.get("rms_norm_eps")),
        qkv_bias=True,
        positions=fields.size("max_position_embeddings", largest=2**31),
    )
    return replace(config, shifted=True)


def _config(path: Path, **values: Any) -> DecoderConfig:
    try:
        config = DecoderConfig(**values, causal=False)
    except ValueError as error:
        raise DataError(f"{path / 'config.json'}: {error}") from error
    if config.head_dim % 2:
        raise DataError(
            f"{path / 'config.json'}: got heads {config.head_dim} wide, wanted an even width; rotation works on pairs."
        )
    return config


def masked_hf_config(config: DecoderConfig, dtype: str, mask_token: int | None) -> dict[str, Any]:
    """Return the config.json of a Decoder with causal=False: Dream's if its predictions are shifted, else LLaDA's."""
    for field, value, wanted in (
        ("qk_norm", config.qk_norm, False),
        ("rope_factor", config.rope_factor, 1.0),
        ("head_width", config.heads * config.head_dim, config.hidden),
        ("qkv_bias", config.qkv_bias, config.qkv_bias or config.shifted),
    ):
        if value != wanted:
            raise ValueError(
                f"save_hf: {field}: got {getattr(config, field)!r}, which no LLaDA or Dream has; save its state_dict instead."
            )
    common: dict[str, Any] = {
        "model_type": DREAM if config.shifted else LLADA,
        "torch_dtype": dtype,
        "mask_token_id": mask_token,
    }
    common |= {"vocab_size": config.vocabulary, "rope_theta": config.rope_theta, "rms_norm_eps": config.eps}
    fixed = {name: values[0] for name, values in (DREAM_FIXED if config.shifted else LLADA_FIXED).items()}
    if config.shifted:
        return fixed | common | {
            "hidden_size": config.hidden,
            "intermediate_size": config.intermediate,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "tie_word_embeddings": config.tied,
            "max_position_embeddings": config.positions,
        }  # fmt: skip
    return fixed | common | {
        "embedding_size": config.vocabulary,
        "d_model": config.hidden,
        "mlp_hidden_size": config.intermediate,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "n_kv_heads": config.kv_heads,
        "weight_tying": config.tied,
        "include_qkv_bias": config.qkv_bias,
        "max_sequence_length": config.positions,
    }  # fmt: skip
