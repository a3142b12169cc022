"""Small models that the decoder runs through its fused kernels, their prompts, and what Hugging Face makes of them."""

import functools

import pytest
import torch
import transformers

import gpubound as gb
from gpubound.decode.runner import SamplingVariant
from gpubound.models import Decoder, DecoderConfig
from gpubound.watch import no_stall, watch

VOCABULARY = 89
ROOM = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": ROOM,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "Llama": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "Mistral": {"sliding_window": 9},  # shorter than the texts
    "Qwen2": {},  # biases on q, k and v
    "Qwen3": {"num_attention_heads": 6},  # normed heads, wider than hidden in all
    "SmolLM3": {"num_hidden_layers": 4},  # its fourth layer has no positions
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 6, "head_dim": ...}  # fmt: skip
SPARSE = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 3,
                 "moe_intermediate_size": 24, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 9,
                 "layer_types": ["sliding_attention", "full_attention"]},
    "Glm4Moe": {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    "Dots1": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
              "routed_scaling_factor": 1.5},
    "Mellum": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 9,
               "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
                   "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                   "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}},
    "MiniMaxM2": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "DeepseekV2": {**LATENT, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                   "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                   "routed_scaling_factor": 1.5},
    "DeepseekV3": {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                   "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "attention_bias": True, "rope_parameters": {
                       "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24,
                       "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 4.0, "beta_slow": 1.0}},
    "GptOss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9,
               "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 1.0,
               "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
}  # fmt: skip
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "query_pre_attn_scalar": 5}
HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
OTHERS = {
    "Gemma": {},
    "Gemma2": LOCAL | {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5},
    "Gemma3": LOCAL | {"final_logit_softcapping": 1.5, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    }},
    "Gemma4": {  # the last two of four layers share keys; layers without a window have wider heads
        "num_hidden_layers": 4, "layer_types": LOCAL["layer_types"] * 2, "sliding_window": 9, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6,
        "final_logit_softcapping": 1.5,
    },
    "Gemma4Unified": {  # keys that are values
        "layer_types": LOCAL["layer_types"], "sliding_window": 9, "global_head_dim": 16, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "Cohere": {"logit_scale": 0.5},
    "Cohere2": {"logit_scale": 0.5, "layer_types": LOCAL["layer_types"], "sliding_window": 9},
    "Ernie4_5": {"use_bias": True},
    "Glm": {"rope_parameters": HALF, "eos_token_id": []},
    "Glm4": {"rope_parameters": HALF, "attention_bias": True, "eos_token_id": []},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "head_dim": ...},
    "Exaone4": {"layer_types": LOCAL["layer_types"], "sliding_window": 9},
    "GPT2": {"n_inner": 16, "num_key_value_heads": None},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 9, "num_key_value_heads": None},
    "GPTNeoX": {"rope_parameters": HALF, "num_key_value_heads": None},
    "Granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7,
        "rms_norm_eps": 1e-2,
    },
    "Nemotron": {"rope_parameters": HALF},
    "Olmo2": {"num_key_value_heads": 4},
    "Ministral": {"layer_types": LOCAL["layer_types"], "sliding_window": 9},
    "Ministral3": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": ROOM, "beta_fast": 4.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
    }},
    "OPT": {"ffn_dim": 32, "num_key_value_heads": None},
    "Phi": {"rope_parameters": HALF},
    "SeedOss": {"attention_out_bias": True, "mlp_bias": True},
    "StableLm": {"rope_parameters": HALF, "use_qkv_bias": True, "use_parallel_residual": True},
    "Starcoder2": {"sliding_window": 13},
    "VaultGemma": LOCAL | {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5},
    "Olmo3": {"layer_types": LOCAL["layer_types"], "sliding_window": 9, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    }},
    "Phi3": {"sliding_window": 13, "rope_parameters": HALF},
}  # fmt: skip
SAME = {  # read as others are
    "Arcee": {"attention_bias": True, "mlp_bias": True},
    "AXK1": {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
             "topk_group": 2},
    "Glm4MoeLite": {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "GPTBigCode": {"multi_query": False, "num_key_value_heads": None},
    "GPTJ": {"rotary_dim": 4, "num_key_value_heads": None},
    "Helium": {"attention_bias": True},
    "HyperCLOVAX": {
        "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7,
        "rms_norm_eps": 1e-2,
    },
    "Jais2": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "MiniCPM3": {**LATENT, "scale_emb": 3.0, "scale_depth": 0.6, "dim_model_base": 8},
    "Mistral4": {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                 "routed_scaling_factor": 1.5, "rope_parameters": {
                     "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": ROOM,
                     "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}},
    "Olmo": {"attention_bias": True},
    "SolarOpen": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    "Youtu": {**LATENT, "rope_interleave": False},
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "rope_parameters": HALF,
}  # fmt: skip
FALCON = {
    "num_hidden_layers": 3, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 8, "mlp_multipliers": [0.7, 1.6], "key_multiplier": 0.6, "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "embedding_multiplier": 3.0,
    "ssm_multipliers": [0.6, 1.5, 0.8, 1.2, 0.7], "lm_head_multiplier": 0.5, "rms_norm_eps": 1e-2,
}  # fmt: skip
GRANITE = {
    "num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7,
    "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "rms_norm_eps": 1e-2, "head_dim": ...,
}  # fmt: skip
RECURRENT = {
    "NemotronH": {
        "layer_types": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention", "mlp"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
    },
    "Bamba": {
        "num_hidden_layers": 4, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2,
        "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "GraniteMoeHybrid": GRANITE,
    "GraniteMoeHybrid dense": GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "Mamba2": {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 3,
        "num_key_value_heads": ..., "num_attention_heads": ..., "intermediate_size": ..., "max_position_embeddings": ...,
    },
    "FalconH1": FALCON,
    "FalconH1 normed": FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "Qwen3_5": DELTA,
    "Qwen3Next": DELTA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                          "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": True},
    "Lfm2Moe": {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
    "Lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True},
}  # fmt: skip
BESIDE = ["FalconH1", "FalconH1 normed"]  # Mamba-2 beside attention
MAMBA = ["Bamba", "NemotronH", "Mamba2", "GraniteMoeHybrid", "GraniteMoeHybrid dense", *BESIDE]
HUGGING_FACE = [*FAMILIES, *OTHERS, "Llama placed", "Gemma2 placed", "Olmo2 placed", "Phi3 placed"]
ALL = [*HUGGING_FACE, "own"]


def build(kind: str, dtype: torch.dtype = torch.float32, device="cpu", **options) -> torch.nn.Module:
    """A model with weights large enough that attention decides the tokens; norms and biases are no ones and zeros."""
    torch.manual_seed(0)
    if kind == "own":
        model: torch.nn.Module = Decoder(
            DecoderConfig(32, 40, 2, 4, 2, VOCABULARY, **{"qkv_bias": True, "qk_norm": True} | options)
        )
    else:
        family = kind.partition(" ")[0]
        typed = "Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5"
        name = f"{family}TextConfig" if family in typed else f"{family}Config"
        known = FAMILIES | SPARSE | OTHERS | SAME | RECURRENT
        chosen = SIZES | known[kind if kind in known else family] | options
        if "hidden_size_per_layer_input" in chosen:  # each word has them
            chosen["vocab_size_per_layer_input"] = chosen["vocab_size"]
        config = getattr(transformers, name)(**{key: value for key, value in chosen.items() if value is not ...})
        how = {"attn_implementation": "eager"} if family in ("Gemma2", "VaultGemma") else {}  # SDPA leaves its cap out
        auto = transformers.AutoModelForCausalLM  # which has not Mistral 4: it knows the model with images alone
        model = transformers.Mistral4ForCausalLM(config) if family == "Mistral4" else auto.from_config(config, **how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name or (kind in ("Falcon", "GPTNeo") and ".ln_" in name)) and not name.endswith("bias"):
                shifted = "Gemma" in kind or (kind in ("Qwen3_5", "Qwen3Next") and "linear_attn" not in name)
                parameter.uniform_(0.5, 1.5).sub_(1.0 if shifted and "Gemma4" not in kind else 0.0)
            else:
                parameter.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(std=0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.2)
    model = model.to(device, dtype).eval()
    if kind.endswith("placed"):
        gb.place(model, device=device)
    return model


@functools.cache
def shared(kind: str = "Llama", device: str = "cpu", max_batch: int = 4, **options) -> gb.FastDecoder:
    """One decoder for all tests that leave its model alone. Its certificate is test_parity.py's subject."""
    return gb.decoder(build(kind, device=device), max_batch, ROOM, **{"verify": False} | options)


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths or (1, 19, 6)]


def hugging_face(model, prompt: list[int], new: int, **settings) -> list[int]:
    """The greedy tokens of the model's own `generate`."""
    ids = torch.tensor([prompt], device=model.device)
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0, **settings
    )
    return whole[0, len(prompt) :].tolist()


@torch.no_grad()
def logits(model, ids: list[int]) -> torch.Tensor:
    """(T, V) of the model's own forward."""
    output = model(torch.tensor([ids], device=next(model.parameters()).device))
    return getattr(output, "logits", output)[0].float()


def greedy_by_forwards(model, prompt: list[int], new: int) -> list[int]:
    """What greedy decoding is: the whole text through the model for every token."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def likeliest(model, prompt: list[int], tokens: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each of `tokens` but the last, by one forward.

    They are `tokens` themselves exactly where those are what greedy decoding gives.
    """
    return logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()


def assert_greedy(fast, given: list[list[int]], new: int, model=None) -> list[list[int]]:
    """Generate for the prompts, and compare with the likeliest tokens of the model's own forward. Return the tokens."""
    found = fast.generate(given, max_new_tokens=new, stop=()).tokens
    assert found == [likeliest(model or fast.model, prompt, row) for prompt, row in zip(given, found)]
    return found


def assert_alike(fast, plain) -> None:
    """Compare drawn tokens, penalties, log-probabilities, stops and scores of two decoders of one model."""
    given = prompts(3, 8, 1)
    how = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2, "logprobs": True}
    found, want = (one.generate(given, **how) for one in (fast, plain))
    assert found.tokens == want.tokens
    for mine, theirs in zip(found.sequences, want.sequences):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4)
    stop = want.tokens[1][9]
    found, want = (one.generate(given, **how, stop=stop) for one in (fast, plain))
    assert found.tokens == want.tokens and {s.finish for s in found.sequences} == {"stop token", "length"}
    assert fast.score(given[1])[0] == pytest.approx(plain.score(given[1])[0], abs=1e-4)


VARIANTS = (SamplingVariant(), SamplingVariant(greedy=False, penalty=True, logprobs=True))


def assert_never_waits(launch, rows: int, steps: int = 1) -> None:
    """Run steps of `launch`(rows, steps, variant) of a decoder on the pretend device, which sees every wait and copy."""
    with no_stall(), torch.no_grad(), watch() as ledger:
        for variant in VARIANTS:
            launch(rows, steps, variant)
    ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)


def assert_no_syncs(fast, given: list[list[int]], before: int = 2, **how):
    """Generate on GPUs and count the host's waits, after `before` requests, which compile and capture."""
    for _ in range(before):
        fast.generate(given, max_new_tokens=64, **how)
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    with watch(gputrace=True) as ledger:
        found = fast.generate(given, max_new_tokens=64, **how)
    assert ledger.totals["syncs"] == 0, str(ledger)
    return found


def scaled(model: torch.nn.Module, factor: float = 0.2) -> torch.nn.Module:
    """Scale the matrices of a wide model: with those of `build` one word would win everywhere."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def interpreted_report(interpret, model, given: list[list[int]], new: int, rows: int = 2, **options) -> list[tuple]:
    """Compare the tokens of kernels in Triton's interpreter with those of their references. Return the decoder's table."""
    options = {"k": 1, "verify": False} | options
    want = gb.decoder(model, rows, 16, **options).generate(given, max_new_tokens=new).tokens
    interpret()
    fast = gb.decoder(model, rows, 16, **options)
    assert fast.generate(given, max_new_tokens=new).tokens == want
    return fast.body.report()


def followed(fast, new: int = 6) -> list[int]:
    """Return the tokens after PROMPT, which are the likeliest ones of the model as it is now."""
    return assert_greedy(fast, [PROMPT], new)[0]


class Bytes:
    """A tokenizer whose tokens are bytes, as far as the vocabulary goes: a letter beyond ASCII takes two."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


SPARSE_KINDS = pytest.mark.parametrize("kind", SPARSE)
PROMPT = prompts(7)[0]


def assert_follows(fast) -> None:
    """Assert that tokens are the model's after its weights have changed in place, and after they were replaced."""
    before = of_decoder(fast, 12)
    with torch.no_grad():
        for parameter in fast.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    changed = of_decoder(fast, 12)
    assert changed == likeliest(fast.model, PROMPT, changed) and changed != before
    fast.model.load_state_dict({name: t.flip(0).clone() for name, t in fast.model.state_dict().items()}, assign=True)
    moved = of_decoder(fast, 12)
    assert moved == likeliest(fast.model, PROMPT, moved) and moved != changed


def of_decoder(fast, new: int = 6) -> list[int]:
    return fast.generate(PROMPT, max_new_tokens=new).tokens[0]
