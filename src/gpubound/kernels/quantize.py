"""16-bit values rounded to 8: over a scale that is known beforehand, row-major and transposed at once; or over one a row.

Of `seen`, the largest magnitude so far, the next scale is made. What lies beyond the format's largest number becomes that
number. Infinity becomes NaN, or a step that overflowed would look finite.
"""

import torch
from torch import Tensor

from ..device import constant
from .dispatch import TOO_WIDE, WIDEST, implementation, require
from .gated import check_half, swiglu_backward_reference, swiglu_reference
from .registry import definition, doubles, draw

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
@torch.no_grad()
def quantize_reference(x: Tensor, state: Tensor, dtype: torch.dtype, both: bool = True) -> tuple[Tensor, Tensor | None]:
    q, q_t = _rounded(x.float(), state, dtype)
    return q, q_t if both else None


def quantize_swiglu(gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of silu(gate) · up, from the packed [gate | up] (N, 2 I): the result is never stored in 16 bits."""
    _check("quantize_swiglu", gate_up, state, dtype)
    return implementation("quantize_swiglu", gate_up)(gate_up, state, dtype)


@definition(lambda g: (draw(g, 32, 96), _state(), torch.float8_e4m3fn))
@torch.no_grad()
def quantize_swiglu_reference(gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _rounded(swiglu_reference(gate_up.float()), state, dtype)


def quantize_swiglu_backward(dh: Tensor, gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of the gradient of [gate | up] (N, 2 I). dh (N, I) is the gradient of silu(gate) · up."""
    _check("quantize_swiglu_backward", gate_up, state, dtype)
    check_half("quantize_swiglu_backward", dh, gate_up)
    return implementation("quantize_swiglu_backward", gate_up)(dh, gate_up, state, dtype)


@definition(lambda g: (draw(g, 32, 48), draw(g, 32, 96), _state(), torch.float8_e5m2))
@torch.no_grad()
def quantize_swiglu_backward_reference(dh: Tensor, gate_up: Tensor, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
@torch.no_grad()
def quantize_rows_reference(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
def transpose_reference(x: Tensor) -> Tensor:
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
