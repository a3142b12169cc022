"""Tiny models of every family, placed on the CPU, and how two of them are compared."""

import copy
import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gpubound as gb

VOCABULARY = 89
CONFIGS = [
    "llama", "llama tied", "llama biased", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3", "gemma4",
    "gemma4_unified", "olmo2", "phi3", "ministral", "ministral3", "cwm", "seed_oss", "vaultgemma", "granite", "exaone4", "glm",
    "glm4", "ernie4_5", "olmo3", "cohere", "cohere2", "starcoder2", "phi", "arcee", "helium", "jais2", "olmo", "deepseek_v2",
    "deepseek_v3", "youtu", "minicpm3", "gpt_oss", "mellum",
]  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 5, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "max_position_embeddings": 64}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 6}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
TYPED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}
OPTIONS = {
    "llama tied": {"tie_word_embeddings": True},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "smollm3": {"num_hidden_layers": 4},  # its fourth layer has no positions
    "gemma2": {
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": None,
        "sliding_window": 24,
    },
    "gemma3": GEMMA,
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": GEMMA["layer_types"] * 2,
        "sliding_window": 5,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_unified": {
        "layer_types": GEMMA["layer_types"],
        "sliding_window": 5,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "exaone4": {"layer_types": GEMMA["layer_types"], "sliding_window": 5},
    "glm": {"rope_parameters": HALF},
    "glm4": {"rope_parameters": HALF, "attention_bias": True},
    "ernie4_5": {"use_bias": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 0.25, "residual_multiplier": 0.4, "attention_multiplier": 0.7},
    "ministral": {"layer_types": GEMMA["layer_types"], "sliding_window": 5},
    "cwm": {
        "layer_types": GEMMA["layer_types"],
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "ministral3": {"rope_parameters": YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7}},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True, "attention_dropout": 0.2, "residual_dropout": 0.3},
    "vaultgemma": GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": None, "sliding_window": 5},
    "olmo3": {"layer_types": GEMMA["layer_types"], "sliding_window": 5, "rope_parameters": TYPED},
    "phi3": {"rope_parameters": HALF},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "layer_types": GEMMA["layer_types"], "sliding_window": 5},
    "starcoder2": {"attention_dropout": 0.2, "residual_dropout": 0.3, "sliding_window": 24},
    "phi": {"rope_parameters": HALF},
    "deepseek_v2": LATENT | EXPERTS | {"q_lora_rank": None},
    "deepseek_v3": LATENT
    | EXPERTS
    | {
        "n_group": 2,
        "topk_group": 1,
        "attention_bias": True,
        "rope_parameters": YARN | {"original_max_position_embeddings": 8},
    },
    "mellum": {
        "layer_types": GEMMA["layer_types"],
        "sliding_window": 5,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": TYPED,
    },
    "youtu": LATENT | {"rope_interleave": False},
    "minicpm3": LATENT | {"scale_emb": 3.0, "scale_depth": 0.6, "dim_model_base": 8},
}


def place(model, device="cpu", **options):
    return gb.place(model, device, **options)


def rows(placement):
    return {row.module: row for row in placement.rows}


def tiny(kind="llama", dtype=torch.float32, attention="sdpa", **options):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # large enough for attention to look at something
    }
    chosen = sizes | {"tie_word_embeddings": False} | OPTIONS.get(kind, {}) | options
    if "qk_rope_head_dim" in chosen:  # which is the width that rotary angles have
        chosen["head_dim"] = chosen["qk_rope_head_dim"]
    family = kind.partition(" ")[0]
    config = AutoConfig.for_model(f"{family}_text" if family in ("gemma3", "gemma4", "gemma4_unified") else family, **chosen)
    torch.manual_seed(0)
    if kind in ("gemma2", "gpt_oss", "vaultgemma") and attention == "sdpa":
        attention = "eager"  # SDPA leaves caps and sinks out, where transformers does not refuse it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.uniform_(-0.5, 0.5) if "gemma" in kind and "gemma4" not in kind else p.uniform_(0.5, 1.5)
            if "gemma4" in kind and name.endswith("q_norm.weight"):  # as trained ones: scores have no other factor
                p.mul_(p.numel() ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.2)
    return model.to(dtype)


@functools.cache
def placed(kind):
    """(a placed model, the same one before, its placement), for tests that only run them or twins of them."""
    model = tiny(kind)
    other = twin(model)
    return model, other, place(model, strict=True)


def tokens(rows=2, length=12, seed=0):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(**options):
    ids = tokens(**options)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def twin(model):
    """The model as it is now, to compare with after placing."""
    return copy.deepcopy(model)


def training_run(model, inputs):
    """Loss and every gradient by name."""
    torch.manual_seed(0)  # of dropout
    model.train()
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.clone()
    model.zero_grad()
    return found


def assert_near(got, want, tolerance=2e-5):
    """Relative error in the norm. Of single elements the smallest may be any number's rounding."""
    error = (got.double() - want.double()).norm().item() / want.double().norm().item()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


def assert_close(got, want, tolerance=2e-5):
    """Relative error in the norm of each tensor; nearly-zero gradients against a thousandth of the largest."""
    assert got.keys() == want.keys()
    floor = 1e-3 * max(t.double().norm().item() for t in want.values())
    for name, b in want.items():
        error = (got[name].double() - b.double()).norm().item() / max(b.double().norm().item(), floor)
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
