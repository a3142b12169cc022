"""Rounding of 16-bit values to 8 bits, for products in fp8. kernels/scaled.py multiplies."""

import torch
from torch import Tensor

from .choose import implementation
from .reference.quantize import LARGEST


def quantize(x: Tensor, state: Tensor, dtype: torch.dtype, both: bool = True) -> tuple[Tensor, Tensor | None]:
    """(q, its transpose) of a matrix x ≈ q · scale; None for the transpose unless `both`.

    state   fp32 (scale, seen, …): values are divided by the scale, and `seen` is raised to the largest magnitude among them
    dtype   torch.float8_e4m3fn (finer, to 448) or torch.float8_e5m2 (wider, to 57344); what lies beyond becomes the largest
    """
    _check("quantize", x, state, dtype)
    return implementation("quantize", x)(x, state, dtype, both)


def quantize_swiglu(gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of silu(gate) · up, from the packed [gate | up] (N, 2 I): the result is never stored in 16 bits."""
    _check("quantize_swiglu", gate_up, state, dtype)
    return implementation("quantize.quantize_swiglu", gate_up)(gate_up, state, dtype)


def quantize_swiglu_backward(dh: Tensor, gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of the gradient of [gate | up] (N, 2 I), from dh (N, I), that of silu(gate) · up."""
    _check("quantize_swiglu_backward", gate_up, state, dtype)
    if dh.shape != (gate_up.shape[0], gate_up.shape[1] // 2) or dh.dtype != gate_up.dtype or dh.device != gate_up.device:
        raise ValueError(
            f"quantize_swiglu_backward: dh must be half of gate_up, {(gate_up.shape[0], gate_up.shape[1] // 2)} "
            f"{gate_up.dtype} on {gate_up.device}, got {tuple(dh.shape)} {dh.dtype} on {dh.device}; "
            f"pass the gradient of its SwiGLU."
        )
    return implementation("quantize.quantize_swiglu_backward", gate_up)(dh, gate_up, state, dtype)


def _check(op: str, x: Tensor, state: Tensor, dtype: torch.dtype) -> None:
    if x.dim() != 2 or not x.is_floating_point() or not x.numel():
        raise ValueError(
            f"{op}: wanted a floating-point matrix that is not empty, got {tuple(x.shape)} {x.dtype}; "
            f"flatten the leading dimensions before the call."
        )
    if op != "quantize" and x.shape[1] % 2:
        raise ValueError(f"{op}: a packed [gate | up] needs an even last dimension, got {tuple(x.shape)}; pack both halves.")
    if dtype not in LARGEST:
        raise ValueError(f"{op}: dtype must be one of {', '.join(map(str, LARGEST))}, got {dtype}; no product takes another.")
    dense = state.dim() == 1 and state.is_contiguous()
    if state.dtype != torch.float32 or not dense or len(state) < 2 or state.device != x.device:
        raise ValueError(
            f"{op}: state must be a torch.float32 vector (scale, seen) on {x.device}, "
            f"got {state.dtype} {tuple(state.shape)}"
            f"{'' if state.is_contiguous() else ', not contiguous,'} on {state.device}; begin with torch.tensor([1.0, 0.0])."
        )
