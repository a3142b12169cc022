"""The models of the DeepSeek-V4 benchmark: transformers' own, with random weights, made where they lie."""

import re
from collections.abc import Sequence
from typing import Any

import torch


def v4_config(dry: bool, flash: bool = False) -> Any:
    """V4-Flash's kinds of layers in its order: tiny, half of Flash, or Flash itself, whose sizes are transformers' defaults."""
    from transformers import DeepseekV4Config

    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    small = {
        "vocab_size": 89, "hidden_size": 32, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "head_dim": 64, "partial_rotary_factor": 0.25, "q_lora_rank": 24, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "o_groups": 2, "o_lora_rank": 128, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 6, "sliding_window": 12,
    }  # fmt: skip
    half = {
        "hidden_size": 2048, "moe_intermediate_size": 1024, "num_hidden_layers": 43, "num_attention_heads": 32,
        "q_lora_rank": 512, "o_lora_rank": 512, "n_routed_experts": 64, "index_n_heads": 32,
    }  # fmt: skip
    sizes = small if dry else {"num_hidden_layers": 43} if flash else half
    layers = sizes["num_hidden_layers"]
    types = ["sliding_attention"] * 2 + [kinds[number % 2] for number in range(layers - 2)]
    return DeepseekV4Config(**sizes, layer_types=types, eos_token_id=None, max_position_embeddings=4096)


def build_model(device: torch.device, dry: bool, codes: bool = False) -> Any:
    """codes: of experts in fp4, of linear layers in fp8."""
    torch.manual_seed(0)
    model = _drawn(_made(v4_config(dry), device, dry, codes))
    return _in_fp8(model) if codes else model


def build_flash(devices: Sequence[torch.device], dry: bool) -> Any:
    """V4-Flash in the codes that it is published in: 155 GB, more than one GPU has. Its layers are made in equal shares on the
    devices."""
    from gpubound.models.deepseek_v4.checkpoint import deal

    model = _made(v4_config(dry, flash=True), torch.device("meta"), dry, codes=True)
    deal(model, devices)
    torch.manual_seed(0)
    model.apply(model._init_weights)
    return _in_fp8(_drawn(model))


def _made(config: Any, device: torch.device, dry: bool, codes: bool) -> Any:
    """In 16 bits, unless tiny; what transformers keeps in fp32 is fp32."""
    from transformers import DeepseekV4ForCausalLM

    from gpubound.models.deepseek_v4.family import in_fp4, keep_in_fp32

    with device, in_fp4(codes):
        model = DeepseekV4ForCausalLM._from_config(config, dtype=torch.float32 if dry else torch.bfloat16).eval()
    keep_in_fp32(model)
    return model


LAYERS = re.compile(r".*(self_attn\.(q_a|q_b|kv|o_a|o_b)|indexer\.q_b|shared_experts\.(gate|up|down))_proj")


@torch.no_grad()
def _in_fp8(model: Any) -> Any:
    """Its linear layers rounded to fp8, but the head, the compressors and what indexes share out."""
    from gpubound.models.deepseek_v4.family import Fp8Linear
    from gpubound.models.deepseek_v4.kernels.products import BLOCK

    for name, layer in [(name, module) for name, module in model.named_modules() if LAYERS.fullmatch(name)]:
        made, weight = Fp8Linear(layer, BLOCK), layer.weight.float()
        rows, columns = (-(-size // side) * side for size, side in zip(weight.shape, BLOCK))
        wide = torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
        tiles = wide.unflatten(1, (-1, BLOCK[1])).unflatten(0, (-1, BLOCK[0]))
        made.blocks.scale.copy_(tiles.abs().amax((1, 3)) / 448)
        codes = (tiles / made.blocks.scale[:, None, :, None]).flatten(0, 1).flatten(1)
        made.blocks.codes.copy_(codes[: weight.shape[0], : weight.shape[1]])
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, made)
    return model


def _drawn(model: Any) -> Any:
    """With the experts of words, and codes of experts, which transformers does not draw."""
    from gpubound.kernels.packed_weights import BIAS
    from gpubound.models.quantized.experts import PARTS, Fp4Experts

    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            order = torch.rand(len(buffer), model.config.n_routed_experts, device=buffer.device).argsort(-1)
            buffer.copy_(order[:, : buffer.shape[1]])
    for experts in (module for module in model.modules() if isinstance(module, Fp4Experts)):
        for packed in map(experts.packed, PARTS):
            packed.words.random_(-(2**31), 2**31)
            packed.scale.fill_(BIAS - 7)  # so the weights have a spread of 0.02
    return model
