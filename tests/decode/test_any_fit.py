"""What the general body refuses, by its sentence: models, sizes, and forwards that its trial finds wrong."""

import re

import pytest
import torch
import transformers
from torch import nn

import gpubound as gb
from gpubound.decode.hf_forward import StaticCacheRunner
from gpubound.decode.runner import RunnerConfig
from gpubound.models.registry import cache_word
from tests.messages import message, refusal, same_texts

from . import cases
from .any_cases import ENDS, FALCON, GROUPED, SIZES, build, generated, go_on, loud, model_of, prompts, start


def unfit(model, max_batch=2, max_length=32) -> str:
    return refusal(ValueError, lambda: StaticCacheRunner(model, RunnerConfig(max_batch, max_length)))


def tiny(name: str, **sizes) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": 89, **ENDS, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def long_rope() -> transformers.PreTrainedModel:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    return tiny("Phi3", **{**GROUPED, "pad_token_id": 0}, rope_parameters=rope, original_max_position_embeddings=16)


def test_models_that_no_static_cache_holds():
    growing = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    models = (
        tiny("Mamba", hidden_size=16, num_hidden_layers=1),
        tiny("Bloom", hidden_size=32, n_layer=1, n_head=4),
        tiny("OpenAIGPT", n_embd=32, n_layer=1, n_head=4),
        tiny("Falcon", **{**FALCON, "alibi": True}),
        tiny("GPTNeo", hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
        tiny("Llama", **GROUPED, rope_parameters=growing),
        long_rope(),
        tiny("Lfm2", **GROUPED, layer_types=["conv", "full_attention"]),
    )
    same_texts("decode/any_fit:models_that_no_static", map(unfit, models))


def test_a_long_rotary_table_is_held_below_its_change():
    model = long_rope()
    body = StaticCacheRunner(model, RunnerConfig(4, 16))
    rows = go_on(body, *start(body, prompts((1, 5, 3, 8))), 8).tolist()
    assert rows == [generated(model, prompt, 8) for prompt in prompts((1, 5, 3, 8))]


def test_models_that_are_not_ready():
    t5 = transformers.T5Config(vocab_size=89, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    assert unfit(transformers.T5ForConditionalGeneration(t5).eval()) == message("decode/any_fit:models_that_are_not_read")
    assert unfit(nn.Linear(2, 2)) == message("decode/any_fit:models_that_are_not_read.2")
    model = build("gpt2").train()
    training = message("decode/any_fit:models_that_are_not_read.6")
    assert unfit(model) == training
    body = StaticCacheRunner(model.eval(), RunnerConfig(2, 32))
    assert refusal(ValueError, lambda: body.model.train() and body.prefill(torch.zeros(1, 3, dtype=torch.long))) == training
    model.eval()
    model.quantization_method = transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
    assert unfit(model) == message("decode/any_fit:models_that_are_not_read.3")
    model = build("gpt2")
    model.config._attn_implementation = "flex_attention"
    assert unfit(model) == message("decode/any_fit:models_that_are_not_read.4")
    assert unfit(build("gpt2").to("meta")) == message("decode/any_fit:models_that_are_not_read.5")


@pytest.mark.parametrize("kind, table", [("Mistral", "embed_tokens"), ("Gemma4", "embed_tokens_per_layer")])
def test_a_table_with_fewer_tokens_than_the_head(kind, table):
    """A lookup beyond it raises on a CPU, and on a GPU it ends the process: it is refused before."""
    model = cases.build(kind)
    embedding = getattr(model.model, table)
    embedding.weight = nn.Parameter(embedding.weight[:80].clone())
    with pytest.raises(ValueError, match=r"a head of 89 tokens, .* holds 80"):
        gb.decoder(model, 2, 32, verify=False)


def test_sizes_out_of_range():
    model = model_of("gpt2")
    assert unfit(model, max_length=97) == message("decode/any_fit:sizes_out_of_range")


def test_a_model_that_does_not_follow_the_mask_is_refused(monkeypatch):
    """BERT looks both ways unless it is told to be a decoder; a body whose mask shows one place too many is found too."""
    bert = loud(tiny("Bert", **{**SIZES, "pad_token_id": 0}))
    sentence = (
        r"decoder: model: got {}, whose logits with a static cache differ from its own by [\d.]+ of the largest, wanted at "
        r"most 0\.005: its attention does not follow the mask and the positions that it is given\."
    )
    assert re.fullmatch(sentence.format("BertLMHeadModel"), unfit(bert))
    masks = StaticCacheRunner._masks
    monkeypatch.setattr(StaticCacheRunner, "_masks", lambda self, place, end: masks(self, place + 1, end))
    assert re.fullmatch(sentence.format("GPT2LMHeadModel"), unfit(model_of("gpt2")))


@pytest.mark.parametrize(
    ("fails", "facts"),
    [
        (lambda cache: type(cache).__name__ == "RowCache", ("fails with a static cache",)),
        (lambda cache: cache is not None, ("own forward fails", "its own cache", "config")),  # no other cache would help
        (lambda cache: True, ("own forward fails", "config")),
    ],
    ids=["the static cache", "any cache", "every call"],
)
def test_a_forward_that_fails_is_refused_by_what_it_fails_at(fails, facts):
    """A broken model was said to fail with a static cache, or ended in its own exception."""
    model = build("gpt2")
    forward = model.transformer.forward

    def failing(*inputs, **named):
        if fails(named.get(cache_word(forward))):
            raise TypeError("broken\non purpose")
        return forward(*inputs, **named)

    model.transformer.forward = failing
    sentence = unfit(model)
    assert all(fact in sentence for fact in ("GPT2LMHeadModel", "TypeError: broken", *facts)) and "\n" not in sentence


def test_a_failure_without_a_message_is_named_by_its_code():
    model = cases.build("Llama")

    def failing(x):
        raise AssertionError  # as of an assert, to which pytest would add a message

    model.model.norm.forward = failing
    with pytest.raises(ValueError, match=r"own forward fails .*AssertionError: raise AssertionError"):
        gb.decoder(model, 1, 16)


def test_a_broken_model_of_a_fused_family_is_refused_by_its_own_forward():
    model = cases.build("Llama")
    model.model.norm.forward = lambda x: 1 / 0
    with pytest.raises(ValueError, match=r"own forward fails .*ZeroDivisionError"):
        gb.decoder(model, 1, 16)


class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, output: output / 2)


CHANGES = {
    "whose model.layers.1.mlp.down_proj carries hooks": lambda model: hook(model.model.layers[1].mlp.down_proj),
    "whose lm_head carries hooks": lambda model: hook(model.lm_head),
    "whose model.layers.0.self_attn.o_proj is a Half, not a Linear": lambda model: setattr(
        model.model.layers[0].self_attn, "o_proj", Half(32, 32, bias=False)
    ),
    "without model.layers.1": lambda model: model.model.layers.__delitem__(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shell_over_a_decoder_s_weights_runs_none_of_its_changes(change):
    """A gb.Decoder that the fused kernels leave alone is computed by transformers' module, which would drop them unheard."""
    model = cases.build("own", qkv_bias=False)
    CHANGES[change](model)
    assert refusal(ValueError, lambda: gb.decoder(model, 1, 16, fused=False, verify=False)) == message(
        "decode/any_fit:a_shell_over_a_decoder_s", change
    )


def test_a_shell_is_tried_against_the_decoder_and_refused_by_its_name():
    def unfused(max_length: int = 16) -> gb.FastDecoder:
        return gb.decoder(model, 1, max_length, fused=False, verify=False)

    with pytest.raises(ValueError, check=message("decode/any_fit:a_shell_is_tried_against")):
        gb.decoder(cases.build("own", qkv_bias=True, qk_norm=True), 1, 16, fused=False)
    model = cases.build("own", qkv_bias=False, positions=8)
    assert unfused(64).max_length == 64  # positions are no limit of the code
    with pytest.raises(ValueError, check=message("decode/any_fit:a_shell_is_tried_against.2")):
        model.train() and unfused()
    hook(model.eval())
    with pytest.raises(ValueError) as error:
        unfused()
    assert re.fullmatch(
        r"decoder: model: got Decoder, whose logits with a static cache differ from its own by [\d.]+ of the "
        r"largest, wanted at most 0\.005: transformers' Qwen3ForCausalLM over its weights runs none of its hooks, "
        r"and no replaced forward; take them off\.",
        str(error.value),
    )
