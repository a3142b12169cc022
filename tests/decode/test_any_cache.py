"""The general body's cache: what stands in it without effect, and what a prefill fills, clears and leaves."""

import pytest
import torch

from gpubound.decode import hf_forward as any_body
from gpubound.decode.hf_forward import StaticCacheRunner
from gpubound.decode.runner import RunnerConfig

from .any_cases import body_of, go_on, model_of, prompts, start


@pytest.mark.parametrize("family", ["gpt2", "gpt2-eager", "gemma3", "gemma2-eager", "llama4"])
def test_what_stands_beyond_the_live_length_or_outside_the_window_is_without_effect(family):
    """Large finite values, bit for bit without effect. (NaN would come through any mask: the next test.)"""
    body, clean = body_of(family), []
    for poison in (False, True):
        token, position = start(body, prompts())
        if poison:
            types = getattr(body.model.config, "layer_types", ["full_attention"] * 2)
            for kind, layer in zip(types, body.cache.own()):
                far = body.place_L >= position[:, None]
                if kind == "sliding_attention":
                    far = far | (body.place_L <= position[:, None] - 9)
                if kind == "chunked_attention":
                    far = far | (body.place_L < position[:, None] // 9 * 9)
                for sign, buffer in zip((1e4, -1e4), layer.buffers()):
                    buffer.masked_fill_(far[:, None, :, None], sign)
        clean.append(body.step(token, position).clone())
    assert torch.equal(*clean)


def test_a_nan_that_an_earlier_sequence_left_is_gone_after_a_prefill():
    body = body_of("gpt2")
    before = go_on(body, *start(body, prompts()), 4)
    for buffer in body.buffers():
        buffer.fill_(float("nan"))
    assert torch.equal(go_on(body, *start(body, prompts()), 4), before)


def test_a_prefill_leaves_the_rows_it_does_not_name():
    body = body_of("gpt2")
    token, position = start(body, prompts())
    want = body.step(token, position).clone()
    body.prefill(torch.zeros(1, 5, dtype=torch.long))
    assert torch.equal(body.step(token, position)[1:], want[1:])


@pytest.mark.parametrize("family", ["phi", "gemma2-eager"])
def test_a_prefill_in_chunks_fills_the_same_cache(family, monkeypatch):
    body = StaticCacheRunner(model_of(family), RunnerConfig(2, 80))
    ids = torch.stack([prompts((40,))[0], prompts((40,))[0].flip(0)])
    body.prefill(ids)
    whole = [buffer.clone() for buffer in body.buffers()]
    monkeypatch.setattr(any_body, "CHUNK", 7)
    body.prefill(ids)
    for buffer, want in zip(body.buffers(), whole):
        torch.testing.assert_close(buffer, want, rtol=0, atol=1e-5)
        assert want[:, :, :40].abs().min() > 0 and not want[:, :, 40:].any()


def test_a_row_that_is_full_stays_in_its_own_row():
    body = StaticCacheRunner(model_of("gpt2"), RunnerConfig(2, 16))
    token, position = start(body, prompts((3, 3)))
    alone = body.step(token, position).clone()
    full = torch.tensor([3, 16], dtype=torch.int32)  # as the state leaves a row whose last token found no place
    assert torch.equal(body.step(token, torch.where(full == 16, full, position))[0], alone[0])
