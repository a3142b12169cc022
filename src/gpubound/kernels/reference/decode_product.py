"""The products of one decoding step, a token a row: x is the residual stream in fp32, weights stay in the model's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def norm_rows(x: Tensor, norm: Tensor, eps: float, out: Tensor) -> Tensor:
    return out.copy_(_normed(x, norm, eps))


@torch.no_grad()
def norm_product(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, k_weight: Tensor | None, v_weight: Tensor | None, bias: Tensor | None,
    k_bias: Tensor | None, v_bias: Tensor | None, out: Tensor, best: Tensor | None, arg: Tensor | None, dependent: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    normed = _normed(x, norm, eps)
    parts = [(weight, bias), (k_weight, k_bias), (v_weight, v_bias)]
    out.copy_(torch.cat([F.linear(normed, w.to(x.dtype), _wide(b, x)) for w, b in parts if w is not None], -1))
    if best is not None and arg is not None:
        size = 1 << (-(-out.shape[1] // best.shape[1]) - 1).bit_length()  # rows a partial maximum stands for
        padded = F.pad(out, (0, size * best.shape[1] - out.shape[1]), value=float("-inf"))
        found = padded.view(*best.shape, size).max(-1)
        best.copy_(found.values)  # NaN if any is
        arg.copy_(found.indices + torch.arange(best.shape[1], device=x.device) * size)
    return out, best, arg


@torch.no_grad()
def norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    out: Tensor, dependent: int = 0,
) -> Tensor:  # fmt: skip
    normed = _normed(x, norm, eps)
    g = F.linear(normed, gate.to(x.dtype), _wide(gate_bias, x))
    return out.copy_(F.silu(g) * F.linear(normed, up.to(x.dtype), _wide(up_bias, x)))


@torch.no_grad()
def add_product(h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dependent: int = 0) -> Tensor:
    return x.add_(F.linear(h.to(x.dtype), weight.to(x.dtype), _wide(bias, x)))


def _normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.to(x.dtype)


def _wide(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)
