"""A decoding step on a CPU: the tokens and logits of the model's own forward, whatever the rows and the cache beyond them."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import certificate as reference, cpu_step
from tests.messages import message

from . import cases


@pytest.fixture(autouse=True)
def kernels_path():
    """A CPU's own way."""


def served(kind: str, max_batch: int = 4, **options) -> gb.FastDecoder:
    model = cases.build(kind, **options.pop("build", {}))
    fast = gb.decoder(model, max_batch, cases.ROOM, **{"verify": False} | options)
    assert fast.body.host is not None and fast.kernels == "plain torch"
    return fast


@pytest.mark.parametrize("kind", cases.ALL)
def test_a_ragged_batch_gives_the_models_tokens(kind):
    """Windows shorter than the texts, biases, normed heads, layers without positions."""
    cases.assert_greedy(served(kind), cases.prompts(3, 30, 11), 9)


@pytest.mark.parametrize("kind", ["Mistral", "own"])
def test_beside_a_nan_beyond_what_a_row_holds(kind):
    """Short rows see as many places as the longest, behind a mask; what an earlier request left there may be anything."""
    fast = served(kind)
    given, how = cases.prompts(1, 14), {"max_new_tokens": 30, "stop": ()}  # a prefill of 16 places, and 28 more
    alone = [fast.generate(prompt, **how).tokens[0] for prompt in given]
    fast.body.cache.poison()
    assert fast.generate(given, **how).tokens == alone


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_weights_side_by_side_or_not(kind):
    """More than two rows put weights of one input side by side; then they are one product."""
    fast, wide = served(kind, max_batch=2), served(kind, max_batch=9)
    few = fast.generate(cases.PROMPT, max_new_tokens=9, stop=()).tokens
    assert wide.generate([cases.PROMPT] * 9, max_new_tokens=9, stop=()).tokens == few * 9
    assert [len(layer.inputs[0].parts) for layer in fast.body.host.layers] == [3, 3]
    assert [len(layer.inputs[0].parts) for layer in wide.body.host.layers] == [1, 1]


def test_logits_are_those_of_fp32():
    """After a prompt and a few steps of rows that stand apart."""
    fast = served("Qwen3")
    prompts = cases.prompts(5, 9)
    tokens = fast.generate(prompts, max_new_tokens=6, stop=()).tokens
    for row, (prompt, new) in enumerate(zip(prompts, tokens)):
        want = reference.reference_logits(fast.body.exact(), torch.tensor(prompt + new[:-1]))[-1]
        torch.testing.assert_close(fast.body.logits[row], want, atol=1e-4, rtol=1e-4)


def test_weights_that_change_and_weights_that_move():
    fast = served("Llama")
    before = cases.followed(fast)
    with torch.no_grad():
        fast.model.model.layers[0].self_attn.q_proj.weight.neg_()
    changed = cases.followed(fast)
    assert changed != before
    layer = fast.model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0))
    assert cases.followed(fast) != changed


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights_speak_alike_at_full_speed(kind, monkeypatch, said):
    """A CPU has no kernel for packed weights: they are unpacked once, which is said."""
    fast = served("Llama", weights=kind, verify=True)
    assert message("decode/host:rounded_weights_speak_al", kind).within(said())
    assert f"rounded to {kind}" in str(fast) and fast.body.bytes_a_step([1]) > fast.body.live.bytes_read()
    monkeypatch.setattr(cpu_step, "fits", lambda device: False)
    packed = gb.decoder(fast.model, 4, cases.ROOM, weights=kind)
    assert packed.body.host is None
    prompts = cases.prompts(4, 12)
    want = packed.generate(prompts, max_new_tokens=8, stop=(), logprobs=True).sequences
    got = fast.generate(prompts, max_new_tokens=8, stop=(), logprobs=True).sequences
    for a, b in zip(got, want):
        assert a.tokens == b.tokens
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_where_a_cpu_keeps_to_the_kernels_references():
    """Speculation, pages and a cache in 8 bits. The decoder says so: no kernel is fused there."""
    for options in ({"speculate": 2}, {"pages": 8}, {"cache": "int8"}):
        fast = gb.decoder(cases.build("Llama"), 2, 32, **options)
        assert fast.body.host is None and fast.kernels == "reference kernels"


def test_text_arrives_step_by_step():
    """Nothing runs ahead on a CPU: the first token is given out before the second is computed."""
    fast, steps = served("Llama", max_batch=1, k=1), []
    whole = fast.body.host.step
    fast.body.host.step = lambda *inputs: steps.append(1) or whole(*inputs)
    seen = [len(steps) for _ in fast.stream(cases.PROMPT, max_new_tokens=5, stop=())]
    assert seen == [1, 2, 3, 4, 5]


def test_bf16_is_as_close_to_fp32_as_the_model_is():
    """By the decoder's own certificate, which compares both."""
    certificate = served("Llama", build={"dtype": torch.bfloat16}, verify=True).certificate
    assert certificate.logits_error <= max(1.5 * certificate.model_error, 1e-2)
