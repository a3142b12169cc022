"""Checks of the arguments of public ops: dtype, shape, layout, device. No value of a device tensor is read.

A number that only the device knows (a label, an id, a position) is checked in the kernel. What a bad one does is said in the
op's docstring: no access outside a tensor, and a NaN where silence would hide the mistake.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .plans import WIDEST

SIXTEEN_BITS = (torch.float16, torch.bfloat16)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""What ids and labels may be. torch hardly computes with the wider unsigned types."""


def require(
    op: str,
    name: str,
    t: Tensor,
    dtype: torch.dtype | None,
    shape: Sequence[int | str],
    device: torch.device,
    why: str = "make it once, and change it in place",
) -> None:
    """Refuse a `t` that is not contiguous, of `dtype` (None: floating point) and `shape`, and on `device`.

    A name in `shape` stands for any size from 1 up; of S, the stops, there may be none.
    """
    fits = t.is_floating_point() if dtype is None else t.dtype == dtype
    fits &= t.dim() == len(shape) and all(
        want == "S" or got > 0 if isinstance(want, str) else got == want for got, want in zip(t.shape, shape)
    )
    if fits and t.is_contiguous() and t.device == device:
        return
    sizes = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    wanted, got = f"{dtype or 'floating-point tensor'} {sizes}", f"{t.dtype} {tuple(t.shape)}"
    if not t.is_contiguous():
        got += ", not contiguous"
    if t.device != device:
        wanted, got = f"{wanted} on {device}", f"{got} on {t.device}"
    raise ValueError(f"{op}: {name} must be a contiguous {wanted}, got {got}; {why}.")


def too_wide(x: Tensor) -> str | None:
    return f"its kernel holds rows of up to {WIDEST} elements" if x.shape[-1] > WIDEST else None


def require_floating(op: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating-point tensor, got {x.dtype}; cast it before the call.")


def require_last(op: str, name: str, t: Tensor, what: str) -> None:
    """`t` holds floats along a last dimension, which `what` describes."""
    if t.dim() == 0 or not t.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be a floating-point tensor {what}, got {t.dtype} {tuple(t.shape)}; cast it before the call."
        )


def require_rows(op: str, x: Tensor, **per_column: Tensor | None) -> None:
    """x holds rows of floats, and each of `per_column` that is given one value for each of its columns."""
    require_floating(op, x)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar; reshape it to (1,).")
    require_columns(op, x, x.shape[-1:], "last dimension", **per_column)


def require_columns(op: str, x: Tensor, wanted: tuple[int, ...], what: str, **per_column: Tensor | None) -> None:
    for name, t in per_column.items():
        if t is not None and t.shape != wanted:
            raise ValueError(
                f"{op}: {name} must have shape {tuple(wanted)} to match x, got {tuple(t.shape)}; "
                f"it needs one value for each of x's {what}."
            )
        require_device(op, name, t, x)


def require_residual(op: str, residual: Tensor, x: Tensor, rounded: bool = False) -> None:
    """Check a residual that is added to x before the norm. rounded: it may have 16 bits where x has fp32."""
    fits = residual.dtype == x.dtype or (rounded and x.dtype == torch.float32 and residual.dtype in SIXTEEN_BITS)
    if residual.shape != x.shape or not fits:
        raise ValueError(
            f"{op}: residual must match x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; cast or reshape it before the call."
        )
    require_device(op, "residual", residual, x)


def require_device(op: str, name: str, t: Tensor | None, x: Tensor) -> None:
    if t is not None and t.device != x.device:
        raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}; move one of them to the other's device.")
