"""The products of one decoding step for some to 128 rows, which share their sums: ops of a chain as those of decode_product.py.

So few rows make few tiles of a result, of which each multiprocessor wants one. So a sum has parts, over ranges of the columns,
which other programs compute, and which the next op adds while it reads: `norm_rows` those of the residual stream,
`decode_attention` those of q, k and v. The order is that of the ranges, so that bits do not depend on who was first. A program
that waits for the others and adds their sums took 3 us longer (H200, 350m, 32 rows: 6.3 us in place of 3.2 for the output).

x is normed already and has the dtype of the weights. Its rows do not depend on each other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import ACTIVATIONS, WRITTEN, check_activation, check_biases, draw_gate_up, draw_qkv, side_by_side
from .dispatch import implementation, require
from .plans import job_of, plan_for, power_of_two
from .registry import definition, draw, zeros

MOST = 128  # rows
MOST_PARTS = 8  # of a sum
WIDE = 272  # columns of an example: in no part a number of slices


def split_product(
    x: Tensor,
    weight: Tensor,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    parts: Tensor | None = None,
    dependent: int = 0,
) -> Tensor:
    """Write x times one weight, or two or three side by side, to parts (P, B, rows, fp32): a sum over each of P ranges of the
    columns. The biases are in the first.

    Without `parts`, as many are made as suit the GPU: `parts_of`.
    """
    weights, rows = side_by_side("split_product", weight, k_weight, v_weight)
    _check("split_product", x, weights)
    check_biases("split_product", (bias, k_bias, v_bias), weights)
    if parts is None:
        parts = torch.empty(parts_of(rows, weight, len(x)), len(x), rows, device=x.device, dtype=torch.float32)
    number = parts.shape[0] if parts.dim() == 3 else 1
    require("split_product", "parts", parts, torch.float32, (number, len(x), rows), x.device, WRITTEN)
    if x.shape[1] % number:
        raise ValueError(
            f"split_product: parts must be of equal ranges of x's {x.shape[1]} columns, got {number}; choose a divisor."
        )
    kernel = implementation("split_product", weight)
    return kernel(x, weight, k_weight, v_weight, bias, k_bias, v_bias, parts, dependent)


@definition(lambda g, P=2, rows=16, hidden=WIDE, heads=32: (
    draw(g, rows, hidden), *draw_qkv(g, hidden, heads), zeros(P, rows, 2 * heads)
))  # fmt: skip
def split_product_reference(x, weight, k_weight, v_weight, bias, k_bias, v_bias, parts, dependent=0):
    weights = torch.cat([w.to(parts.dtype) for w in (weight, k_weight, v_weight) if w is not None])
    biases = [b.to(parts.dtype) for b in (bias, k_bias, v_bias) if b is not None]
    for number, (columns, of) in enumerate(zip(x.to(parts.dtype).chunk(len(parts), 1), weights.chunk(len(parts), 1))):
        parts[number] = F.linear(columns, of, torch.cat(biases) if biases and not number else None)
    return parts


def split_gate_up(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    out: Tensor | None = None,
    dependent: int = 0,
    activation: str = "silu",
) -> Tensor:
    """out (B, rows, in gate's dtype) = activation(x gateᵀ) · (x upᵀ); one of ACTIVATIONS. Their sums have one part."""
    if out is None:
        out = torch.empty(len(x), len(gate), device=x.device, dtype=gate.dtype)
    _check("split_gate_up", x, [gate, up])
    require("split_gate_up", "up", up, gate.dtype, tuple(gate.shape), x.device, "it is multiplied with gate, row by row")
    check_biases("split_gate_up", (gate_bias, up_bias), [gate, up])
    require("split_gate_up", "out", out, gate.dtype, (len(x), len(gate)), x.device, WRITTEN)
    check_activation("split_gate_up", activation)
    kernel = implementation("split_gate_up", gate, None, (activation,) if activation != "silu" else ())
    return kernel(x, gate, up, gate_bias, up_bias, out, dependent, activation)


@definition(lambda g, activation="silu", rows=16, hidden=WIDE, width=40: (
    draw(g, rows, hidden), *draw_gate_up(g, rows, hidden, width), 0, activation
))  # fmt: skip
def split_gate_up_reference(x, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu"):
    x, biases = x.float(), [None if bias is None else bias.float() for bias in (gate_bias, up_bias)]
    gated = ACTIVATIONS[activation](F.linear(x, gate.float(), biases[0]))
    return out.copy_(gated * F.linear(x, up.float(), biases[1]))


def parts_of(outputs: int, weight: Tensor, rows: int) -> int:
    """Return in how many parts this GPU computes the product of so many rows of x and of weights like `weight`."""
    return plan_for(job_of("split_product", "", (outputs, weight.shape[1], max(16, power_of_two(rows))), weight)).parts


def _check(op: str, x: Tensor, weights: list[Tensor]) -> None:
    require(op, "x", x, weights[0].dtype, ("rows", "hidden"), x.device, "cast it to the dtype of the weights")
    if len(x) > MOST:
        raise ValueError(f"{op}: takes at most {MOST} rows at once, got {len(x)}; more are worth a matrix product of torch's.")
    for weight in weights:
        wanted = "outputs", x.shape[1]
        require(op, "a weight", weight, weights[0].dtype, wanted, x.device, "all have x's width and one dtype")
