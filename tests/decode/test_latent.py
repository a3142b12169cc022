"""Latent attention: a cache of latents in every form, prompts in chunks, adapters, and what is refused."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import transformer
from tests.messages import refusals

from . import cases

KINDS = pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3"])
SAMPLED = {"temperature": 1.0, "seed": 3, "logprobs": True}


@KINDS
def test_the_cache_holds_one_latent_a_token(kind, device):
    """24 numbers and a rotated key of 4, instead of keys and values of 4 heads, 12 and 6 wide."""
    model = cases.build(kind, torch.bfloat16, device)
    fast = gb.decoder(model, 3, 64, verify="quick")
    layers = model.config.num_hidden_layers
    assert fast.body.cache.nbytes == fast.body.cache_bytes() == layers * 3 * 64 * (24 + 4) * 2
    assert any(part == "cache" and "latents of 28 numbers" in what for part, what, _ in fast.body.report())
    before, after = (fast.body.bytes_a_step([length]) for length in (10, 30))
    assert after - before == layers * 20 * 28 * 2


@pytest.mark.parametrize("kind", ["AXK1", "Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu"])
def test_families_that_are_read_as_these(kind, device):
    fast = gb.decoder(cases.build(kind, device=device), 3, cases.ROOM)
    assert fast.path == ""
    cases.assert_greedy(fast, cases.prompts(), 12)


def test_queries_that_are_scaled_beyond_a_length(device):
    fast = gb.decoder(cases.build("Mistral4", device=device, max_position_embeddings=200), 1, cases.ROOM + 1, verify=False)
    assert f"scaled beyond {cases.ROOM} tokens" in fast.path


@KINDS
@pytest.mark.parametrize("options", [{"pages": 5}, {"fused": False}, {"speculate": 4}], ids=str)
def test_pages_the_models_own_forward_and_drafts_give_the_same(kind, options, device):
    plain, other = (cases.shared(kind, str(device), **more) for more in ({}, options))
    given = cases.prompts(1, 30, 6)
    for how in ({}, SAMPLED if "fused" not in options else {}):
        found, want = (fast.generate(given, max_new_tokens=9, **how).sequences for fast in (other, plain))
        assert [one.tokens for one in found] == [one.tokens for one in want]
        assert all(mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4) for mine, theirs in zip(found, want))


@KINDS
def test_a_long_prompt_in_chunks_gives_the_logits_of_one(kind, monkeypatch):
    fast, ids = cases.shared(kind), cases.prompts(40)[0]
    want = cases.logits(fast.model, ids)[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    for size in (7, 64):
        monkeypatch.setattr(transformer, "CHUNK", size)
        torch.testing.assert_close(torch.tensor(fast.score(ids)[0]), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"pages": 7}], ids=str)
def test_rollouts_are_what_their_seeds_draw_alone(options, device):
    fast, given = cases.shared("DeepseekV3", str(device), **options), cases.prompts(5, 1, 19, 6)
    for one in fast.rollout(given, n=2, max_new_tokens=[3, 9, 5, 8], seed=5).sequences[1::2]:
        how = {"temperature": 1.0, "seed": one.seed, "max_new_tokens": [3, 9, 5, 8][one.prompt]}
        assert one.tokens == fast.generate(given[one.prompt], **how).tokens[0]


@pytest.mark.parametrize("rows", [1, 9])
def test_adapters_of_the_projections(rows, device):
    model = cases.build("DeepseekV3", device=device)
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    gb.lora.add(model, rank=3, targets=names)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.3)
    fast = gb.decoder(model, rows, cases.ROOM)
    assert fast.path == ""
    cases.assert_greedy(fast, cases.prompts(*range(3, 3 + rows)), 9)


@KINDS
def test_packed_weights_leave_the_products_of_heads_alone(kind):
    fast = gb.decoder(cases.build(kind), 2, 32, weights="int8")
    assert fast.path == "" and fast.certificate.logits_error < 1e-4  # from the rounded model in fp32


def test_steps_never_wait(sim):
    fast = gb.decoder(cases.build("DeepseekV3", device=sim), 2, 32, verify=False)
    assert fast.path == ""
    fast.generate(cases.prompts(5, 3), max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
    cases.assert_never_waits(fast.graphs.run, 2)


def test_interpreted_kernels_give_the_same(interpret):
    model = cases.build("DeepseekV3", num_hidden_layers=1)
    report = cases.interpreted_report(interpret, model, cases.prompts(4, 2), 2)
    assert {"triton: latent_queries", "triton: latent_attention"} <= {what for _, what, _ in report}


def test_what_latents_are_not_made_for():
    model, device = cases.build("DeepseekV3", device="cpu"), torch.device("cpu")
    refusals(
        "decode/latent:what_latents_are_not_made_for",
        lambda: gb.decoder(model, 1, 32, cache="int8"),
        lambda: gb.decoder(model, 1, 32, devices=[device, device], split="tensors"),
    )
    gb.lora.add(model, rank=2, targets=["kv_b_proj"])
    fast = gb.decoder(model, 1, 32, verify=False)
    assert "kv_b_proj: it carries a low-rank adapter" in fast.path
    negative = cases.build("MiniCPM3", scale_depth=-0.6)
    assert gb.decoder(negative, 1, 32, verify=False).path == "its scale_depth=-0.6 is not above 0"


@KINDS
def test_a_placed_model(kind, device):
    model = cases.build(kind, device=device)
    ids = torch.tensor(cases.prompts(9, seed=4), device=device)
    want = cases.hugging_face(model, cases.PROMPT, 6), model(ids, output_router_logits=True)
    gb.place(model, device=device)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path == "" and cases.of_decoder(fast) == want[0]
    found = model(ids, output_router_logits=True)
    torch.testing.assert_close(found.logits, want[1].logits, rtol=1e-4, atol=1e-4)
    routed = [getattr(output, "router_logits", ()) for output in (found, want[1])]  # in transformers 5.17 there are none
    assert len(routed[0]) == len(routed[1])
