"""What is not decoded, and a step that does not compute its model: one sentence each."""

import re

import pytest
import torch
from torch.nn.utils import prune

import gpubound as gb
from gpubound.models.deepseek_v4.decode import attention, body, mixture
from gpubound.models.deepseek_v4.kernels import index_topk
from tests.messages import message

from .cases import HCA, RATES, ROOM, build

NOT_DECODED = "decoder: model: got DeepseekV4ForCausalLM, which is not decoded: "


def refusal(model, kind=ValueError, **options) -> str:
    with pytest.raises(kind) as error:
        gb.decoder(model, 2, ROOM, **options)
    return str(error.value)


def test_options_that_the_fused_kernels_read():
    assert refusal(build(), weights="int8") == message("decode/compressed/refusals:options_that_the_fused_k")


def test_rows_have_no_adapters_of_their_own():
    with pytest.raises(ValueError) as error:
        gb.decoder(build(), 2, ROOM, verify=False).generate([3], adapters="x")
    assert str(error.value) == message("decode/compressed/refusals:rows_have_no_adapters_of")


def test_adapters_and_hooks():
    model = build()
    gb.lora.add(model, targets=["q_a_proj"], rank=2)
    assert refusal(model) == message("decode/compressed/refusals:adapters_and_hooks", NOT_DECODED)
    model = build()
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *given: None)
    assert refusal(model) == message("decode/compressed/refusals:adapters_and_hooks.2", NOT_DECODED)
    model = build()
    model.model.layers[2].self_attn.kv_proj.register_forward_hook(lambda *given: None)
    assert refusal(model) == f"{NOT_DECODED}model.layers.2.self_attn.kv_proj: a projection carries hooks."
    model = build()
    prune.l1_unstructured(model.model.norm, "weight", 0.3)
    computed = "its weight is computed anew at each call (a parametrization, or pruning)."
    assert refusal(model) == f"{NOT_DECODED}model.norm: {computed}"


SMALL = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", HCA], "mlp_layer_types": ["moe", "moe"]}


def test_weights_that_no_kernel_takes_and_weights_of_several_dtypes():
    assert refusal(build(torch.float64, **SMALL)) == (
        message("decode/compressed/refusals:weights_that_no_kernel_t", NOT_DECODED)
    )
    model = build(torch.float16, **SMALL)
    model.model.layers[1].self_attn.compressor.kv_proj.float()  # as transformers loads a folder with dtype=torch.float16
    assert refusal(model) == message("decode/compressed/refusals:weights_that_no_kernel_t.2", NOT_DECODED)
    model = build(**SMALL)
    model.lm_head.bfloat16()
    assert refusal(model) == message("decode/compressed/refusals:weights_that_no_kernel_t.3", NOT_DECODED)
    model = build(**SMALL)
    model.lm_head.bias = torch.nn.Parameter(torch.ones(89))
    assert refusal(model) == f"{NOT_DECODED}its head has a bias."


def to_bf16(model):
    model.bfloat16()


def to_more_words(model):
    model.resize_token_embeddings(95)


def to_fewer_layers(model):
    del model.model.layers[-1]


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (to_bf16, "2 layers in torch.bfloat16 on cpu with 89 words"),
        (to_more_words, "2 layers in torch.float32 on cpu with 95 words"),
        (to_fewer_layers, "1 layers in torch.float32 on cpu with 89 words"),
    ],
)
def test_a_model_that_is_another_one_since(change, now):
    """In bf16 a prompt of one token was decoded over a state in fp32."""
    model = build(**SMALL)
    fast = gb.decoder(model, 2, ROOM, verify=False)
    change(model)
    with pytest.raises(gb.GenerateError) as error:
        fast.generate([3], max_new_tokens=2)
    assert str(error.value) == message("decode/compressed/refusals:a_model_that_is_another", now)


def test_a_model_that_got_an_adapter_since():
    model = build(**SMALL)
    fast = gb.decoder(model, 2, ROOM, verify=False)
    gb.lora.add(model, targets=["q_a_proj"], rank=2)
    with pytest.raises(gb.GenerateError, check=message("decode/compressed/refusals:a_model_that_got_an_adap")):
        fast.generate([3], max_new_tokens=2)


def test_a_model_whose_logits_are_not_finite():
    model = build()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_b_proj.weight[0, 0] = float("nan")
    assert refusal(model, gb.GenerateError) == message("decode/compressed/refusals:a_model_whose_logits_are")


@pytest.mark.parametrize(("weight", "name"), [("model.norm.weight", "model.norm"), ("model.hc_head.hc_base", "model.hc_head")])
def test_what_is_not_finite_behind_the_last_layer_is_named(weight, name):
    model = build()
    fast = gb.decoder(model, 2, ROOM, verify=False)
    with torch.no_grad():
        model.get_parameter(weight)[0] = float("nan")
    assert fast.body.locate(torch.tensor([3, 4])) == name


@pytest.mark.parametrize(("module", "name"), [(attention, "attend"), (mixture, "routed_gate_up"), (attention, "pool")])
def test_a_step_that_is_off(module, name, monkeypatch):
    """Each of its parts by a hundredth."""
    own = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: own(*given, **named).mul_(1.01))
    assert re.fullmatch(
        r"decoder: logits are \d\.\de-0\d from those of DeepseekV4ForCausalLM itself \(limit 1e-04\): the step does not "
        r"compute this model; report it with the model's config\.",
        refusal(build(), gb.GenerateError),
    )


def test_a_choice_of_the_wrong_entries(monkeypatch):
    """Those with the least scores, or one too few."""

    def least(scores, closed, ids):
        return index_topk(-scores, closed, ids)

    def fewer(scores, closed, ids):
        index_topk(scores, closed, ids)
        return ids[:, -1:].fill_(-1)

    monkeypatch.setitem(body.TOLERANCE, torch.float32, 1e9)
    for wrong in (least, fewer):
        monkeypatch.setattr(attention, "index_topk", wrong)
        assert re.fullmatch(
            r"decoder: the step chooses entries whose scores lie (?:inf|[\d.e+-]+) deviations below those that "
            r"DeepseekV4ForCausalLM finds best \(limit 1e-04\): it does not compute this model; report it with the model's "
            r"config\.",
            refusal(build(compress_rates=RATES | {HCA: 40}), gb.GenerateError),  # a trial of 44 tokens, 11 entries
        )


def test_a_choice_of_the_wrong_experts(monkeypatch):
    own = mixture.Mixture.choose

    def worst(self, scores, *rest):
        ids, *others = own(self, scores, *rest)
        return ids if self.weights.table is not None else torch.tensor([[0, 1]]).expand_as(ids).int(), *others

    monkeypatch.setattr(mixture.Mixture, "choose", worst)
    monkeypatch.setitem(body.TOLERANCE, torch.float32, 1e9)
    assert re.fullmatch(
        r"decoder: the step chooses experts whose scores lie [\d.e+-]+ deviations below those that DeepseekV4ForCausalLM finds "
        r"best \(limit 1e-04\): it does not compute this model; report it with the model's config\.",
        refusal(build(), gb.GenerateError),
    )
