"""What is changed on a placed model changes what it computes, as on one that is not placed."""

import pytest
import torch

from .models import assert_close, batch, place, tiny, tokens, training_run, twin


def set_eps(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", 0.5)


CHANGES = {
    "eps of llama": ("llama", set_eps),
    "eps of qwen3, heads too": ("qwen3", set_eps),
    "eps of gemma": ("gemma", set_eps),
    "eps of olmo2": ("olmo2", set_eps),
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
    want = training_run(other, batch())
    assert abs(want["loss"] - before) > 1e-4, "the change changes something"
    assert_close(training_run(model, batch()), want)
    with torch.no_grad():
        logits = [each.eval()(tokens(), use_cache=False).logits for each in (model, other)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
