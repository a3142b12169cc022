"""Models with sparse layers, placed: attention, norms and the loss are ours, experts transformers' own."""

from functools import partial

import pytest
import torch

from gpubound.train import TrainStep

from ..place.models import assert_close, batch, place, rows, tiny, training_run, twin

KINDS = {
    "mixtral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    "solar_open": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention": "eager"},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_ours_and_the_rest_stays(kind):
    model = tiny(kind, **KINDS[kind])
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), want)
    found = rows(placement)
    assert found["model.layers.1.self_attn"].kernel.startswith("q, k, v as one product")
    assert found["model.layers.1.mlp.experts"].why == "unchanged"
    assert found["(the model)"].kernel == "loss without whole logits: reference linear_cross_entropy"
    assert placement.unsupported is None and placement.fallbacks == 0


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("by", ["config", "argument"])
def test_a_loss_with_the_routers_stays(kind, by):
    model = tiny(kind, **KINDS[kind], router_aux_loss_coef=0.5)
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


@pytest.mark.parametrize("kind, of", [("mixtral", "model"), ("gpt_oss", "model"), ("mixtral", "config"), ("mixtral", "jetmoe")])
def test_a_step_takes_the_routers_loss(kind, of):
    model = tiny(kind, **KINDS[kind], router_aux_loss_coef=0.5)
    model.config.output_router_logits = True
    want = training_run(twin(model), batch())
    if of != "model":
        del model.router_aux_loss_coef
    if of == "jetmoe":  # the other name of the coefficient
        model.aux_loss_coef, model.config.router_aux_loss_coef = 0.5, 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = TrainStep(model.train(), "causal_lm", partial(torch.optim.SGD, lr=1.0), precision="fp32", graph="off")
    loss = torch.tensor(step(batch()).read().loss)
    assert_close({"loss": loss} | {name: before[name] - p.detach() for name, p in model.named_parameters()}, want)


def test_a_step_takes_bambas_z_loss():
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "attn_layer_indices": [1]}
    model = tiny("bamba", **sizes, z_loss_coefficient=0.1)
    want = training_run(twin(model), batch())
    step = TrainStep(model.train(), "causal_lm", precision="fp32", graph="off")
    assert step(batch()).read().loss == pytest.approx(want["loss"].item(), rel=1e-5)


def test_clamped_queries_keep_their_attention():
    placement = place(tiny("olmoe", **KINDS["olmoe"], clip_qkv=0.05))
    found = rows(placement)["model.layers.0.self_attn"]
    assert found.kernel == "torch" and "clip_qkv=0.05" in found.why
