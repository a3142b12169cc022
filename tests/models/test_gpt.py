"""GPT-NeoX and GPT-2: copies of weights in another layout, learnt positions, and what is refused."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.weight_view import bind

from ..decode import cases

KINDS = {"GPT2": "transformer.h.1.attn.c_attn", "GPTNeoX": "gpt_neox.layers.1.attention.query_key_value"}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_changed_are_copied_again_to_the_same_place(kind):
    fast = cases.shared(kind, max_batch=2)
    layer, before = fast.model.get_submodule(KINDS[kind]), cases.of_decoder(fast)
    weights, taken = (layer.weight.detach().clone(), layer.bias.detach().clone()), fast.body.taken
    with torch.no_grad():
        layer.weight.neg_()
        layer.bias.add_(1.0)
    changed = cases.of_decoder(fast)
    assert changed == cases.greedy_by_forwards(fast.model, cases.PROMPT, 12) != before
    with torch.no_grad():
        layer.weight.copy_(weights[0])
        layer.bias.copy_(weights[1])
    assert cases.of_decoder(fast) == before and fast.body.taken == taken


def test_texts_end_where_the_learnt_positions_do():
    model = cases.build("GPT2")
    assert bind(model, cases.ROOM + 1) == f"it has {cases.ROOM} positions, and max_length is {cases.ROOM + 1}"
    fast, prompt = gb.decoder(model, 1, cases.ROOM), cases.prompts(cases.ROOM - 3)[0]
    assert fast.generate(prompt, max_new_tokens=3).tokens[0] == cases.greedy_by_forwards(model, prompt, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_several_devices_are_refused(kind):
    with pytest.raises(ValueError, match="one device runs it"):
        gb.decoder(cases.build(kind), 1, cases.ROOM, devices=["cpu", "cpu"])


@pytest.mark.parametrize("option", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_options_of_gpt2_that_no_reader_knows(option):
    assert bind(cases.build("GPT2", **{option: True})).startswith(f"its config has {option}=True")


def test_blocks_that_are_not_parallel():
    model = cases.build("GPTNeoX", use_parallel_residual=False)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == "" and cases.of_decoder(fast) == cases.greedy_by_forwards(model, cases.PROMPT, 12)
