"""What is changed on a placed model changes what it computes, as on one that is not placed."""

import pytest
import torch

from .models import assert_close, batch, place, tiny, tokens, training_run, twin


def set_eps(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", 0.5)


def of_attention(name, value):
    def change(model):
        setattr(model.model.layers[0].self_attn, name, value)

    return change


CHANGES = {
    "eps of llama": ("llama", set_eps),
    "eps of qwen3, heads too": ("qwen3", set_eps),
    "eps of gemma": ("gemma", set_eps),
    "eps of olmo2": ("olmo2", set_eps),
    "is_causal": ("llama", of_attention("is_causal", False)),
    "is_causal of phi3": ("phi3", of_attention("is_causal", False)),
    "attention_dropout": ("llama", of_attention("attention_dropout", 0.5)),
    "attention_dropout of gemma2": ("gemma2", of_attention("attention_dropout", 0.5)),
    "use_rope": ("smollm3", of_attention("use_rope", 0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_heeded(name):
    kind, change = CHANGES[name]
    model = tiny(kind)
    other = twin(model)
    place(model, strict=True)
    before = training_run(model, batch())["loss"]
    for each in (model, other):
        change(each)
    torch.manual_seed(0)
    want = training_run(other, batch())
    torch.manual_seed(0)
    got = training_run(model, batch())
    assert abs(want["loss"] - before) > 1e-4, "the change changes something"
    assert_close(got, want)
    with torch.no_grad():
        logits = [each.eval()(tokens(), use_cache=False).logits for each in (model, other)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
