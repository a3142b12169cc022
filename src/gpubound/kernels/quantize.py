"""16-bit values rounded to 8 or to NF4's 4.

To 8: over a scale that is known beforehand, row-major and transposed at once; or over one a row.

Of `seen`, the largest magnitude so far, the next scale is made. What lies beyond the format's largest number becomes that
number. Infinity becomes NaN, or a step that overflowed would look finite.

Weights in 4 bits, in the format of bitsandbytes' NF4 with double quantisation (QLoRA, arXiv 2305.14314).

codes    two numbers a byte, the first in its upper half: places in CODE, sixteen quantiles of a normal distribution
absmax   the largest magnitude of every 64 numbers, which theirs are multiples of: 8 bits, places in `dynamic_code`
scale    what every 256 of absmax are multiples of, fp32
offset   the mean of all of them, which was taken off before they were rounded, fp32

A number is CODE[code] · (dynamic_code[absmax] · scale + offset). That is 4.13 bits a number. Blocks go on from row to row, so a
weight whose rows are whole blocks may be split and joined by rows.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import constant
from .dispatch import TOO_WIDE, WIDEST, implementation, require
from .gated import check_half, swiglu_backward_reference, swiglu_reference
from .registry import definition, doubles, draw, frozen

FINE = torch.float8_e4m3fn
LARGEST = {FINE: 448.0, torch.float8_e5m2: 57344.0}
MULTIPLE = 16  # elements: every side of the matrices, or cuBLAS has no kernel
CAPABILITY = (8, 9)  # the first with 8-bit floating-point tensor cores


def quantize(x: Tensor, state: Tensor, dtype: torch.dtype, both: bool = True) -> tuple[Tensor, Tensor | None]:
    """(q, qᵀ) for a matrix x ≈ q · scale. The transpose is None unless `both`.

    state   fp32 (scale, seen, …): values are divided by the scale, and `seen` is raised to their largest magnitude
    dtype   torch.float8_e4m3fn (finer, to 448) or torch.float8_e5m2 (wider, to 57344). Larger values become the largest
    """
    _check("quantize", x, state, dtype)
    return implementation("quantize", x, None, (dtype, both))(x, state, dtype, both)


@definition(lambda g, dtype=torch.float8_e4m3fn, both=True: (draw(g, 32, 48), _state(), dtype, both))
def quantize_reference(x, state, dtype, both=True):
    q, q_t = _rounded(x.float(), state, dtype)
    return q, q_t if both else None


def quantize_swiglu(gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of silu(gate) · up, from the packed [gate | up] (N, 2 I): the result is never stored in 16 bits."""
    _check("quantize_swiglu", gate_up, state, dtype)
    return implementation("quantize_swiglu", gate_up)(gate_up, state, dtype)


@definition(lambda g: (draw(g, 32, 96), _state(), torch.float8_e4m3fn))
def quantize_swiglu_reference(gate_up, state, dtype):
    return _rounded(swiglu_reference(gate_up.float()), state, dtype)


def quantize_swiglu_backward(dh: Tensor, gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of the gradient of [gate | up] (N, 2 I). dh (N, I) is the gradient of silu(gate) · up."""
    _check("quantize_swiglu_backward", gate_up, state, dtype)
    check_half("quantize_swiglu_backward", dh, gate_up)
    return implementation("quantize_swiglu_backward", gate_up)(dh, gate_up, state, dtype)


@definition(lambda g: (draw(g, 32, 48), draw(g, 32, 96), _state(), torch.float8_e5m2))
def quantize_swiglu_backward_reference(dh, gate_up, state, dtype):
    gradient, _ = swiglu_backward_reference(dh.float(), gate_up.float())
    return _rounded(gradient, state, dtype)


def quantize_rows(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q in e4m3, scale (N, 1)) of a matrix: x · factor ≈ q · scale, where the largest magnitude of every row is 448 in q.

    factor   fp32, one for each column. A product that sums over columns takes in the other matrix's scales by it
    """
    if x.dim() != 2 or not x.is_floating_point() or not x.shape[-1]:
        raise ValueError(
            f"quantize_rows: x: got {x.dtype} {tuple(x.shape)}, wanted a floating-point matrix; flatten its leading dimensions."
        )
    if factor is not None:
        require("quantize_rows", "factor", factor, torch.float32, (x.shape[1],), x.device)
    unable = TOO_WIDE if x.shape[1] > WIDEST else None
    return implementation("quantize_rows", x, unable, (factor is not None,))(x, factor)


@definition(lambda g, scaled=True: (draw(g, 9, 600), draw(g, 600).detach() if scaled else None))
def quantize_rows_reference(x, factor=None):
    values = x.float() if factor is None else x.float() * factor
    largest = values.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, LARGEST[FINE]) * (1 / LARGEST[FINE])
    q = (values * scale.reciprocal()).clamp_(-LARGEST[FINE], LARGEST[FINE])
    return torch.where(values.isinf(), torch.nan, q).to(FINE), scale


def transpose(x: Tensor) -> Tensor:
    """xᵀ, contiguous, of a matrix of bytes. Tensor cores multiply 8-bit matrices along the rows of both alone."""
    require("transpose", "x", x, torch.uint8, ("rows", "columns"), x.device)
    return implementation("transpose", x)(x)


@definition(lambda g: (torch.randint(256, (70, 150), generator=g, dtype=torch.uint8, device="cpu"),))
def transpose_reference(x):
    return x.t().contiguous()


def _rounded(values: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    state[1] = torch.maximum(state[1], values.abs().amax())
    scaled = (values * (1 / state[0])).clamp(-LARGEST[dtype], LARGEST[dtype])
    q = torch.where(values.isinf(), torch.nan, scaled).to(dtype)
    return q, q.t().contiguous()


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


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """(M, K) times the transpose of (N, K), in `dtype`, or written to `out` of that dtype. Scales are one number each, or one
    for each row: (M, 1) and (1, N).

    `fast` sums in the tensor cores' own accumulators, of some 14 bits, instead of handing over to fp32 every 128 terms: good
    enough for a forward product, not for a weight gradient's 16,384 terms.
    """
    if not has_cores(a.device):
        y = (a.float() @ b.float().t()).mul_(scale_a * scale_b)
        return y.to(dtype) if out is None else out.copy_(y)
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)


@constant
def has_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def _state() -> Tensor:
    return doubles(0.02, 0).float()


CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # numbers that share an absmax
GROUP = 256  # of absmax, that share a scale
CHUNK = 1 << 24  # numbers widened at a time


class Nf4(NamedTuple):
    """A matrix. codes (rows, columns / 2) and absmax (blocks,) are uint8, scale (groups,) and offset (1,) fp32."""

    codes: Tensor
    absmax: Tensor
    scale: Tensor
    offset: Tensor


@torch.no_grad()
def to_nf4(weight: Tensor) -> Nf4:
    """Round a matrix whose rows are whole blocks. A part at a time is wide in memory."""
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel() or weight.shape[1] % BLOCK:
        raise ValueError(
            f"to_nf4: weight: got {weight.dtype} {tuple(weight.shape)}, wanted a floating-point matrix whose columns are a "
            f"multiple of {BLOCK}."
        )
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, device=weight.device, dtype=torch.uint8)
    largest = torch.empty(rows, columns // BLOCK, device=weight.device, dtype=torch.float32)
    borders = _borders(nf4_code(weight.device))
    for part, into, most in zip(*(t.split(max(1, CHUNK // columns)) for t in (weight, codes, largest))):
        blocks = part.float().unflatten(1, (-1, BLOCK))
        most.copy_(blocks.abs().amax(2))
        of_most = blocks * most.reciprocal()[..., None]
        positions = torch.bucketize(of_most.nan_to_num_(0.0, 0.0, 0.0), borders, out_int32=True).to(torch.uint8)
        upper, lower = positions.view(-1, 2).unbind(1)
        into.copy_((upper << 4 | lower).view(into.shape))
    return Nf4(codes, *_to_8_bits(largest.flatten()))


def _to_8_bits(largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """absmax, its scale and its offset."""
    offset = largest.mean().view(1)
    groups = torch.nn.functional.pad(largest - offset, (0, -len(largest) % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(1)
    of_scale = (groups * scale.reciprocal()[:, None]).nan_to_num_(0.0, 0.0, 0.0)
    positions = torch.bucketize(of_scale, _borders(dynamic_code(largest.device)))
    return positions.to(torch.uint8).flatten()[: len(largest)].contiguous(), scale, offset


def _borders(code: Tensor) -> Tensor:
    """Midpoints between the values of a code. A midpoint itself is rounded down, as in bitsandbytes."""
    return ((code[1:].double() + code[:-1].double()) / 2).float()


@constant
def nf4_code(device: torch.device) -> Tensor:
    return _on(device)[0]


@constant
def dynamic_code(device: torch.device) -> Tensor:
    """bitsandbytes' 256 signed numbers: seven decades, of which each holds twice as many as the one below it; zero, and one."""
    return _on(device)[1]


@cache
def _on(device: torch.device) -> tuple[Tensor, Tensor]:
    means = []
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        means.append(10.0 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2))
    positive = torch.cat(means)
    dynamic = torch.cat([positive, -positive, torch.tensor([0.0, 1.0], device="cpu", dtype=torch.float32)]).sort().values
    return torch.tensor(CODE, device="cpu", dtype=torch.float32).to(device), dynamic.to(device)


def absmax_of(weight: Nf4) -> Tensor:
    """Return the largest magnitude of every block, dequantised to fp32."""
    groups = weight.scale.repeat_interleave(GROUP)[: len(weight.absmax)]
    return dynamic_code(weight.absmax.device)[weight.absmax.int()] * groups + weight.offset


def dequantize_nf4(weight: Nf4, out: Tensor) -> Tensor:
    """out (rows, columns) = the dequantised `weight`, rounded to out's dtype."""
    _check_codes("dequantize_nf4", weight, out)
    return implementation("dequantize_nf4", out)(weight, out)


@definition(lambda g: (to_nf4(draw(g, 9, 64 * 31).detach()), frozen(draw(g, 9, 64 * 31))))
def dequantize_nf4_reference(weight, out):
    codes, largest = weight.codes, absmax_of(weight)
    numbers = nf4_code(out.device)[torch.stack((codes >> 4, codes & 15), 2).int()]
    return out.copy_((numbers.view(-1, BLOCK) * largest[:, None]).view(out.shape))


def _check_codes(op: str, weight: Nf4, out: Tensor) -> None:
    device = weight.codes.device
    require(op, "codes", weight.codes, torch.uint8, ("rows", "columns / 2"), device)
    rows, columns = weight.codes.shape[0], 2 * weight.codes.shape[1]
    if columns % BLOCK:
        raise ValueError(f"{op}: codes: got {columns} columns, wanted a multiple of {BLOCK}; make them with to_nf4.")
    blocks = rows * columns // BLOCK
    require(op, "absmax", weight.absmax, torch.uint8, (blocks,), device)
    require(op, "scale", weight.scale, torch.float32, (-(-blocks // GROUP),), device)
    require(op, "offset", weight.offset, torch.float32, (1,), device)
    require(op, "out", out, None, (rows, columns), device, "it is written")
