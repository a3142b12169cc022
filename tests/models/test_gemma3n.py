"""Gemma 3n: its attention and MLPs are placed, its own forward is decoded."""

import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

import gpubound as gb

from ..decode import cases
from ..place.models import assert_close, batch, place, rows, training_run, twin


def build():
    """Two of four layers keep the largest values of their gates, and the other two share keys."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in cases.SIZES.items() if key != "tie_word_embeddings"}
    options = {
        "num_hidden_layers": 4, "layer_types": cases.LOCAL["layer_types"] * 2, "sliding_window": 9, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": cases.VOCABULARY, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    }  # fmt: skip
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**sizes | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.2)
    return model


def test_attention_and_mlps_are_placed():
    model = build()
    other = twin(model)
    placement = place(model)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    found = rows(placement)
    assert placement.verified and "one product" in found["model.layers.0.mlp"].kernel
    assert all("one product" in found[f"model.layers.{number}.self_attn"].kernel for number in range(4))
    assert found["(the model)"].kernel.startswith("loss without whole logits")


def test_its_own_forward_is_decoded():
    fast = gb.decoder(build(), 2, cases.ROOM)
    assert "AltUp" in fast.path
    cases.assert_greedy(fast, cases.prompts(19, 3), 9)
