"""OLMo 2, placed: norms behind the parts of a block, and over whole rows. tests/place has what every family is held to."""

from tests.messages import message

from ..place.models import place, rows, tiny


def test_the_table_says_what_runs_and_why():
    model = tiny("olmo2")
    placement = place(model, strict=True)
    found = rows(placement)
    assert found["model"].kernel == message("models/olmo:the_table_says_what_runs")
    assert found["model.layers.0.self_attn"].kernel == message("models/olmo:the_table_says_what_runs.2")
    assert placement.unsupported is None
