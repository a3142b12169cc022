"""A kernel's write to an argument counts in its version, as that of torch's own in-place ops does."""

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from gpubound import kernels
from gpubound.kernels.registry import every, load
from gpubound.layers.linear_product import linear

OPS = every()

IN_PLACE = [
    "accept", "activate_rows", "adamw", "adamw8", "add_adapters", "add_norm", "add_product", "add_routed", "add_rows",
    "add_slots", "begin_draft", "choose_experts", "column_down", "column_gate_up", "compress", "decode_attention",
    "delta_step", "dequantize", "dequantize_nf4", "divergence", "extend_draft", "gate_rows", "hc_read",
    "hc_sums", "hc_write", "index_scores", "index_topk", "keep_stream", "latent_attention", "latent_queries",
    "layer_norm_rows", "lora_gradients", "lora_up", "mamba_step", "norm_gate_up", "norm_product", "norm_products", "norm_rows",
    "pick", "plan_update", "poly_attention_step", "propose", "quantize", "quantize_swiglu", "quantize_swiglu_backward",
    "quantized_add_product", "quantized_add_routed", "quantized_column_down", "quantized_column_gate_up",
    "quantized_decode_attention", "quantized_matmul", "quantized_norm_gate_up", "quantized_norm_product",
    "quantized_routed_down", "quantized_routed_gate_up", "route", "routed_down", "routed_gate_up", "sample", "select_experts",
    "send_product", "send_products", "send_words", "short_conv", "sparse_attention", "split_gate_up", "split_product",
    "take_words", "tiled_add_product", "tiled_norm_gate_up", "tiled_norm_product", "turn_heads", "write_tokens",
]  # fmt: skip


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_kernel_bumps_the_version_of_each_argument_that_it_writes(op, device):
    drawn = OPS[op].example(torch.Generator().manual_seed(0))
    arguments = tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), drawn)
    tensors = {keystr(path): t for path, t in tree_flatten_with_path(arguments)[0] if isinstance(t, torch.Tensor)}
    before = {name: (_bytes(t), t._version) for name, t in tensors.items()}
    with torch.no_grad():
        load("triton", op)(*arguments)
    written = {name for name, t in tensors.items() if not torch.equal(_bytes(t), before[name][0])}
    bumped = {name for name, t in tensors.items() if t._version > before[name][1]}
    assert written <= bumped and bool(bumped) == (op in IN_PLACE)


def test_a_linear_layers_backward_notices_an_update_by_our_optimizer(device):
    weight = torch.ones(16, 16, device=device, requires_grad=True)
    weight.main_grad = torch.zeros_like(weight)
    y = linear(torch.ones(2, 16, device=device, requires_grad=True), weight)
    flat = weight.detach().view(-1)
    kernels.adamw(flat, torch.ones_like(flat), torch.zeros_like(flat), torch.zeros_like(flat), torch.ones(6, device=device))
    with pytest.raises(RuntimeError, match="in place"):
        y.sum().backward()
