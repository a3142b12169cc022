"""Placed models whose layers mix tokens by a recurrence: the loss and gradients of transformers."""

import functools

import pytest
import torch
from transformers import DynamicCache

from gpubound.decode.weight_view import bind
from gpubound.models.registry import cache_name
from tests.decode import cases
from tests.place.models import assert_close, batch, place, training_run, twin

KINDS = ["Qwen3_5", "Qwen3Next", *cases.MAMBA]


@functools.cache
def pair(kind):
    """(a placed model, the same one as it was, the placement)"""
    model = cases.build(kind)
    return model, twin(model), place(model, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_gradients_of_transformers(kind):
    """Of several chunks, with padding and without."""
    model, other, placement = pair(kind)
    assert placement.verified and any("chunk_scan" in str(row.kernel) for row in placement.rows), str(placement)
    inputs = batch()
    long = {name: t.repeat(1, 8)[:, :90] for name, t in inputs.items()}
    mask = torch.ones_like(long["input_ids"])
    mask[0, :5] = mask[1, 70:] = 0
    padded = long | {"attention_mask": mask, "labels": long["labels"].masked_fill(mask == 0, -100)}
    for given in (long, padded):
        assert_close(training_run(model, given), training_run(other, given), 5e-5)
    assert placement.fallbacks == 0, [(row.module, row.reasons) for row in placement.rows if row.fallbacks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_takes_the_modules_own_forward(kind):
    (prompt,) = cases.prompts(20)
    placed, other = pair(kind)[:2]
    assert cases.hugging_face(placed.eval(), prompt, 6) == cases.hugging_face(other.eval(), prompt, 6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "cache_params"])
@pytest.mark.parametrize("kind", ["Qwen3Next", "Mamba2"])
def test_a_layer_takes_its_cache_by_either_name(kind, name):
    """transformers 5.24 renamed it. The second call reads the state that the first has left."""
    placed, other = pair(kind)[:2]
    find = {
        "Qwen3Next": lambda model: model.model.layers[0].linear_attn,
        "Mamba2": lambda model: model.backbone.layers[0].mixer,
    }
    layer, own = find[kind](placed.eval()), find[kind](other.eval())
    x, caches = torch.randn(2, 1, 6, placed.config.hidden_size), [DynamicCache(config=placed.config) for _ in range(2)]
    for part in (x[0], x[1, :, :1]):
        got = layer(part, **{name: caches[0]})
        torch.testing.assert_close(got, own(part, **{cache_name(type(own).forward) or "cache_params": caches[1]}))
    assert not torch.allclose(got, layer(x[1, :, :1]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mlp_bias": True}, "biases"),
        ({"mlp_multipliers": [0.0, 1.0]}, "not above 0"),
        ({"key_multiplier": -0.6}, "key_multiplier=-0.6 is not above 0"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "before their gate"),
        ({"time_step_limit": (0.0, 0.5)}, "time_step_limit"),
    ],
)
def test_what_falcon_h1_leaves_to_transformers(options, why):
    """The decoder says why, and placing leaves the module as it was."""
    model = cases.build("FalconH1", **options)
    reason = bind(model, 32)
    assert isinstance(reason, str) and why in reason
    other, inputs = twin(model), batch()
    assert place(model).verified
    assert_close(training_run(model, inputs), training_run(other, inputs), 5e-5)
