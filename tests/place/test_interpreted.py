"""One model through the Triton kernels themselves, in the interpreter on a CPU: the doors, the layers and the loop together."""

import pytest

import gpubound as gb
from tests.messages import message

from .models import assert_close, batch, tiny, training_run, twin


@pytest.mark.slow
def test_the_kernels_train_a_placed_model(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = tiny(hidden_size=16, num_hidden_layers=1, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1).to(
        device
    )
    inputs = {name: t.to(device) for name, t in batch(length=5).items()}
    want = training_run(twin(model), inputs)
    placement = gb.place(model, device, strict=True)
    assert placement.verified and placement.fallbacks == 0
    kernels = {row.module: row.kernel for row in placement.rows}
    assert kernels["model.layers.0.self_attn"] == message("place/interpreted:the_kernels_train_a_plac")
    assert kernels["(the model)"] == message("place/interpreted:the_kernels_train_a_plac.2")
    assert_close(training_run(model, inputs), want, 1e-4)
