"""The ops of quack and FlashAttention 4, both written in CuTe DSL, with the arguments and results of ours.

Each kernel is compiled at its first call and kept in a folder (QUACK_CACHE_DIR, FLASH_ATTENTION_CUTE_DSL_CACHE_DIR). quack's
products are tuned at their first call unless `tuned` is False: 18 to 44 kernels each.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from quack import rmsnorm

    return rmsnorm(x, weight, eps=eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from quack import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


class _LayerNorm(torch.autograd.Function):
    """quack has both ways and no autograd.Function of them; its weight and bias are fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        wide = weight.float()
        y, rstd, mean = layernorm_fwd(x, wide, bias.float(), eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, wide, rstd, mean)
        ctx.dtype = weight.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        from quack.rmsnorm import layernorm_bwd

        x, weight, rstd, mean = ctx.saved_tensors
        dx, dw, db = layernorm_bwd(x, weight, g, rstd, mean)
        return dx, dw.to(ctx.dtype), db.to(ctx.dtype), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, eps)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    from quack import cross_entropy

    return cross_entropy(logits, labels)


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(x, weight, labels)


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, tuned: bool = True) -> Tensor:
    """SwiGLU and its gradient in the products' epilogues."""
    from quack.mlp import mlp_func

    return mlp_func(x, gate_up, down, "swiglu", tuned=tuned, concat_layout=True)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, of q (B, T, H, D), k and v (B, T, K, D)."""
    from flash_attn.cute import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale, causal=True)[0]
