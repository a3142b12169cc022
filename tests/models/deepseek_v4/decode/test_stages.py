"""DeepSeek-V4 in stages: a hash-routed layer, both kinds of entries and an index, each on a device of its own."""

import pytest
import torch

import gpubound as gb
from tests.messages import message

from . import cases


@pytest.mark.slow
def test_tokens_are_those_of_the_model():
    """Rows that stand before and behind the window's end, in lanes; one of them longer than what an index chooses from."""
    fast = gb.decoder(cases.build(), 4, cases.ROOM, devices=["cpu"] * 3)
    assert [len(span.layers) for span in fast.body.spans] == [1, 1, 1]
    given = [cases.text(length, seed=length).tolist() for length in (3, 30, 11, 1)]
    found = fast.generate(given, max_new_tokens=9).tokens
    for prompt, row in zip(given, found):
        logits = cases.own_logits(fast.model, torch.tensor([*prompt, *row[:-1]]))
        assert row == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_its_cache_has_one_form():
    with pytest.raises(ValueError) as error:
        gb.decoder(cases.model_of(), 1, 64, cache="int8", devices=["cpu", "cpu"])
    assert str(error.value) == message("decode/stages/compressed:its_cache_has_one_form")
