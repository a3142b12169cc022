"""Products of a decoding step with packed weights (packed_weights.py), and for several rows at once. All are written in place.

Packed are whole weights, as in decode_product.py, and those of a sparse MLP's experts, as in experts.py. The experts' weights
are packed as one, whose rows are those of one expert after the other. Which experts a row is given is read on the device, and
of the packed weights only theirs are read.

Most are variants of the ops of decode_product.py and experts.py, whose public functions call them: the tiled ones, and those
whose weight is `Packed`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_product import (
    WRITTEN,
    Norm,
    add_product_reference,
    below_cap,
    call_shape,
    check_activation,
    check_biases,
    check_stream,
    draw_gate_up,
    draw_qkv,
    draw_stream,
    norm_gate_up_reference,
    norm_product_reference,
)
from .dispatch import implementation, require
from .experts import (
    add_routed_reference,
    column_down_reference,
    column_gate_up_reference,
    draw_routes,
    routed_gate_up_reference,
)
from .gated import INFINITE
from .packed_weights import BIAS, KINDS, MX, TABLE, Packed, check_packed, pack, pack_fp4, unpack
from .registry import definition, draw, frozen, ints, zeros


def dequantize(weight: Packed, out: Tensor, turns: int = 1) -> Tensor:
    """out (rows, columns) = the dequantised `weight`, rounded to out's dtype.

    turns   number of weights whose rows alternate in `weight` (2 for gate and up). In `out` one weight follows the other
    """
    check_packed("dequantize", weight, out)
    require("dequantize", "out", out, None, (weight.rows, weight.columns), weight.words.device, WRITTEN)
    if turns < 1 or weight.rows % turns:
        raise ValueError(f"dequantize: turns: got {turns}, wanted a number that divides the {weight.rows} rows.")
    shape = (weight.kind,) if weight.order is None else (weight.kind, True)
    return implementation("dequantize", out, None, shape)(weight, out, turns)


@definition(lambda g, kind="int8", sort=False: (draw_packed(g, 40, 192, kind, sort), draw(g, 40, 192).detach(), 2))
def dequantize_reference(weight, out, turns=1):
    return out.copy_(unpack(weight).unflatten(0, (-1, turns)).transpose(0, 1).flatten(0, 1))


@definition(
    lambda g, offset=0.0, cap=0.0: (*draw_stream(g, 256, offset), *_draw_head(g, cap), 0, cap), variant_of="norm_product"
)
def quantized_norm_product_reference(x, norm, weight, bias, out, best, arg, dependent=0, cap=0.0):
    return norm_product_reference(x, norm, unpack(weight), None, None, bias, None, None, out, best, arg, 0, cap)


def quantized_matmul(
    x: Tensor, weight: Packed, bias: Tensor | None = None, out: Tensor | None = None, turns: int = 1, add: bool = False
) -> Tensor:
    """out (B, rows, in x's dtype or its own) = x weightᵀ + bias, for several rows: the weight is rounded to x's dtype and
    multiplied on tensor cores, as after `dequantize`, but never written to memory. add: out += instead

    turns   number of weights whose rows alternate in `weight` (2 for gate and up). In `out` and `bias` one follows the other
    """
    check_packed("quantized_matmul", weight, x)
    require("quantized_matmul", "x", x, None, ("B", weight.columns), weight.device, "cast or copy it before the call")
    if add and out is None:
        raise ValueError("quantized_matmul: add: got True without out, wanted the tensor that the product is added to.")
    out = torch.empty(len(x), weight.rows, device=x.device, dtype=x.dtype) if out is None else out
    require("quantized_matmul", "out", out, None, (len(x), weight.rows), x.device, WRITTEN)
    check_biases("quantized_matmul", (bias,), [weight])
    if turns < 1 or weight.rows % turns:
        raise ValueError(f"quantized_matmul: turns: got {turns}, wanted a number that divides the {weight.rows} rows.")
    return implementation("quantized_matmul", x, None, (weight.kind,))(x, weight, bias, out, turns, add)


@definition(
    lambda g, kind="int8": (draw(g, 5, columns := 1024), draw_packed(g, 40, columns, kind), draw(g, 40), zeros(5, 40), 2)
)
def quantized_matmul_reference(x, weight, bias, out, turns=1, add=False):
    numbers = unpack(weight).unflatten(0, (-1, turns)).transpose(0, 1).flatten(0, 1).to(x.dtype)
    y = F.linear(x.float(), numbers.float(), None if bias is None else bias.float())
    return out.add_(y) if add else out.copy_(y)


def quantized_norm_gate_up(
    x: Tensor,
    norm: Norm | None,
    gate_up: Packed,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    dependent: int = 0,
    activation: str = "silu",
    alternate: bool = True,
) -> Tensor:
    """out (B, rows / 2, in the norm's dtype or its own) = activation(n gateᵀ) · (n upᵀ), where n is the RMSNorm of x. Rows of
    gate and up alternate in `gate_up`, and so do the elements of `bias`. alternate=False: gate's rows, and up's below them; the
    elements of `bias` alternate still."""
    if out is None:
        like = x if norm is None else norm.weight
        out = torch.empty(x.shape[0], gate_up.rows // 2, device=x.device, dtype=like.dtype)
    check_stream("quantized_norm_gate_up", x, norm, gate_up)
    if gate_up.rows % 2:
        raise ValueError(f"quantized_norm_gate_up: gate_up has {gate_up.rows} rows, wanted an even number; use pack_gate_up.")
    check_biases("quantized_norm_gate_up", (bias,), [gate_up])
    require("quantized_norm_gate_up", "out", out, None, (x.shape[0], gate_up.rows // 2), x.device, WRITTEN)
    check_activation("quantized_norm_gate_up", activation)
    kernel = implementation("quantized_norm_gate_up", out, None, call_shape(norm, activation))
    return kernel(x, norm, gate_up, bias, out, dependent, activation, alternate)


@definition(lambda g, offset=0.0, activation="silu": (
    *draw_stream(g, 150, offset), draw_packed(g, 40, 150, "int8"), draw(g, 40), zeros(2, 20), 0, activation
))  # fmt: skip
def quantized_norm_gate_up_reference(x, norm, gate_up, bias, out, dependent=0, activation="silu", alternate=True):
    both = unpack(gate_up)
    gate, up = both.unflatten(0, (-1, 2)).unbind(1) if alternate else both.chunk(2)
    gate_bias, up_bias = (None, None) if bias is None else bias.unflatten(0, (-1, 2)).unbind(1)
    return norm_gate_up_reference(x, norm, gate, up, gate_bias, up_bias, out, 0, activation)


@definition(lambda g: (draw(g, 2, 150), draw_packed(g, 40, 150, "fp8"), draw(g, 40), zeros(2, 40)), variant_of="add_product")
def quantized_add_product_reference(h, weight, bias, x, dependent=0):
    return add_product_reference(h, unpack(weight), bias, x)


@definition(lambda g, kind="int4", activation="silu": (
    *draw_stream(g, 96), draw_packed(g, 5 * 80, 96, kind), draw_routes()[0], zeros(2, 3, 40), 0, INFINITE, activation
), variant_of="routed_gate_up")  # fmt: skip
def quantized_routed_gate_up_reference(x, norm, gate_up, ids, out, dependent=0, limit=INFINITE, activation="silu"):
    stacked = unpack(gate_up).unflatten(0, (-1, 2 * out.shape[2]))
    return routed_gate_up_reference(x, norm, stacked, ids, out, 0, limit, activation)


@definition(
    lambda g, kind="int8": (draw(g, 2, 3, 96), draw_packed(g, 5 * 48, 96, kind), *draw_routes(), draw(g, 2, 48).detach()),
    variant_of="add_routed",
)
def quantized_add_routed_reference(h, down, ids, weights, x, dependent=0):
    return add_routed_reference(h, unpack(down).unflatten(0, (-1, x.shape[1])), ids, weights, x)


@definition(lambda g, kind="fp4": (
    *draw_stream(g, 96), draw_packed(g, 5 * 80, 96, kind), draw(g, 5, 80), draw_routes()[0], zeros(2, 3, 40), 1.5, 2.0
), variant_of="column_gate_up")  # fmt: skip
def quantized_column_gate_up_reference(x, norm, gate_up, bias, ids, out, alpha, limit, dependent=0):
    return column_gate_up_reference(x, norm, gate_up, bias, ids, out, alpha, limit)


@definition(
    lambda g, kind="fp4": (
        draw(g, 2, 3, 96), draw_packed(g, 5 * 48, 96, kind), draw(g, 5, 48), draw_routes()[0], zeros(2, 3, 48)
    ),
    variant_of="column_down",
)  # fmt: skip
def quantized_column_down_reference(h, down, bias, ids, out, dependent=0):
    return column_down_reference(h, down, bias, ids, out)


def draw_packed(generator: torch.Generator, rows: int, columns: int, kind: str, sort: bool = False) -> Packed:
    """sort: with its columns in another order"""
    if sort:
        packed = draw_packed(generator, rows, columns, kind)
        return packed._replace(order=torch.randperm(packed.columns, generator=generator, device="cpu").int())
    if kind == "fp4":
        columns -= columns % MX
        codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8, device="cpu")
        return pack_fp4(
            codes, torch.randint(BIAS - 4, BIAS, (rows, columns // MX), generator=generator, dtype=torch.uint8, device="cpu")
        )
    if kind in KINDS:
        return pack(draw(generator, rows, columns).detach(), kind)
    about = TABLE[kind]
    columns -= columns % {"e4m3": 16, "nf4": about.group}.get(about.values, 1)
    words = torch.randint(-(2**31), 2**31, (rows, about.words(columns)), generator=generator, device="cpu").to(torch.int32)
    if about.values == "e4m3":
        words &= 0x7F7F7F7F - 0x01010101  # no NaN
    scale = draw(generator, rows, about.scales(columns)).detach().abs_().mul_(2.0**-about.bits)
    extra = draw(generator, 16).detach() if about.values == "nf4" else draw(generator, *scale.shape).detach() * about.offset
    return Packed(words, scale, columns, kind, extra if about.offset or about.values == "nf4" else None)


def _draw_head(generator, cap):
    packed, bias = draw_packed(generator, 40, 256, "int4"), draw(generator, 40)
    below_cap(cap, packed.scale, bias)
    return packed, bias, zeros(2, 40), zeros(2, 3), ints(*[0] * 6).view(2, 3)


WIDE = 1064  # columns of an example: a slice of weights, which a program walks along by, and a part of another


def _qkv_example(g, offset=0.0, rows=5, hidden=WIDE, heads=32):
    return *draw_stream(g, hidden, offset, rows), *draw_qkv(g, hidden, heads), zeros(rows, 2 * heads)


@definition(_qkv_example, variant_of="norm_product")
def tiled_norm_product_reference(x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, dependent=0):
    return norm_product_reference(x.float(), norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, None, None)[0]


def _gate_up_example(g, offset=0.0, activation="silu", rows=5, hidden=WIDE, width=40):
    return *draw_stream(g, hidden, offset, rows), *draw_gate_up(g, rows, hidden, width), 0, activation


@definition(_gate_up_example, variant_of="norm_gate_up")
def tiled_norm_gate_up_reference(x, norm, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu"):
    return norm_gate_up_reference(x.float(), norm, gate, up, gate_bias, up_bias, out, dependent, activation)


def _add_example(g, rows=5, inner=WIDE, hidden=48):
    h, weight, x = draw(g, rows, inner), draw(g, hidden, inner), draw(g, rows, hidden).detach()
    return h, weight, None, x, 0, frozen(torch.zeros(rows, hidden, device="cpu", dtype=torch.float32))


@definition(_add_example, variant_of="add_product")
def tiled_add_product_reference(h, weight, bias, x, dependent=0, copy=None, keep=None):
    add_product_reference(h, weight, bias, x)
    written = tuple(to.copy_(x) for to in (copy, keep) if to is not None)
    return (x, *written) if written else x
