"""config.json of masked diffusion checkpoints that a Decoder computes: LLaDA and Dream. Their Python code is not run.

LLaDA is a Llama that attends in both directions, with OLMo's names of fields and tensors (models/storing.py renames these).
Dream is a Qwen2 that attends in both directions, and still predicts a token at the position before it.

A config may ask for another computation by many fields. Each field is one of those that are read here, or known to change
nothing in eval mode, or has the one value that a Decoder computes; all others are refused.
"""

from collections.abc import Collection, Mapping
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
# Fields of a DecoderConfig, and their names in files: those of transformers, which are Dream's, and those of LLaDA.
HF_NAMES = {
    "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size", "tied": "tie_word_embeddings", "rope_theta": "rope_theta",
    "eps": "rms_norm_eps", "positions": "max_position_embeddings",
}  # fmt: skip
LLADA_NAMES = {
    "hidden": "d_model", "intermediate": "mlp_hidden_size", "layers": "n_layers", "heads": "n_heads", "kv_heads": "n_kv_heads",
    "vocabulary": "embedding_size", "tied": "weight_tying", "rope_theta": "rope_theta", "eps": "rms_norm_eps",
    "positions": "max_sequence_length", "qkv_bias": "include_qkv_bias",
}  # fmt: skip
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
    names, fixed = (LLADA_NAMES, LLADA_FIXED) if llada else (HF_NAMES, DREAM_FIXED)
    _check(about, file, fixed, {*names.values(), *(("mlp_ratio", "vocab_size") if llada else ())})
    fields = ConfigFields(about, file)
    mask = about.get("mask_token_id")
    if mask is not None:
        fields.size("mask_token_id")
    if llada:
        intermediate = min(fields.size("d_model") * fields.size("mlp_ratio", 4), LARGEST)
        values = sizes_of(fields, names, intermediate=intermediate, vocabulary=fields.size("vocab_size"))
        values["qkv_bias"] = fields.flag("include_qkv_bias")
    else:
        values = sizes_of(fields, names) | {"qkv_bias": True}
    values["rope_theta"] = fields.number("rope_theta", about.get("rope_theta"))
    try:
        config = DecoderConfig(**values, causal=False, shifted=not llada)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    if config.head_dim % 2:
        raise DataError(f"{file}: got heads {config.head_dim} wide, wanted an even width; rotation works on pairs.")
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


def sizes_of(fields: ConfigFields, names: Mapping[str, str], **defaults: int) -> dict[str, Any]:
    """Return the sizes of a DecoderConfig, whether its head is tied, and eps."""
    defaults["kv_heads"] = fields.size(names["heads"])
    sizes = "hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary"
    values: dict[str, Any] = {name: fields.size(names[name], defaults.get(name)) for name in sizes}
    values["positions"], values["tied"] = fields.size(names["positions"], largest=2**31), fields.flag(names["tied"])
    return values | {"eps": fields.number("rms_norm_eps", fields.about.get("rms_norm_eps"))}


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
    names, fixed = (HF_NAMES, DREAM_FIXED) if config.shifted else (LLADA_NAMES, LLADA_FIXED)
    about = {name: values[0] for name, values in fixed.items()} | {"vocab_size": config.vocabulary}
    about |= {"model_type": DREAM if config.shifted else LLADA, "torch_dtype": dtype, "mask_token_id": mask_token}
    return about | {name: getattr(config, field) for field, name in names.items()}
