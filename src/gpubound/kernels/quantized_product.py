"""Products of a decoding step with packed weights (packed_weights.py), and for several rows at once. All are written in place.

Packed are whole weights, as in decode_product.py, and those of a sparse MLP's experts, as in experts.py. The experts' weights
are packed as one, whose rows are those of one expert after the other. Which experts a row is given is read on the device, and
of the packed weights only theirs are read.

The tiled ops are those of decode_product.py for 2 to 32 rows, on tensor cores. There each row is multiplied by itself in fp32:
bound by memory for one row, and by waiting for a few. Here all rows are one product, for which x, times its norm's gain, is
rounded to the dtype of the weights. So a row's bits differ from those that it gets alone. In fp16 such an x may have no end,
where its norm has: bf16 is what these ops are for. The stream x may be given in the dtype of the weights: each program reads
all of it, and fp32 is twice as many bytes. `tiled_add_product` writes such a copy.

Legend: B rows, S experts a row (its slots), E experts in all, I width of an expert.
"""

from typing import cast

import torch
from torch import Tensor

from .decode_product import (
    WRITTEN,
    Norm,
    add_product_reference,
    below_cap,
    call_shape,
    check_activation,
    check_add,
    check_best,
    check_biases,
    check_keep,
    check_stream,
    draw_gate_up,
    draw_qkv,
    draw_stream,
    norm_gate_up_reference,
    norm_product_reference,
    side_by_side,
)
from .dispatch import implementation, require
from .experts import (
    add_routed_reference,
    check_plain,
    check_slots,
    draw_routes,
    routed_gate_up_reference,
)
from .gated import INFINITE, check_limit
from .packed_weights import BIAS, BITS, KINDS, MX, TABLE, Packed, pack, pack_fp4, unpack
from .registry import definition, draw, frozen, ints, zeros


def dequantize(weight: Packed, out: Tensor, turns: int = 1) -> Tensor:
    """out (rows, columns) = the dequantised `weight`, rounded to out's dtype.

    turns   number of weights whose rows alternate in `weight` (2 for gate and up). In `out` one weight follows the other
    """
    check_packed("dequantize", weight, out)
    require("dequantize", "out", out, None, (weight.rows, weight.columns), weight.words.device, WRITTEN)
    if turns < 1 or weight.rows % turns:
        raise ValueError(f"dequantize: turns: got {turns}, wanted a number that divides the {weight.rows} rows.")
    return implementation("dequantize", out, None, (weight.kind,))(weight, out, turns)


@definition(lambda g, kind="int8": (draw_packed(g, 40, 192, kind), draw(g, 40, 192).detach(), 2))
def dequantize_reference(weight, out, turns=1):
    return out.copy_(unpack(weight).unflatten(0, (-1, turns)).transpose(0, 1).flatten(0, 1))


def quantized_norm_product(
    x: Tensor,
    norm: Norm | None,
    weight: Packed,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    best: Tensor | None = None,
    arg: Tensor | None = None,
    dependent: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """out (B, rows, fp32) = rms_norm(x) times a packed weight. `best`, `arg` and `cap` as in norm_product."""
    if out is None:
        out = torch.empty(x.shape[0], weight.rows, device=x.device, dtype=torch.float32)
    _check_packed_stream("quantized_norm_product", x, norm, weight)
    check_biases("quantized_norm_product", (bias,), [weight.words])
    require("quantized_norm_product", "out", out, torch.float32, (x.shape[0], weight.rows), x.device, WRITTEN)
    check_best("quantized_norm_product", best, arg, weight.rows, x)
    kernel = implementation("quantized_norm_product", x if norm is None else norm.weight, None, call_shape(norm, cap))
    kernel(x, norm, weight, bias, out, best, arg, dependent, cap)
    return out


@definition(lambda g, offset=0.0, cap=0.0: (*draw_stream(g, 256, offset), *_draw_head(g, cap), 0, cap))
def quantized_norm_product_reference(x, norm, weight, bias, out, best, arg, dependent=0, cap=0.0):
    return norm_product_reference(x, norm, unpack(weight), None, None, bias, None, None, out, best, arg, 0, cap)


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
    _check_packed_stream("quantized_norm_gate_up", x, norm, gate_up)
    if gate_up.rows % 2:
        raise ValueError(f"quantized_norm_gate_up: gate_up has {gate_up.rows} rows, wanted an even number; use pack_gate_up.")
    check_biases("quantized_norm_gate_up", (bias,), [gate_up.words])
    require("quantized_norm_gate_up", "out", out, None, (x.shape[0], gate_up.rows // 2), x.device, WRITTEN)
    check_activation("quantized_norm_gate_up", activation)
    kernel = implementation("quantized_norm_gate_up", out, None, call_shape(norm, activation))
    return kernel(x, norm, gate_up, bias, out, dependent, activation, alternate)


@definition(lambda g, offset=0.0, activation="silu": (*draw_stream(g, 150, offset), *_draw_gate_up(g), 0, activation))
def quantized_norm_gate_up_reference(x, norm, gate_up, bias, out, dependent=0, activation="silu", alternate=True):
    both = unpack(gate_up)
    gate, up = both.unflatten(0, (-1, 2)).unbind(1) if alternate else both.chunk(2)
    gate_bias, up_bias = (None, None) if bias is None else bias.unflatten(0, (-1, 2)).unbind(1)
    return norm_gate_up_reference(x, norm, gate, up, gate_bias, up_bias, out, 0, activation)


def quantized_add_product(h: Tensor, weight: Packed, bias: Tensor | None, x: Tensor, dependent: int = 0) -> Tensor:
    """x += h weightᵀ, in place: the output and the down product, with the residual."""
    require("quantized_add_product", "h", h, None, (*h.shape[:1], weight.columns), h.device, "the kernel reads row after row")
    check_packed("quantized_add_product", weight, h)
    check_biases("quantized_add_product", (bias,), [weight.words])
    require("quantized_add_product", "x", x, torch.float32, (h.shape[0], weight.rows), h.device, WRITTEN)
    return implementation("quantized_add_product", h)(h, weight, bias, x, dependent)


@definition(lambda g: (draw(g, 2, 150), draw_packed(g, 40, 150, "fp8"), draw(g, 40), zeros(2, 40)))
def quantized_add_product_reference(h, weight, bias, x, dependent=0):
    return add_product_reference(h, unpack(weight), bias, x)


def quantized_routed_gate_up(
    x: Tensor,
    norm: Norm,
    gate_up: Packed,
    ids: Tensor,
    out: Tensor,
    dependent: int = 0,
    limit: float = INFINITE,
    activation: str = "silu",
) -> Tensor:
    """out (B, S, I, in any dtype) = f(n gateᵀ) · (n upᵀ) for each expert of each row, where n is the RMSNorm of x.

    gate_up   (E 2 I, hidden) packed: an expert's gate, its up, the next expert's gate, ...
    limit     n gateᵀ counts as at most this, n upᵀ as within it; a NaN stays one
    activation  f, one of decode_product.ACTIVATIONS
    ids       (B, S) int32. An id that no expert has makes its slot NaN, in quantized_add_routed too
    """
    _check_packed_stream("quantized_routed_gate_up", x, norm, gate_up)
    check_plain("quantized_routed_gate_up", norm)
    require("quantized_routed_gate_up", "ids", ids, torch.int32, (len(x), "slots"), x.device, "route writes it")
    require("quantized_routed_gate_up", "out", out, None, (*ids.shape, out.shape[-1]), x.device, WRITTEN)
    check_experts("quantized_routed_gate_up", "gate_up", gate_up, 2 * out.shape[-1])
    check_limit("quantized_routed_gate_up", limit)
    check_activation("quantized_routed_gate_up", activation)
    shape = (gate_up.kind,) if activation == "silu" else (gate_up.kind, activation)
    kernel = implementation("quantized_routed_gate_up", out, None, shape)
    return kernel(x, norm, gate_up, ids, out, dependent, limit, activation)


@definition(lambda g, kind="int4", activation="silu": (
    *draw_stream(g, 96), draw_packed(g, 5 * 80, 96, kind), draw_routes()[0], zeros(2, 3, 40), 0, INFINITE, activation
))  # fmt: skip
def quantized_routed_gate_up_reference(x, norm, gate_up, ids, out, dependent=0, limit=INFINITE, activation="silu"):
    stacked = unpack(gate_up).unflatten(0, (-1, 2 * out.shape[2]))
    return routed_gate_up_reference(x, norm, stacked, ids, out, 0, limit, activation)


def quantized_add_routed(h: Tensor, down: Packed, ids: Tensor, weights: Tensor, x: Tensor, dependent: int = 0) -> Tensor:
    """x += Σ weight · h downᵀ over the slots of a row, in their order: the down product of a sparse MLP, with the residual.

    h (B, S, I), down (E hidden, I) packed, ids and weights (B, S). With `dependent` the kernel reads ids and weights while the
    kernel before it still runs. That one must be the `quantized_routed_gate_up` with the same ids.
    """
    check_packed("quantized_add_routed", down, x)
    check_slots("quantized_add_routed", h, down.columns, ids, weights, x, x.shape[-1])
    check_experts("quantized_add_routed", "down", down, x.shape[-1])
    return implementation("quantized_add_routed", h, None, (down.kind,))(h, down, ids, weights, x, dependent)


@definition(
    lambda g, kind="int8": (draw(g, 2, 3, 96), draw_packed(g, 5 * 48, 96, kind), *draw_routes(), draw(g, 2, 48).detach())
)
def quantized_add_routed_reference(h, down, ids, weights, x, dependent=0):
    return add_routed_reference(h, unpack(down).unflatten(0, (-1, x.shape[1])), ids, weights, x)


def _check_packed_stream(op: str, x: Tensor, norm: Norm | None, weight: Packed) -> None:
    check_stream(op, x, norm)
    if weight.columns != x.shape[1]:
        raise ValueError(f"{op}: the weight must have {x.shape[1]} columns to match x, got {weight.columns}.")
    check_packed(op, weight, x)


def check_packed(op: str, weight: Packed, x: Tensor) -> None:
    """Check that the weight comes from `pack`, is on x's device and has all of its rows."""
    if weight.kind not in BITS:
        raise ValueError(f"{op}: the weight's kind must be one of {', '.join(BITS)}, got {weight.kind!r}; make it with pack.")
    kind, columns = TABLE[weight.kind], weight.columns
    why = "make it with pack, where x lies"
    require(op, "the weight's words", weight.words, torch.int32, (weight.rows, kind.words(columns)), x.device, why)
    dtype = {"e2m1": torch.uint8, "level": None}.get(kind.values, torch.float32)  # None: any floating-point one
    scales = weight.rows, kind.scales(columns)
    require(op, "the weight's scale", weight.scale, dtype, scales, x.device, why)
    if kind.offset or kind.values == "nf4":
        extra = (16,) if kind.values == "nf4" else scales
        require(op, "the weight's extra", cast(Tensor, weight.extra), torch.float32, extra, x.device, why)


def check_experts(op: str, name: str, weight: Packed, rows: int) -> None:
    if not rows or weight.rows % rows or not weight.rows:
        what = f"{name} has {weight.rows} rows, wanted {rows} for each expert"
        raise ValueError(f"{op}: {what}; pack the experts' weights as one, pack(stack.flatten(0, 1), kind).")
    if weight.extra is not None:
        raise ValueError(f"{op}: {name} is {weight.kind}, wanted a kind without offsets or a code table for experts.")


def draw_packed(generator: torch.Generator, rows: int, columns: int, kind: str) -> Packed:
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


def _draw_gate_up(generator):
    return draw_packed(generator, 40, 150, "int8"), draw(generator, 40), zeros(2, 20)


MOST = 32  # rows
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
    dependent: int = 0,
) -> Tensor:
    """`norm_product` of all rows at once: out (B, rows, fp32) = rms_norm(x) times one weight, or two or three side by side."""
    weights, rows = side_by_side("tiled_norm_product", weight, k_weight, v_weight)
    if out is None:
        out = torch.empty(x.shape[0], rows, device=x.device, dtype=torch.float32)
    check_stream("tiled_norm_product", x, norm, *weights, rounded=True)
    _check_rows("tiled_norm_product", x)
    check_biases("tiled_norm_product", (bias, k_bias, v_bias), weights)
    require("tiled_norm_product", "out", out, torch.float32, (x.shape[0], rows), x.device, WRITTEN)
    kernel = implementation("tiled_norm_product", weight, None, call_shape(norm))
    return kernel(x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, dependent)


def _qkv_example(g, offset=0.0, rows=5, hidden=WIDE, heads=32):
    return *draw_stream(g, hidden, offset, rows), *draw_qkv(g, hidden, heads), zeros(rows, 2 * heads)


@definition(_qkv_example)
def tiled_norm_product_reference(x, norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, dependent=0):
    return norm_product_reference(x.float(), norm, weight, k_weight, v_weight, bias, k_bias, v_bias, out, None, None)[0]


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
    kernel = implementation("tiled_norm_gate_up", gate, None, call_shape(norm, activation))
    return kernel(x, norm, gate, up, gate_bias, up_bias, out, dependent, activation)


def _gate_up_example(g, offset=0.0, activation="silu", rows=5, hidden=WIDE, width=40):
    return *draw_stream(g, hidden, offset, rows), *draw_gate_up(g, rows, hidden, width), 0, activation


@definition(_gate_up_example)
def tiled_norm_gate_up_reference(x, norm, gate, up, gate_bias, up_bias, out, dependent=0, activation="silu"):
    return norm_gate_up_reference(x.float(), norm, gate, up, gate_bias, up_bias, out, dependent, activation)


def tiled_add_product(
    h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, dependent: int = 0, copy: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`add_product` of all rows at once: x += h weightᵀ, in place. `copy`, in the weight's dtype, receives x, too."""
    check_add("tiled_add_product", h, weight, bias, x.device)
    _check_rows("tiled_add_product", h)
    shape = h.shape[0], weight.shape[0]
    require("tiled_add_product", "x", x, torch.float32, shape, x.device, WRITTEN)
    if copy is not None:
        require("tiled_add_product", "copy", copy, weight.dtype, shape, x.device, WRITTEN)
    check_keep("tiled_add_product", "keep", keep, x)
    return implementation("tiled_add_product", weight)(h, weight, bias, x, dependent, copy, keep)


def _add_example(g, rows=5, inner=WIDE, hidden=48):
    h, weight, x = draw(g, rows, inner), draw(g, hidden, inner), draw(g, rows, hidden).detach()
    return h, weight, None, x, 0, frozen(torch.zeros(rows, hidden, device="cpu", dtype=torch.float32))


@definition(_add_example)
def tiled_add_product_reference(h, weight, bias, x, dependent=0, copy=None, keep=None):
    add_product_reference(h, weight, bias, x)
    written = tuple(to.copy_(x) for to in (copy, keep) if to is not None)
    return (x, *written) if written else x


def _check_rows(op: str, x: Tensor) -> None:
    if len(x) > MOST:
        raise ValueError(f"{op}: takes at most {MOST} rows at once, got {len(x)}; more are worth a matrix product of torch's.")
