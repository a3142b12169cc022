"""Gemma 4: layers that share keys, separate inputs of layers, their factors, and experts next to a dense MLP."""

import pytest
import torch

import gpubound as gb
from gpubound.kernels import dispatch
from tests.messages import refusal

from ..decode import cases
from ..place.models import assert_close, batch, place, rows, tiny, training_run, twin

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
    @pytest.mark.parametrize("build", [mixed, lambda: cases.build("Gemma4"), lambda: cases.build("Gemma4Unified")])
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
