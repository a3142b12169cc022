"""The general body: any Hugging Face decoder, rows at their own positions, against `generate` one prompt at a time."""

import functools
import re

import pytest
import torch
import transformers
from torch import nn

from gpubound.decode import static, static_fit
from gpubound.decode.static import StaticBody
from gpubound.watch import no_stall, watch
from gpubound.watch.simgpu import simgpu

SIZES = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ENDS = {"bos_token_id": None, "eos_token_id": None}
GPT2 = {"vocab_size": 89, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, **ENDS}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8}
QWEN_MOE = {
    **GROUPED,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
FALCON = {"vocab_size": 89, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **ENDS}
LLAMA4 = {**GROUPED, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 9}
FAMILIES = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-eager": ("GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "phi": ("PhiConfig", SIZES),
    "stablelm": ("StableLmConfig", GROUPED),
    "gemma2-eager": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4, "sliding_window": 9}),
    "qwen2_moe": ("Qwen2MoeConfig", QWEN_MOE),
    "falcon": ("FalconConfig", {**FALCON, "multi_query": True}),
    "llama4": (
        "Llama4TextConfig",
        {**LLAMA4, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
}
NEW = 48


def loud(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model


def build(family: str) -> transformers.PreTrainedModel:
    """A small model with weights large enough that attention decides the tokens."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, name)(**sizes)
    torch.manual_seed(0)
    implementation = {"attn_implementation": family.rpartition("-")[2]} if "-" in family else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **implementation).eval()
    return loud(model)


model_of = functools.cache(build)


@functools.cache
def body_of(family: str, device: str | torch.device = "cpu") -> StaticBody:
    return StaticBody(build(family).to(device), 4, 80)


def prompts(lengths=(1, 19, 6, 12)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(89, (length,), generator=generator) for length in lengths]


def start(body: StaticBody, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill all but the last token of each row, garbage behind; (last tokens, their places)."""
    ids = torch.randint(89, (len(rows), max(map(len, rows)) - 1), generator=torch.Generator().manual_seed(2))
    for filled, row in zip(ids, rows):
        filled[: len(row) - 1] = row[:-1]
    lengths = torch.tensor([len(row) - 1 for row in rows])
    body.prefill(ids.to(body.device), lengths.to(body.device))
    token = torch.tensor([row[-1] for row in rows], dtype=torch.int32)
    return token.to(body.device), lengths.int().to(body.device)


def go_on(body: StaticBody, token: torch.Tensor, position: torch.Tensor, new: int = NEW, logits: list | None = None):
    """The `new` greedy tokens of every row, (rows, new). `logits` collects what each step gave."""
    found = []
    for _ in range(new):
        given = body.step(token, position)
        if logits is not None:
            logits.append(given.clone())
        token = given.argmax(-1).int()
        position = position + 1
        found.append(token)
    return torch.stack(found, 1)


def generated(model, prompt: torch.Tensor, new: int = NEW) -> list[int]:
    whole = model.generate(
        prompt[None].to(model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        do_sample=False,
        max_new_tokens=new,
        pad_token_id=0,
    )
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_give_the_tokens_of_generate_one_by_one(family, device):
    """And the logits of the model's own forward over each whole row, without a cache."""
    body, logits = body_of(family, device), []
    rows = go_on(body, *start(body, prompts()), logits=logits)
    for prompt, row, given in zip(prompts(), rows, torch.stack(logits, 1)):
        whole = torch.cat([prompt.to(device), row[:-1]])
        with torch.no_grad():
            own = body.model(whole[None], use_cache=False).logits[0, len(prompt) - 1 :]
        assert torch.equal(own.argmax(-1), row)
        torch.testing.assert_close(given, own, rtol=0, atol=1e-4)
    assert rows.tolist() == [generated(body.model, prompt) for prompt in prompts()]


@pytest.mark.parametrize("family", ["gpt2", "gemma2-eager", "mixtral"])
def test_rows_in_another_order_give_the_same_tokens(family, device):
    body = body_of(family, device)
    first = go_on(body, *start(body, prompts()), 16)
    order = [2, 0, 3, 1]
    assert torch.equal(go_on(body, *start(body, [prompts()[row] for row in order]), 16), first[order])


@pytest.mark.parametrize("family", ["gpt2", "gpt2-eager", "gemma3", "gemma2-eager", "llama4"])
def test_what_stands_beyond_the_live_length_or_outside_the_window_is_without_effect(family):
    """Large finite values, bit for bit without effect. (NaN would come through any mask: the next test.)"""
    body, clean = body_of(family), []
    for poison in (False, True):
        token, position = start(body, prompts())
        if poison:
            types = getattr(body.model.config, "layer_types", ["full_attention"] * 2)
            for kind, pair in zip(types, body.buffers()):
                far = body.place_L >= position[:, None]
                if kind == "sliding_attention":
                    far = far | (body.place_L <= position[:, None] - 9)
                if kind == "chunked_attention":
                    far = far | (body.place_L < position[:, None] // 9 * 9)
                for sign, buffer in zip((1e4, -1e4), pair):
                    buffer.masked_fill_(far[:, None, :, None], sign)
        clean.append(body.step(token, position).clone())
    assert torch.equal(*clean)


def test_a_nan_that_an_earlier_sequence_left_is_gone_after_a_prefill():
    body = body_of("gpt2")
    before = go_on(body, *start(body, prompts()), 4)
    for pair in body.buffers():
        for buffer in pair:
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
    body = StaticBody(model_of(family), 2, 80)
    ids = torch.stack([prompts((40,))[0], prompts((40,))[0].flip(0)])
    body.prefill(ids)
    whole = [buffer.clone() for pair in body.buffers() for buffer in pair]
    monkeypatch.setattr(static, "CHUNK", 7)
    body.prefill(ids)
    for buffer, want in zip((buffer for pair in body.buffers() for buffer in pair), whole):
        torch.testing.assert_close(buffer, want, rtol=0, atol=1e-5)
        assert want[:, :, :40].abs().min() > 0 and not want[:, :, 40:].any()


def test_a_row_that_is_full_stays_in_its_own_row():
    body = StaticBody(model_of("gpt2"), 2, 16)
    token, position = start(body, prompts((3, 3)))
    alone = body.step(token, position).clone()
    full = torch.tensor([3, 16], dtype=torch.int32)  # as the state leaves a row whose last token found no place
    assert torch.equal(body.step(token, torch.where(full == 16, full, position))[0], alone[0])


def test_weights_changed_in_place_are_seen_and_no_address_changes():
    body = StaticBody(build("gpt2"), 4, 80)
    addresses = [tensor.data_ptr() for pair in body.buffers() for tensor in pair]
    before = body.step(*start(body, prompts())).clone()
    with torch.no_grad():
        for parameter in body.model.parameters():
            parameter.mul_(1.1)
        logits = body.step(*start(body, prompts()))
        own = [body.model(prompt[None]).logits[0, -1] for prompt in prompts()]
    torch.testing.assert_close(logits, torch.stack(own), rtol=0, atol=1e-3)
    assert (logits - before).abs().max() > 0.1 and body.moved() is None
    assert logits.data_ptr() == body.logits.data_ptr()
    assert addresses == [tensor.data_ptr() for pair in body.buffers() for tensor in pair]
    assert (body.vocab, body.logits.dtype, body.max_batch, body.max_length) == (89, torch.float32, 4, 80)


def test_a_weight_that_moved_is_named_until_the_body_is_bound_anew():
    body = StaticBody(build("gpt2"), 2, 32)
    body.model.transformer.h[1].mlp.c_fc.weight.data = body.model.transformer.h[1].mlp.c_fc.weight.data.clone()
    assert body.moved() == "transformer.h.1.mlp.c_fc.weight"
    body.rebind()
    assert body.moved() is None
    body.model.load_state_dict({name: t.clone() for name, t in body.model.state_dict().items()}, assign=True)
    assert body.moved() == "transformer.wte.weight"


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_fewer_rows_than_the_body_has_give_the_same_tokens(family):
    body = body_of(family)
    want = go_on(body, *start(body, prompts()), 16)
    assert torch.equal(go_on(body, *start(body, prompts()[:2]), 16), want[:2])


@pytest.mark.parametrize("family", ["gpt2", "gemma2-eager"])
def test_score_is_the_log_probability_under_the_model(family, monkeypatch):
    body, ids = body_of(family), prompts((41,))[0]
    monkeypatch.setattr(static, "SCORED", 16)
    with torch.no_grad():
        own = body.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(body.score(ids), own, rtol=0, atol=1e-4)


def test_bytes_of_a_step():
    """GPT-2's embedding is its head too; its table of positions gives rows only. Mixtral reads two of four experts."""
    block = 2 * 32 + (32 + 1) * 96 + (32 + 1) * 32 + 2 * 32 + (32 + 1) * 128 + (128 + 1) * 32
    place = 2 * 32  # of one layer: keys and values of 4 heads of 8
    assert body_of("gpt2").bytes_a_step([5, 7]) == 4 * (2 * block + 2 * 32 + 89 * 32 + 2 * place * 12)
    block = 2 * 32 + 32 * (32 + 16 + 16 + 32) + 4 * 32 + 2 * 3 * 32 * 48
    assert body_of("mixtral").bytes_a_step([5, 30]) == 4 * (2 * block + 32 + 89 * 32 + 2 * 32 * (5 + 9))


def test_the_first_module_with_a_nan_is_located():
    body = StaticBody(build("gpt2"), 2, 32)
    with torch.no_grad():
        body.model.transformer.h[1].mlp.c_fc.weight[3, 4] = float("nan")
    assert body.locate(prompts()[1]) == "transformer.h.1.mlp.c_fc"
    assert body_of("gpt2").locate(prompts()[1]) == "none of its modules in a pass without a cache"


def test_autocast_around_it_changes_nothing():
    body = body_of("gpt2")
    want = body.step(*start(body, prompts())).clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(body.step(*start(body, prompts())), want)


class TestOnThePretendGpu:
    """Its sensor sees every wait, also inside an op. What differs from CUDA's kernels is in the gpu tests."""

    @pytest.fixture
    def sim(self) -> torch.device:
        if torch.cuda.is_available():
            pytest.skip("the pretend device needs CUDA_VISIBLE_DEVICES=")
        return simgpu()

    @pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("mixtral", "qwen2_moe")])
    def test_a_step_never_waits_for_the_device(self, family, sim):
        body = StaticBody(build(family).to(sim), 4, 80)
        token, position = start(body, prompts())
        with no_stall(), watch() as ledger:
            for _ in range(2):
                token = body.step(token, position).argmax(-1).int()
                position = position + 1
        ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)
        assert body.slices == (family == "falcon")

    def test_experts_that_ask_the_host_are_computed_otherwise_in_a_step(self, sim):
        model = build("mixtral")
        want = go_on(body_of("mixtral"), *start(body_of("mixtral"), prompts()), 6)
        model.set_experts_implementation("eager")
        body = StaticBody(model.to(sim), 4, 80)
        token, position = start(body, prompts())
        with no_stall():
            body.step(token, position)
        assert model.get_experts_implementation() == {"": "eager"}
        assert torch.equal(go_on(body, token, position, 6).cpu(), want)
        assert body.report()[3] == (
            "experts",
            "batched_mm in steps, eager in prefill",
            "eager in float32 reads the routing back to the host; batched_mm copies the chosen experts' weights",
        )

    def test_a_forward_that_waits_is_refused_with_its_line(self, sim):
        model = build("gpt2").to(sim)
        attention, ask = model.transformer.h[0].attn, model.transformer.h[0].attn.forward
        attention.forward = lambda hidden, *rest, **named: (hidden.sum().item(), ask(hidden, *rest, **named))[1]
        with pytest.raises(ValueError, match=r"test_static\.py") as error:
            StaticBody(model, 4, 80)
        assert str(error.value).startswith(
            "StaticBody: model: got GPT2LMHeadModel, whose forward makes the host wait in every token, wanted one that a CUDA "
            "graph can hold: "
        )


@pytest.mark.parametrize(
    ("held", "dtype", "capability", "wanted"),
    [
        ("grouped_mm", torch.bfloat16, (9, 0), None),
        ("grouped_mm", torch.bfloat16, (8, 0), {"": "batched_mm"}),
        ("grouped_mm", torch.float32, (9, 0), {"": "batched_mm"}),
        ("eager", torch.bfloat16, (9, 0), {"": "batched_mm"}),
        ("batched_mm", torch.float32, (8, 0), None),
    ],
)
def test_how_a_step_computes_experts_on_cuda(held, dtype, capability, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = build("mixtral")
    model.set_experts_implementation(held)
    assert static_fit.routing(model, torch.device("cuda"), dtype) == ({"": held}, wanted)


def test_report():
    assert StaticBody(model_of("gemma2-eager"), 4, 64).report()[:-1] == [
        (
            "forward",
            "Gemma2ForCausalLM.forward, static cache",
            "the model's own modules run as they are; a graph takes their launches from the host",
        ),
        (
            "attention",
            "eager, masked, over all 64 places",
            "rows stand at their own positions; cost follows max_length, not the live length; sliding_attention of 9 by its "
            "mask",
        ),
        ("cache", "2 layers, 0.1 MiB, float32", "a device index for each row"),
    ]
    *_, experts, trial = StaticBody(model_of("mixtral"), 2, 64).report()
    assert experts == ("experts", "grouped_mm", "the model's own setting; a CPU has no host to wait for")
    assert re.fullmatch(r"logits within \d\.\de-0[678] of the model's own", trial[1])
    assert trial[2] == "rows at two positions; on a CPU nothing waits: stalls not watched for"


def refusal(model, max_batch=2, max_length=32) -> str:
    with pytest.raises(ValueError) as error:
        StaticBody(model, max_batch, max_length)
    return str(error.value)


def tiny(name: str, **sizes) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": 89, **ENDS, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}
REFUSED = {
    "which carries a recurrent state from token to token, wanted attention over keys and values alone": (
        "MambaForCausalLM",
        lambda: tiny("Mamba", hidden_size=16, num_hidden_layers=1),
    ),
    "whose forward takes no position_ids, wanted one that is given its positions, mask and cache": (
        "BloomForCausalLM",
        lambda: tiny("Bloom", hidden_size=32, n_layer=1, n_head=4),
    ),
    "whose forward takes no past_key_values, wanted one that is given its positions, mask and cache": (
        "OpenAIGPTLMHeadModel",
        lambda: tiny("OpenAIGPT", n_embd=32, n_layer=1, n_head=4),
    ),
    "whose alibi bias comes from a 2-D mask of one length for all rows, wanted rotary or learned positions": (
        "FalconForCausalLM",
        lambda: tiny("Falcon", **{**FALCON, "alibi": True}),
    ),
    "which cuts its causal mask out of a table by the cache's length, wanted one that uses the mask it is given": (
        "GPTNeoForCausalLM",
        lambda: tiny("GPTNeo", hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    ),
    "whose rotary table grows with the longest row ('dynamic'), wanted a table that stays": (
        "LlamaForCausalLM",
        lambda: tiny("Llama", **GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ),
    "whose rotary table changes for all rows when one passes 16 tokens ('longrope'), wanted a max_length of at most 16, "
    "got 32": (
        "Phi3ForCausalLM",
        lambda: tiny("Phi3", **{**GROUPED, "pad_token_id": 0}, rope_parameters=LONGROPE, original_max_position_embeddings=16),
    ),
    "with a LinearAttentionLayer in its cache, wanted keys and values of full or sliding attention alone": (
        "Lfm2ForCausalLM",
        lambda: tiny("Lfm2", **GROUPED, layer_types=["conv", "full_attention"]),
    ),
}


@pytest.mark.parametrize("what", REFUSED, ids=[name for name, _ in REFUSED.values()])
def test_models_that_no_static_cache_holds(what):
    name, make = REFUSED[what]
    said = refusal(make())
    assert said == f"StaticBody: model: got {name}{' ' if what.startswith('with') else ', '}{what}."


def test_a_long_rotary_table_is_held_below_its_change():
    _, make = REFUSED[next(what for what in REFUSED if "longrope" in what)]
    model = make()
    body = StaticBody(model, 4, 16)
    rows = go_on(body, *start(body, prompts((1, 5, 3, 8))), 8).tolist()
    assert rows == [generated(model, prompt, 8) for prompt in prompts((1, 5, 3, 8))]


def test_models_that_are_not_ready():
    t5 = transformers.T5Config(vocab_size=89, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    assert refusal(transformers.T5ForConditionalGeneration(t5).eval()) == (
        "StaticBody: model: got T5ForConditionalGeneration, an encoder-decoder, wanted a decoder alone."
    )
    assert refusal(nn.Linear(2, 2)) == (
        "StaticBody: model: got Linear, wanted a transformers PreTrainedModel with a language-model head; of a PEFT model pass "
        "model.get_base_model()."
    )
    model = build("gpt2").train()
    training = (
        "StaticBody: model: got GPT2LMHeadModel in training mode, wanted eval mode, where dropout is off; call model.eval() "
        "first."
    )
    assert refusal(model) == training
    body = StaticBody(model.eval(), 2, 32)
    with pytest.raises(ValueError) as error:
        body.model.train() and body.prefill(torch.zeros(1, 3, dtype=torch.long))
    assert str(error.value) == training
    model.eval()
    model.quantization_method = transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
    assert refusal(model) == (
        "StaticBody: model: got GPT2LMHeadModel, quantised by bitsandbytes, wanted weights in 16 or 32 bits: no capture of its "
        "kernels has been proven."
    )
    model = build("gpt2")
    model.config._attn_implementation = "flex_attention"
    assert refusal(model) == (
        "StaticBody: model: got GPT2LMHeadModel, whose attention is flex_attention, wanted sdpa or eager, which take a mask "
        "for every row; call model.set_attn_implementation('sdpa')."
    )
    assert refusal(build("gpt2").to("meta")) == (
        "StaticBody: model: got GPT2LMHeadModel on meta, wanted all of it on one device; move it there."
    )


def test_sizes_out_of_range():
    model = model_of("gpt2")
    assert refusal(model, max_length=97) == (
        "StaticBody: max_length: got 97, wanted at most 96, the positions that GPT2LMHeadModel is made for "
        "(config.max_position_embeddings); pass a smaller max_length."
    )
    assert refusal(model, max_batch=0) == "StaticBody: max_batch: got 0, wanted a positive whole number."
    body = StaticBody(model, 2, 32)
    with pytest.raises(ValueError) as error:
        body.prefill(torch.zeros(3, 4, dtype=torch.long))
    assert str(error.value) == (
        "StaticBody.prefill: ids: got (3, 4), wanted at most 2 rows of at most 32 tokens; split the batch, or build the "
        "decoder larger."
    )
    with pytest.raises(ValueError) as error:
        body.step(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    assert str(error.value) == ("StaticBody.step: got tokens (3,) and positions (3,), wanted one of each for at most 2 rows.")


def test_a_model_that_does_not_follow_the_mask_is_refused(monkeypatch):
    """BERT looks both ways unless it is told to be a decoder; a body whose mask shows one place too many is found too."""
    bert = loud(tiny("Bert", **{**SIZES, "pad_token_id": 0}))
    sentence = (
        r"StaticBody: model: got {}, whose logits with a static cache differ from its own by [\d.]+ of the largest, wanted at "
        r"most 0\.005: its attention does not follow the mask and the positions that it is given\."
    )
    assert re.fullmatch(sentence.format("BertLMHeadModel"), refusal(bert))
    masks = StaticBody._masks
    monkeypatch.setattr(StaticBody, "_masks", lambda self, place, end: masks(self, place + 1, end))
    assert re.fullmatch(sentence.format("GPT2LMHeadModel"), refusal(model_of("gpt2")))


def test_a_forward_that_fails_with_the_cache_is_refused_with_what_it_said():
    model = build("gpt2")
    whole = model.transformer.forward

    def forward(*inputs, past_key_values=None, **named):
        return whole(*inputs, past_key_values=past_key_values and past_key_values.to_legacy_cache(), **named)

    model.transformer.forward = forward
    assert refusal(model) == (
        "StaticBody: model: got GPT2LMHeadModel, whose forward fails with a static cache (AttributeError: 'RowCache' object "
        "has no attribute 'to_legacy_cache'), wanted one that takes a mask and a position for every row."
    )


SERVED = {  # sizes of real models, few layers; what they are here for
    "gpt2": lambda: transformers.GPT2Config(**ENDS),
    "gemma2": lambda: transformers.Gemma2Config(num_hidden_layers=2, sliding_window=24, vocab_size=32000, **ENDS),
    "falcon": lambda: transformers.FalconConfig(hidden_size=1024, num_attention_heads=16, num_hidden_layers=2, **ENDS),
    "mixtral": lambda: transformers.MixtralConfig(  # grouped_mm in bf16 takes the routing on the device
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4, **ENDS
    ),
}


def replayed(body: StaticBody, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What `go_on` gives, by a graph: on a stream of its own, token and position moving on the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body.step(token, position)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        token.copy_(body.step(token, position).argmax(-1))
        position.add_(1)
    found = torch.zeros(len(token), NEW, dtype=torch.int32, device=body.device)
    for place in range(NEW):
        graph.replay()
        found[:, place] = token
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "deterministic"), [*((name, False) for name in SERVED), ("gpt2", True)])
def test_a_captured_step_gives_the_tokens_of_eager_steps(family, deterministic):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SERVED[family](), dtype=torch.bfloat16).eval().to(device)
    body = StaticBody(model, 4, 256)
    assert body.routing is None and body.slices == (family == "falcon")
    eager = go_on(body, *start(body, prompts()))
    assert torch.equal(replayed(body, *start(body, prompts())), eager)


@pytest.mark.gpu
def test_experts_in_fp32_are_captured_by_another_way():
    device = torch.device("cuda", 0)
    torch.use_deterministic_algorithms(False)
    body = StaticBody(build("mixtral").to(device), 4, 80)
    assert body.routing == {"": "batched_mm"}
    eager = go_on(body, *start(body, prompts()))
    assert torch.equal(replayed(body, *start(body, prompts())), eager)
