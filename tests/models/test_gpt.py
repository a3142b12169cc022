"""GPT, OPT and Falcon: copies of weights in another layout, learnt positions, options, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

import gpubound as gb
from gpubound.decode.weight_view import bind
from gpubound.models.gpt import GPTJReader

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
    assert cases.followed(fast) != before
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


@pytest.mark.parametrize("kind", ["GPTNeoX", "GPTBigCode"])
def test_adapters_on_q_k_and_v_of_one_layer(kind):
    model = cases.build(kind)
    gb.lora.add(model, 4, alpha=8, init=False)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == ""
    before = cases.followed(fast)
    with gb.lora.disable(model):
        assert cases.followed(fast) != before


OPTIONS = {
    "Falcon of 7B": ("Falcon", {"new_decoder_architecture": False, "bias": False}),
    "Falcon of RW": (
        "Falcon",
        {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": None},
    ),
    "Falcon 2": ("Falcon", {"num_ln_in_parallel_attn": 1}),
    "StarCoder": ("GPTBigCode", {"multi_query": True}),
    "GPT-J": ("GPTJ", {"scale_attn_weights": False}),
    "GPT-NeoX with a key that it does not read": ("GPTNeoX", {"num_key_value_heads": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    kind, options = OPTIONS[name]
    model = cases.build(kind, **options)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == "" and cases.followed(fast)


@pytest.mark.parametrize(("kind", "option"), [
    ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    ("GPT2", {"add_cross_attention": True}),
    ("OPT", {"do_layer_norm_before": False}),
    ("Falcon", {"alibi": True}),
])  # fmt: skip
def test_options_that_no_reader_knows(kind, option):
    assert bind(cases.build(kind, **option)).startswith(f"its config has {next(iter(option))}=")


def test_embeddings_of_opt_of_another_width():
    assert bind(cases.build("OPT", word_embed_proj_dim=16)).startswith("its embeddings have another width than its layers")


def test_projections_of_gpt2_with_hooks():
    model = cases.build("GPT2")
    model.transformer.h[1].attn.c_attn.register_forward_hook(lambda module, given, found: found)
    assert bind(model).startswith("h.1: a projection is not the family's own")


def test_quantised_q_k_and_v_of_one_layer():
    model = cases.build("GPTNeoX")
    gb.lora.add(model, 4, base="int8")
    assert bind(model) == "layers.0: q, k and v of a head are neighbours in one quantised weight"


def test_blocks_that_are_not_parallel():
    model = cases.build("GPTNeoX", use_parallel_residual=False)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == "" and cases.followed(fast)


def test_the_scale_of_gptj_by_either_name():
    """transformers 5.24 keeps the factor, earlier releases the divisor."""
    reader = GPTJReader.__new__(GPTJReader)
    assert reader.scale(SimpleNamespace(scale_attn=8.0)) == reader.scale(SimpleNamespace(scaling=0.125)) == 0.125
