"""The products of one decoding step for several rows at once, on tensor cores: the ops of decode_product.py, of 2 to 32 rows.

There each row is multiplied by itself in fp32: bound by memory for one row, and by waiting for a few. Here all rows are one
product, for which x, times its norm's gain, is rounded to the dtype of the weights. So a row's bits differ from those that it
gets alone. In fp16 such an x may have no end, where its norm has: bf16 is what these ops are for.

The stream x may be given in the dtype of the weights: each program reads all of it, and fp32 is twice as many bytes.
`tiled_add_product` writes such a copy.
"""

import torch
from torch import Tensor

from .decode_product import (
    WRITTEN,
    Norm,
    add_product_reference,
    check_activation,
    check_add,
    check_biases,
    check_stream,
    draw_gate_up,
    draw_qkv,
    draw_stream,
    form,
    norm_gate_up_reference,
    norm_product_reference,
    side_by_side,
)
from .dispatch import implementation, require
from .registry import definition, draw, frozen, zeros

MOST = 32  # rows
PART = 16  # outputs of a partial maximum
WIDE = 1064  # columns of an example: a slice of weights, which a program walks along by, and a part of another


def tiled_norm_product(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    out: Tensor | None = None,
    best: Tensor | None = None,
    arg: Tensor | None = None,
    dependent: int = 0,
) -> Tensor:
    """`norm_product` of all rows at once: out (B, rows, fp32) = rms_norm(x) times one weight, or two or three side by side.

    best, arg  (B, parts): the largest of each PART outputs and their columns, for `pick`
    """
    weights, rows = side_by_side("tiled_norm_product", weight, k_weight, v_weight)
    if out is None:
        out = torch.empty(x.shape[0], rows, device=x.device, dtype=torch.float32)
    check_stream("tiled_norm_product", x, norm, *weights, rounded=True)
    _check_rows("tiled_norm_product", x)
    check_biases("tiled_norm_product", (bias, k_bias, v_bias), weights)
    require("tiled_norm_product", "out", out, torch.float32, (x.shape[0], rows), x.device, WRITTEN)
    if best is not None and arg is not None:
        parts = (x.shape[0], -(-rows // PART))
        require("tiled_norm_product", "best", best, torch.float32, parts, x.device, WRITTEN)
        require("tiled_norm_product", "arg", arg, torch.int32, parts, x.device, WRITTEN)
    shape = form(norm) if best is None else (None if norm is None else norm.offset, 5, WIDE, 32, True)
    kernel = implementation("tiled_norm_product", weight, None, shape)
    return kernel(x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, best, arg, dependent)[0]


def _qkv_example(
    g: torch.Generator, offset: float | None = 0.0, rows: int = 5, hidden: int = WIDE, heads: int = 32, best: bool = False
) -> tuple:
    drawn = *draw_stream(g, hidden, offset, rows), *draw_qkv(g, hidden, heads), zeros(rows, 2 * heads)
    parts = rows, -(-2 * heads // PART)
    return (*drawn, zeros(*parts), torch.zeros(parts, dtype=torch.int32, device="cpu")) if best else drawn


@definition(_qkv_example)
@torch.no_grad()
def tiled_norm_product_reference(
    x: Tensor, norm: Norm | None, weight: Tensor, k_weight: Tensor | None, v_weight: Tensor | None, bias: Tensor | None,
    k_bias: Tensor | None, v_bias: Tensor | None, out: Tensor, best: Tensor | None = None, arg: Tensor | None = None,
    dependent: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    return norm_product_reference(x.float(), norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, best, arg)


def tiled_norm_gate_up(
    x: Tensor,
    norm: Norm | None,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    out: Tensor | None = None,
    dependent: int = 0,
    activation: str = "silu",
) -> Tensor:
    """`norm_gate_up` of all rows at once: out (B, rows, in gate's dtype) = activation(n gateᵀ) · (n upᵀ), n the normed x."""
    if out is None:
        out = torch.empty(x.shape[0], gate.shape[0], device=x.device, dtype=gate.dtype)
    check_stream("tiled_norm_gate_up", x, norm, gate, up, rounded=True)
    _check_rows("tiled_norm_gate_up", x)
    require("tiled_norm_gate_up", "up", up, gate.dtype, tuple(gate.shape), x.device, "it is multiplied with gate, row by row")
    check_biases("tiled_norm_gate_up", (gate_bias, up_bias), [gate, up])
    require("tiled_norm_gate_up", "out", out, gate.dtype, (x.shape[0], gate.shape[0]), x.device, WRITTEN)
    check_activation("tiled_norm_gate_up", activation)
    kernel = implementation("tiled_norm_gate_up", gate, None, form(norm, activation))
    return kernel(x, norm, gate, up, gate_bias, up_bias, out, dependent, activation)


def _gate_up_example(
    g: torch.Generator, offset: float | None = 0.0, activation: str = "silu", rows: int = 5, hidden: int = WIDE, width: int = 40
) -> tuple:
    return *draw_stream(g, hidden, offset, rows), *draw_gate_up(g, rows, hidden, width), 0, activation


@definition(_gate_up_example)
@torch.no_grad()
def tiled_norm_gate_up_reference(
    x: Tensor, norm: Norm | None, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, out: Tensor,
    dependent: int = 0, activation: str = "silu",
) -> Tensor:  # fmt: skip
    return norm_gate_up_reference(x.float(), norm, gate, up, gate_bias, up_bias, out, dependent, activation)


def tiled_add_product(
    h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dependent: int = 0, copy: Tensor | None = None
) -> Tensor:
    """`add_product` of all rows at once: x += h weightᵀ, in place. `copy`, in the weight's dtype, receives x, too."""
    check_add("tiled_add_product", h, weight, bias, x.device)
    _check_rows("tiled_add_product", h)
    shape = h.shape[0], weight.shape[0]
    require("tiled_add_product", "x", x, torch.float32, shape, x.device, WRITTEN)
    if copy is not None:
        require("tiled_add_product", "copy", copy, weight.dtype, shape, x.device, WRITTEN)
    return implementation("tiled_add_product", weight)(h, weight, bias, x, dependent, copy)


def _add_example(g: torch.Generator, rows: int = 5, inner: int = WIDE, hidden: int = 48) -> tuple:
    h, weight, x = draw(g, rows, inner), draw(g, hidden, inner), draw(g, rows, hidden).detach()
    return h, weight, None, x, 0, frozen(torch.zeros(rows, hidden, device="cpu", dtype=torch.float32))


@definition(_add_example)
@torch.no_grad()
def tiled_add_product_reference(
    h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dependent: int = 0, copy: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    add_product_reference(h, weight, bias, x)
    return x if copy is None else (x, copy.copy_(x))


def _check_rows(op: str, x: Tensor) -> None:
    if len(x) > MOST:
        raise ValueError(f"{op}: takes at most {MOST} rows at once, got {len(x)}; more are worth a matrix product of torch's.")
