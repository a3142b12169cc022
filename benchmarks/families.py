"""Models of families other than Llama: sizes that are published, as configs of transformers, and random weights."""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Train:
    """A training case. `cut`: sizes of a model with fewer layers, so that three processes hold one each."""

    cut: dict[str, Any] = field(default_factory=dict)
    seq: int = 2048
    micro: int = 2


@dataclass(frozen=True)
class Family:
    config: str
    """transformers' class"""
    sizes: dict[str, Any]
    """where they are not the class's defaults"""
    tiny: dict[str, Any]
    """of a dry run, beside TINY"""
    train: Train | None
    sparse: bool = False
    """with experts"""
    delta: bool = False
    """with a gated delta rule, which transformers leaves to FLA where that is installed"""


TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
FAMILIES = {
    "qwen3.5-4b": Family(
        "Qwen3_5TextConfig",
        {
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        Train({"num_hidden_layers": 8}), delta=True,
    ),
    "gemma4-e4b": Family(
        "Gemma4TextConfig",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_key_value_heads": 2,
            "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0,
        },
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 16,
            "global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256,
        },
        Train({"num_hidden_layers": 12, "num_kv_shared_layers": 6}),
    ),
    "gpt-oss-20b": Family(
        "GptOssConfig",
        {
            "num_hidden_layers": 24, "num_local_experts": 32,
            "rope_parameters": {**YARN, "rope_theta": 150_000.0, "factor": 32.0, "truncate": False},
        },
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
        Train({"num_hidden_layers": 4}, micro=1), sparse=True,
    ),
    "glm4-9b": Family(
        "Glm4Config",
        {
            "num_hidden_layers": 40, "attention_bias": False, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
        {},
        Train({"num_hidden_layers": 10}),
    ),
    "deepseek-v2-lite": Family(
        "DeepseekV2Config",
        {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "num_attention_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 6,
            "max_position_embeddings": 163_840,
            "rope_parameters": {**YARN, "rope_theta": 10_000.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        },
        Train({"num_hidden_layers": 4}), sparse=True,
    ),
    "lfm2-1.2b": Family(
        "Lfm2Config",
        {
            "hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {"full_attn_idxs": [1, 3]},
        Train(),
    ),
    "nemotron-h-8b": Family(
        "NemotronHConfig",
        {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
        {
            "hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
            "ssm_state_size": 16, "chunk_size": 16,
        },
        None,  # transformers' own Mamba-2 keeps 17 GB a layer for 2,048 tokens, and nobody patches it
    ),
    "gemma3-4b": Family(
        "Gemma3TextConfig",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16, "query_pre_attn_scalar": 16},
        Train({"num_hidden_layers": 12}),
    ),
}  # fmt: skip
NAMED = ("qwen3.5-4b", "gemma4-e4b", "gpt-oss-20b", "glm4-9b")  # measured first


def config_of(name: str, dry: bool, cut: bool = False) -> Any:
    """Return transformers' config. cut: with the layers of the training case."""
    import transformers

    family, train = FAMILIES[name], train_of(name, dry)
    sizes = family.sizes | (TINY | family.tiny if dry else {}) | (train.cut if cut and train else {})
    return getattr(transformers, family.config)(
        **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


@torch.no_grad()
def build(name: str, device: torch.device, dry: bool, cut: bool = False) -> Any:
    """Return the model with random weights, drawn where it lies: in bf16, and a dry run's in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        dtype = torch.float32 if dry else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config_of(name, dry, cut), dtype=dtype)
    if name.startswith("gemma4"):  # whose scores have no factor: with norms of 1 one key takes all, and rounding chooses which
        for block in model.model.layers:
            block.self_attn.q_norm.weight.mul_(block.self_attn.head_dim**-0.5)
    return model


def by_fla(name: str) -> bool:
    """Return whether transformers computes a built model's gated delta rule by FLA, without which it goes on in silence."""
    return FAMILIES[name].delta and "fla.ops.gated_delta_rule" in sys.modules


def train_of(name: str, dry: bool) -> Train | None:
    """Return the training case of a family, if it has one."""
    train = FAMILIES[name].train
    return Train(seq=16) if train and dry else train


def layers_of(name: str, train: Train) -> str:
    """Return how many of the published layers a training case has, in words; empty for all of them."""
    fewer = train.cut.get("num_hidden_layers")
    return f", {fewer} of {FAMILIES[name].sizes['num_hidden_layers']} layers" if fewer else ""
