"""A tiny configuration for every causal language model of transformers, one for each model_type."""

import functools
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 89
SIZES = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_layers", "n_shared_experts", "n_group", "topk_group", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 96),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "encoder_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "sliding_window": 9, "mamba_d_head": 16, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LOCAL = ["sliding_attention", "full_attention"]
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 12}  # fmt: skip
MLA = {"num_key_value_heads": 4}  # latent attention has as many of both
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
          "patch_size": 14, "vocab_size": VOCABULARY}  # fmt: skip
BERT = {"pad_token_id": 1}  # positions are counted from the padding's id
# What these need besides, or in the place of SIZES.
OTHERS: dict[str, dict[str, Any]] = {
    "cwm": SPECIAL,
    "modernbert-decoder": SPECIAL,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 12], "num_hash_functions": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "xmod": BERT | {"languages": ["en"], "default_language": "en"},
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), BERT),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "sarvam_mla", "youtu",
         "dots3_note_text"), MLA
    ),
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": HYBRID["layer_types"]},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                   "chunk_size": 8},
    "codegen": {"rotary_dim": 4},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), HYBRID),
    "gptj": {"rotary_dim": 4},
    "xlm": {"pad_index": 2},
    "gemma3": {"text_config": "gemma3_text", "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma3n_text": {"layer_types": LOCAL, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
                     "vocab_size_per_layer_input": VOCABULARY, "intermediate_size": 48, "activation_sparsity_pattern": None},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16,
                    "num_kv_shared_layers": 0, "layer_types": LOCAL},
    "gemma4_unified_text": {"global_head_dim": 16, "layer_types": LOCAL, "num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
}  # fmt: skip
TOWERS = "a model of images or sounds: a tiny configuration would be one of each of its parts"
SKIPPED: dict[str, str] = {
    **dict.fromkeys(("blt", "dots3_note", "emu3", "fuyu", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4",
                     "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5",
                     "qwen3_5_moe", "qwen4_exp"), TOWERS),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts from another model's hidden states"),
    **dict.fromkeys(("zamba", "zamba2"), "recurrent, with layers that share one block: no configuration of two layers builds"),
    "cohere_compass_text": "its layers' kinds are those of a model of images",
    "dbrx": "its configuration keeps its rotary base in a part of its own, which the model of this version does not read",
}  # fmt: skip
"""Types without a tiny configuration, and why."""
# Exported, and not among those that the Auto class knows
UNMAPPED = {
    "clvp_decoder": "ClvpForCausalLM",
    "csm_depth_decoder_model": "CsmDepthDecoderForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
CLASSES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | UNMAPPED
TYPES = sorted(CLASSES)


def config_of(kind: str) -> Any:
    """Return the tiny configuration of a model_type: SIZES as far as its class has them, and OTHERS."""
    made = transformers.CONFIG_MAPPING[kind]
    known = set(signature(made.__init__).parameters) | set(getattr(made, "attribute_map", ()))
    known |= {field.name for field in fields(made)} if is_dataclass(made) else set()
    others = OTHERS.get(kind, {})
    if isinstance(text := others.get("text_config"), str):
        others = others | {"text_config": config_of(text).to_dict()}
    return made(**{key: value for key, value in SIZES.items() if key in known} | others)


@functools.cache
def class_of(kind: str) -> type:
    return getattr(transformers, CLASSES[kind])


def tiny(kind: str) -> torch.nn.Module:
    """Return a model of this model_type in eval mode, with random weights large enough that attention decides the tokens."""
    torch.manual_seed(0)
    model = class_of(kind)(config_of(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model
