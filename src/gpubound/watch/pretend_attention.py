"""Attention of the pretend device: one op forward and one backward, as a GPU's fused kernels are.

Without it torch takes its math form there, some twenty launches that no GPU makes. All tensors are those of the CPU inside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run scaled_dot_product_attention as torch's op for backends that bring a kernel, unless sdpa_kernel(MATH) forbids it."""
    backends = torch.backends.cuda
    if not (backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()):
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    return fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return softmax(scale q k' + bias) in at least fp32; 0 in a row that is masked altogether."""
    scores = scale * query @ key.mT
    if is_causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(), float("-inf")
        )
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1).nan_to_num(0.0)


def _dropout_factor(weights: Tensor, dropout_p: float, seed: Tensor) -> Tensor | float:
    """Return the factor of each weight after dropout, the same one in backward."""
    if not dropout_p:
        return 1.0
    draw = torch.Generator(weights.device).manual_seed(int(seed))
    uniform = torch.rand(weights.shape, generator=draw, device=weights.device, dtype=torch.float32)
    return (uniform >= dropout_p) / (1 - dropout_p)


def _widened(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Return keys and values in the query's wider type, one head for each of the query's."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[-3] // others[0].shape[-3] if query.dim() > 3 else 1
    return [query.to(dtype), *(t.to(dtype).repeat_interleave(groups, -3) if groups > 1 else t.to(dtype) for t in others)]


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    seed = torch.randint(1 << 31, (), device="cpu") if dropout_p else torch.zeros((), dtype=torch.int64, device="cpu")
    q, k, v = _widened(query, key, value)
    weights = _weights(q, k, bias, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    out = (weights * _dropout_factor(weights, dropout_p, seed) @ v).to(query.dtype)
    empty, sums = query.new_empty(0), query.new_zeros(query.shape[:-1], dtype=torch.float32)
    return out, sums, empty, empty, query.shape[-2], key.shape[-2], seed, torch.zeros_like(seed), empty


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, needs: list[bool], out: Tensor, sums: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = _widened(query, key, value)
    weights, grad = _weights(q, k, bias, is_causal, scale), grad.to(q.dtype)
    mask = _dropout_factor(weights, dropout_p, seed)
    grad_weights = grad @ v.mT * mask
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    by_head = scale * grad_scores.mT @ q, (weights * mask).mT @ grad  # of keys and values, one for each of the query's heads
    grad_key, grad_value = (
        each.unflatten(-3, (t.shape[-3], -1)).sum(-3) if each.shape != t.shape else each
        for each, t in zip(by_head, (key, value))
    )
    grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needs[3] else query.new_empty(0)
    return (scale * grad_scores @ k).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_bias


OPS = {
    "_scaled_dot_product_fused_attention_overrideable": forward,
    "_scaled_dot_product_fused_attention_overrideable_backward": backward,
}
