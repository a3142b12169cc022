"""Gemma 2, 3n and 4, placed and decoded: caps, windows, gains of 1 + w, shared keys, inputs of layers, experts."""

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

import gpubound as gb
from gpubound.kernels import dispatch
from gpubound.models.hf_modules import HFShiftedNorm
from tests.messages import message, refusal

from ..decode import cases
from ..place.models import assert_close, batch, place, rows, tiny, tokens, training_run, twin


def test_the_cap_on_scores_is_transformers_own():
    model, loose = tiny("gemma2"), tiny("gemma2", attn_logit_softcapping=None)
    want, uncapped = training_run(twin(model), batch()), training_run(loose, batch())
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), want)
    assert abs(want["loss"] - uncapped["loss"]) > 1e-3, "a cap of 0.5 shows"
    assert rows(placement)["model.layers.0.self_attn"].kernel == message("models/gemma:the_cap_on_scores_is_tra")
    assert placement.unsupported is None and placement.fallbacks == 0


@pytest.mark.parametrize("window", [5, 12])
def test_layers_with_a_window_and_without(window):
    model = tiny("gemma2", sliding_window=window)
    other = twin(model)
    placement = place(model, strict=True)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    padded = {"input_ids": tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long).tril(9)}
    torch.testing.assert_close(model.eval()(**padded).logits, other.eval()(**padded).logits, rtol=1e-4, atol=1e-5)
    assert placement.fallbacks == 0 or model.config.use_cache


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_the_loss_of_capped_logits(cap):
    model = tiny("gemma2", final_logit_softcapping=cap)
    want = training_run(twin(model), batch())
    placement = place(model, strict=True)
    assert placement.verified and rows(placement)["(the model)"].kernel.startswith("loss without whole logits")
    assert_close(training_run(model, batch()), want)


def test_scores_are_given_to_who_asks():
    model = tiny("gemma2")
    other = twin(model).eval()
    place(model, strict=True)
    got, want = (m.eval()(tokens(), output_attentions=True) for m in (model, other))
    assert len(got.attentions) == 2
    for a, b in zip(got.attentions, want.attentions):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("added", [False, True])
def test_a_gain_of_one_and_a_little_keeps_the_little(added):
    """1 + 2^-10 is 1 in bf16, and Gemma adds in fp32."""
    model = tiny("gemma2", torch.bfloat16)
    place(model, strict=True)
    norm = model.model.norm
    assert norm.part is HFShiftedNorm
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)
    x = torch.full((1, 32), 0.5)
    fine = norm.add(x, x)[0] if added else norm(2 * x)
    assert fine[0, 0].item() == pytest.approx(1 + 2.0**-10, abs=1e-5)


def test_16_bit_error_is_no_larger_than_before():
    model = tiny("gemma2", torch.bfloat16)
    truth, own = training_run(twin(model).float(), batch()), training_run(twin(model), batch())
    place(model, strict=True)
    got = training_run(model, batch())
    whole = [sum((g[name].float() - t).square().sum() for name, t in truth.items()).sqrt() for g in (got, own)]
    assert whole[0] <= 1.25 * whole[1]


def build():
    """Two of four layers keep the largest values of their gates, and the other two share keys."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in cases.SIZES.items() if key != "tie_word_embeddings"}
    options = {
        "num_hidden_layers": 4, "layer_types": cases.LOCAL["layer_types"] * 2, "sliding_window": 9, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": cases.VOCABULARY, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    }  # fmt: skip
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**sizes | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.2)
    return model


def test_attention_and_mlps_are_placed():
    model = build()
    other = twin(model)
    placement = place(model)
    assert_close(training_run(model, batch()), training_run(other, batch()))
    found = rows(placement)
    assert placement.verified and "one product" in found["model.layers.0.mlp"].kernel
    assert all("one product" in found[f"model.layers.{number}.self_attn"].kernel for number in range(4))
    assert found["(the model)"].kernel.startswith("loss without whole logits")


def test_its_own_forward_is_decoded():
    fast = gb.decoder(build(), 2, cases.ROOM)
    assert "AltUp" in fast.path
    cases.assert_greedy(fast, cases.prompts(19, 3), 9)


EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "final_logit_softcapping": None, "num_hidden_layers": 2,
    "layer_types": cases.LOCAL["layer_types"],
}  # fmt: skip


def mixed(**options):
    model = cases.build("Gemma4", **EXPERTS | options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
    return model


class TestDecoding:
    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, {"speculate": 3}, {"max_batch": 12}], ids=str)
    def test_experts_next_to_a_dense_mlp(self, options):
        given = cases.prompts(*range(2, 2 + options.get("max_batch", 3)))
        fast = gb.decoder(mixed(), **{"max_batch": 3} | options, max_length=cases.ROOM)
        assert fast.path == ""
        cases.assert_greedy(fast, given, 9)

    @pytest.mark.slow
    @pytest.mark.parametrize("build", [mixed, lambda: cases.build("Gemma4")])
    def test_kernels_in_the_interpreter(self, build, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(dispatch, "_verdicts", {})
        cases.assert_greedy(gb.decoder(build(), 2, 32, k=1, verify=False), cases.prompts(11, 3), 3)

    def test_rollouts_over_shared_keys(self):
        fast = cases.shared("Gemma4", pages=9)
        given = cases.prompts(30, 4, 16)
        for one in fast.rollout(given, n=2, max_new_tokens=[6, 25, 9], temperature=0.0):
            assert cases.likeliest(fast.model, given[one.prompt], one.tokens) == one.tokens

    def test_a_factor_and_a_routers_scale_that_change_in_place_are_followed(self):
        model = mixed()
        fast = gb.decoder(model, 1, cases.ROOM, verify=False)
        before = cases.of_decoder(fast)
        with torch.no_grad():
            model.model.layers[0].layer_scalar.mul_(0.3)
            model.model.layers[1].router.scale.mul_(-2.0)
        after = cases.of_decoder(fast)
        assert after != before and cases.likeliest(model, cases.PROMPT, after) == after

    def test_low_rank_adapters_of_a_layers_input(self):
        model = cases.build("Gemma4")
        gb.lora.add(model, targets=["per_layer_input_gate", "q_proj", "v_proj"], rank=2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.normal_(std=0.3)
        cases.assert_greedy(gb.decoder(model, 2, cases.ROOM), cases.prompts(7, 12), 9)

    def test_what_one_device_runs(self):
        error = refusal(ValueError, lambda: gb.decoder(cases.build("Gemma4"), 1, cases.ROOM, devices=["cpu", "cpu"]))
        assert "shared keys" in error

    @pytest.mark.parametrize("part", ["router", "experts"])
    def test_hooks_on_a_part_that_a_step_does_not_call(self, part):
        model = mixed()
        getattr(model.model.layers[1], part).register_forward_hook(lambda *_: None)
        assert f"model.layers.1.{part}" in gb.decoder(model, 1, 16, verify=False).path

    def test_texts_that_are_read_both_ways(self):
        model = cases.build("Gemma4Unified")
        model.config.use_bidirectional_attention = "all"
        assert "later tokens" in gb.decoder(model, 1, 16, verify=False).path


class TestPlacing:
    def test_experts_next_to_a_dense_mlp(self):
        model = mixed()
        other = twin(model)
        placement = place(model, strict=True)
        assert_close(training_run(model, batch()), training_run(other, batch()))
        assert placement.verified and placement.fallbacks == 0

    def test_embeddings_without_the_layers_inputs(self):
        """transformers finds the tokens by their embeddings then."""
        model = tiny("gemma4")
        other = twin(model)
        placement = place(model)
        x = model.get_input_embeddings()(batch()["input_ids"]).detach()
        got, want = (m.eval()(inputs_embeds=x, use_cache=False).logits for m in (model, other))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert "inputs_embeds without per_layer_inputs" in str(rows(placement)["model"].reasons)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_gradient_checkpointing_keeps_the_loop_that_shares_keys(self):
        model = tiny("gemma4")
        other = twin(model)
        placement = place(model, strict=True)
        for one in (model, other):
            one.gradient_checkpointing_enable({"use_reentrant": False})
        assert_close(training_run(model, batch()), training_run(other, batch()))
        assert "gradient checkpointing" in str(rows(placement)["model"].reasons)
