"""Small DeepSeek-V4 models with short windows and stretches, so that texts of some tokens pass every edge."""

import functools

import torch
import transformers

from gpubound.decode.runner import RunnerConfig
from gpubound.models.deepseek_v4.decode.body import CompressedBody
from gpubound.models.registry import reader_of

VOCABULARY, ROOM, WINDOW = 89, 320, 12
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {CSA: 4, HCA: 8}
TOP = 6  # entries that an index chooses: of those of 24 tokens, all
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "max_position_embeddings": ROOM,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", HCA, CSA],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": RATES,
    "sliding_window": WINDOW,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 24,  # so many that no score is exactly 0, where transformers' choice among equals is not defined
    "index_head_dim": 8,
    "index_topk": TOP,
    "swiglu_limit": 0.5,
    "hc_sinkhorn_iters": 3,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(dtype=torch.float32, device="cpu", **options) -> transformers.PreTrainedModel:
    """Weights large enough that attention and experts decide the tokens; logits of about 1."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV4Config(**SIZES | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.05 if name == "lm_head.weight" else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(VOCABULARY, SIZES["n_routed_experts"]).argsort(-1)[:, :2])
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.2)
    return model.to(device, dtype)


model_of = functools.cache(build)


def body_of(model=None, rows: int = 3, tokens: int = 1) -> CompressedBody:
    return CompressedBody(reader_of(model or model_of()), RunnerConfig(rows, ROOM, tokens))


def text(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def own_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) of the model's own forward, without a cache."""
    return model(ids[None].to(model.device), use_cache=False).logits[0]


def stand(body: CompressedBody, texts: list[torch.Tensor]) -> None:
    """Let each row stand behind its text; what stands behind shorter ones is garbage."""
    ids = torch.stack([torch.cat([t, text(max(map(len, texts)) - len(t), seed=7)]) for t in texts])
    body.prefill(ids.to(body.device), torch.tensor([len(t) for t in texts], device=body.device))


def step(body: CompressedBody, tokens, positions) -> torch.Tensor:
    given = (torch.as_tensor(values, dtype=torch.int32).to(body.device) for values in (tokens, positions))
    return body.step(*given).clone()
