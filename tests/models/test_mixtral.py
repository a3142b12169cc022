"""Models with sparse layers, placed: attention, norms and the loss are ours, experts transformers' own."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from ..place.models import VOCABULARY, assert_close, batch, place, rows, training_run, twin

SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
KINDS = {
    "mixtral": (MixtralConfig, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (Qwen2MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "glm4_moe": (Glm4MoeConfig, {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "dots1": (Dots1Config, {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}),
    "solar_open": (SolarOpenConfig, {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": (MiniMaxM2Config, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_ours_and_the_rest_stays(kind):
    config, own = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES | own))
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), want)
    found = rows(placement)
    assert found["model.layers.1.self_attn"].kernel.startswith("torch" if kind == "gpt_oss" else "q, k, v as one product")
    assert found["model.layers.1.mlp.experts"].why == "unchanged"
    assert found["(the model)"].kernel == "loss without whole logits: reference linear_cross_entropy"
    assert placement.unsupported is None and placement.fallbacks == 0


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("by", ["config", "argument"])
def test_a_loss_with_the_routers_stays(kind, by):
    config, own = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES | own, router_aux_loss_coef=0.5))
    plain = training_run(twin(model), batch())["loss"]
    if by == "config":
        model.config.output_router_logits = True
    inputs = batch() if by == "config" else batch() | {"output_router_logits": True}
    want = training_run(twin(model), inputs)
    placement = place(model)
    assert_close(training_run(model, inputs), want)
    assert (want["loss"] - plain).abs() > 0.1 and placement.fallbacks > 0
    outputs = model.train()(**inputs)
    assert outputs.aux_loss > 0 and len(outputs.router_logits) == 2
    model.config.output_router_logits = False
    outputs = model(**batch())
    assert outputs.aux_loss is None and outputs.logits is None


def test_clamped_queries_keep_their_attention():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, clip_qkv=0.05))
    placement = place(model)
    found = rows(placement)["model.layers.0.self_attn"]
    assert found.kernel == "torch" and "clip_qkv=0.05" in found.why
