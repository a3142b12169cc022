"""Small models of many families for the general body, their prompts, and the tokens that it and `generate` give."""

import functools

import torch
import transformers

from gpubound.decode.hf_forward import StaticCacheRunner
from gpubound.decode.runner import RunnerConfig

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
def body_of(family: str, device: str | torch.device = "cpu") -> StaticCacheRunner:
    return StaticCacheRunner(build(family).to(device), RunnerConfig(4, 80))


def prompts(lengths=(1, 19, 6, 12)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(89, (length,), generator=generator) for length in lengths]


def start(body: StaticCacheRunner, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill all but the last token of each row, garbage behind; (last tokens, their places)."""
    ids = torch.randint(89, (len(rows), max(map(len, rows)) - 1), generator=torch.Generator().manual_seed(2))
    for filled, row in zip(ids, rows):
        filled[: len(row) - 1] = row[:-1]
    lengths = torch.tensor([len(row) - 1 for row in rows])
    body.prefill(ids.to(body.device), lengths.to(body.device))
    token = torch.tensor([row[-1] for row in rows], dtype=torch.int32)
    return token.to(body.device), lengths.int().to(body.device)


def go_on(body: StaticCacheRunner, token: torch.Tensor, position: torch.Tensor, new: int = NEW, logits: list | None = None):
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
