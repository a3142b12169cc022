"""A decoding step's products with packed weights (packed.py). As in decoding.py, everything is written in place.

Weights that read the same x are packed as one: q, k and v below each other; of gate and up a row each by turns, so that a
program holds both halves of an output. `pack_stacked` and `pack_gate_up` make them.
"""

import torch
from torch import Tensor

from .checks import require
from .choose import implementation
from .decoding import WRITTEN, _check_best
from .packed import BITS, GROUP, Packed, pack


def pack_stacked(weights: list[Tensor], kind: str) -> Packed:
    """One packed weight of several below each other."""
    parts = [pack(weight, kind) for weight in weights]
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(words=torch.cat([p.words for p in parts]), scale=torch.cat([p.scale for p in parts]))


def pack_gate_up(gate: Tensor, up: Tensor, kind: str) -> Packed:
    """Row 2i is gate's row i, row 2i + 1 up's."""
    parts = [pack(weight, kind) for weight in (gate, up)]
    words, scale = (torch.stack([p[i] for p in parts], 1).flatten(0, 1) for i in range(2))  # type: ignore[misc]
    return parts[0]._replace(words=words, scale=scale)


def dequantize(weight: Packed, out: Tensor, turns: int = 1) -> Tensor:
    """out (rows, columns) = the numbers that `weight` stands for, rounded to out's dtype.

    turns   of a weight whose rows are so many weights' by turns, those come out below each other: 2 for gate and up
    """
    _check_packed("dequantize", weight)
    require("dequantize", "out", out, None, (weight.rows, weight.columns), weight.words.device, WRITTEN)
    if turns < 1 or weight.rows % turns:
        raise ValueError(f"dequantize: turns: got {turns}, wanted a number that divides the {weight.rows} rows.")
    return implementation("quantized_product.dequantize", out)(weight, out, turns)


def quantized_norm_product(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Packed,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    best: Tensor | None = None,
    arg: Tensor | None = None,
    dependent: int = 0,
) -> Tensor:
    """out (B, rows, fp32) = rms_norm(x) times a packed weight. `best` and `arg` as in norm_product."""
    if out is None:
        out = torch.empty(x.shape[0], weight.rows, device=x.device, dtype=torch.float32)
    _check("quantized_norm_product", x, norm, weight)
    _check_bias("quantized_norm_product", bias, weight)
    require("quantized_norm_product", "out", out, torch.float32, (x.shape[0], weight.rows), x.device, WRITTEN)
    _check_best("quantized_norm_product", best, arg, weight.rows, x)
    implementation("quantized_product.quantized_norm_product", norm)(x, norm, eps, weight, bias, out, best, arg, dependent)
    return out


def quantized_norm_gate_up(
    x: Tensor,
    norm: Tensor,
    eps: float,
    gate_up: Packed,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    dependent: int = 0,
) -> Tensor:
    """out (B, rows / 2, in norm's dtype or its own) = silu(n gateᵀ) · (n upᵀ), n the RMSNorm of x; bias by turns."""
    if out is None:
        out = torch.empty(x.shape[0], gate_up.rows // 2, device=x.device, dtype=norm.dtype)
    _check("quantized_norm_gate_up", x, norm, gate_up)
    if gate_up.rows % 2:
        raise ValueError(
            f"quantized_norm_gate_up: gate_up has {gate_up.rows} rows, wanted gate and up by turns; use pack_gate_up."
        )
    _check_bias("quantized_norm_gate_up", bias, gate_up)
    require("quantized_norm_gate_up", "out", out, None, (x.shape[0], gate_up.rows // 2), x.device, WRITTEN)
    return implementation("quantized_product.quantized_norm_gate_up", norm)(x, norm, eps, gate_up, bias, out, dependent)


def quantized_add_product(h: Tensor, weight: Packed, bias: Tensor | None, x: Tensor, dependent: int = 0) -> Tensor:
    """x += h weightᵀ, in place: the output and the down product, with the residual."""
    if h.dim() != 2 or h.shape[1] != weight.columns or not h.is_contiguous():
        raise ValueError(
            f"quantized_add_product: h must be contiguous (rows, {weight.columns}) to match weight, got {tuple(h.shape)}."
        )
    require("quantized_add_product", "h", h, None, tuple(h.shape), weight.words.device, "the kernel reads row after row")
    _check_packed("quantized_add_product", weight)
    _check_bias("quantized_add_product", bias, weight)
    require("quantized_add_product", "x", x, torch.float32, (h.shape[0], weight.rows), h.device, WRITTEN)
    return implementation("quantized_product.quantized_add_product", h)(h, weight, bias, x, dependent)


def _check(op: str, x: Tensor, norm: Tensor, weight: Packed) -> None:
    if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{op}: x must be a contiguous torch.float32 (rows, hidden), got {x.dtype} {tuple(x.shape)}.")
    if norm.shape != x.shape[1:]:
        raise ValueError(f"{op}: norm must have shape {tuple(x.shape[1:])} to match x, got {tuple(norm.shape)}.")
    if weight.columns != x.shape[1]:
        raise ValueError(f"{op}: the weight must have {x.shape[1]} columns to match x, got {weight.columns}.")
    require(op, "norm", norm, None, tuple(norm.shape), x.device, "it has one weight for each column of x")
    _check_packed(op, weight)
    require(op, "the weight's words", weight.words, torch.int32, tuple(weight.words.shape), x.device, "move the weight to x")


def _check_packed(op: str, weight: Packed) -> None:
    """What `pack` made, whole: rows of it are read one behind the other."""
    if weight.kind not in BITS:
        raise ValueError(f"{op}: the weight's kind must be one of {', '.join(BITS)}, got {weight.kind!r}; make it with pack.")
    groups, fp8, device = -(-weight.columns // GROUP), weight.kind == "fp8", weight.words.device
    shape = (weight.rows, groups * GROUP * BITS[weight.kind] // 32)
    require(op, "the weight's words", weight.words, torch.int32, shape, device, "make it with pack")
    kind = torch.float32 if fp8 else torch.bfloat16
    require(op, "the weight's scale", weight.scale, kind, (weight.rows, 1 if fp8 else groups), device, "make it with pack")


def _check_bias(op: str, bias: Tensor | None, weight: Packed) -> None:
    if bias is not None:
        require(op, "bias", bias, None, (weight.rows,), weight.words.device, "it has one number for each row of the weight")
