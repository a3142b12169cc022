"""OLMo 2, placed: norms behind the parts of a block, and over whole rows. tests/place has what every family is held to."""

import torch

from tests.messages import message

from ..place.models import assert_close, batch, place, rows, tiny, training_run, twin


def test_the_table_says_what_runs_and_why():
    model = tiny("olmo2")
    placement = place(model, strict=True)
    found = rows(placement)
    assert found["model"].kernel == message("models/olmo2:the_table_says_what_runs")
    assert found["model.layers.0.self_attn"].kernel == message("models/olmo2:the_table_says_what_runs.2")
    assert placement.unsupported is None


def test_norms_of_whole_rows_are_not_those_of_heads():
    model = tiny("olmo2")
    attention = model.model.layers[0].self_attn
    assert attention.q_norm.weight.shape == (32,) and attention.k_norm.weight.shape == (16,)
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), want)
    assert placement.fallbacks == 0


def test_gradient_checkpointing():
    model = tiny("olmo2")
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its older name
    enable({"use_reentrant": False})
    assert_close(training_run(model, batch()), want)
    assert placement.fallbacks == 0


def test_autocast():
    model = tiny("olmo2")
    other = twin(model)
    placement = place(model, strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = training_run(model, batch()), training_run(other, batch())
    assert all(g.dtype == want[name].dtype for name, g in got.items())
    assert_close(got, want, 5e-2)
    assert placement.fallbacks == 0
