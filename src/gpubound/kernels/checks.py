"""Checks of the arguments of public ops: dtype, shape, layout, device. No value of a device tensor is read.

Values on the device (a label, an id, a position) are checked in the kernel. The op's docstring says what an invalid one does:
no access outside a tensor, and a NaN where a wrong result would go unnoticed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.float16, torch.bfloat16)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of ids and labels. torch hardly computes with the wider unsigned types."""

# Widest row that one program of a norm holds. At 16384 the backward's four fp32 rows (dy, x, weight, sum) fill a
# multiprocessor's 65536 registers: wider ones spill, which is slow but right.
WIDEST = 65536


def require(
    op: str,
    name: str,
    t: Tensor,
    dtype: torch.dtype | None,
    shape: Sequence[int | str],
    device: torch.device,
    why: str = "make it once, and change it in place",
) -> None:
    """Raise ValueError unless `t` is contiguous, of `dtype` (None: floating point) and `shape`, and on `device`.

    A name in `shape` matches any size from 1; "S", the stop tokens, also matches 0.
    """
    if (
        (t.is_floating_point() if dtype is None else t.dtype == dtype)
        and t.dim() == len(shape)
        and (t.shape == shape or matches(t, shape))
        and t.is_contiguous()
        and t.device == device
    ):
        return
    sizes = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    wanted, got = f"{dtype or 'floating-point tensor'} {sizes}", f"{t.dtype} {tuple(t.shape)}"
    if not t.is_contiguous():
        got += ", not contiguous"
    if t.device != device:
        wanted, got = f"{wanted} on {device}", f"{got} on {t.device}"
    raise ValueError(f"{op}: {name} must be a contiguous {wanted}, got {got}; {why}.")


def matches(t: Tensor, shape: Sequence[int | str]) -> bool:
    """Return True when `t` has the sizes of `shape`, in which a name is any size from 1, and "S" any size."""
    for got, want in zip(t.shape, shape):  # noqa: SIM110 - a generator is entered once an element
        if got != want if isinstance(want, int) else got == 0 and want != "S":
            return False
    return True


def too_wide(x: Tensor) -> str | None:
    """Return the reason why a norm's kernel cannot take rows of this width, or None."""
    return f"its kernel holds rows of up to {WIDEST} elements" if x.shape[-1] > WIDEST else None


def require_last(op: str, name: str, t: Tensor, dimensions: str) -> None:
    """Raise ValueError unless `t` has a floating dtype and at least one dimension; `dimensions` describes the wanted ones."""
    if t.dim() == 0 or not t.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be a floating-point tensor {dimensions}, got {t.dtype} {tuple(t.shape)}; "
            f"cast it before the call."
        )


def require_rows(op: str, x: Tensor, **per_column: Tensor | None) -> None:
    """Raise ValueError unless x holds rows of floats, and each of `per_column` one value for each of x's columns."""
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating-point tensor, got {x.dtype}; cast it before the call.")
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar; reshape it to (1,).")
    wanted = x.shape[-1:]
    for name, t in per_column.items():
        if t is not None and (t.shape != wanted or t.device != x.device):
            require_columns(op, x, wanted, "last dimension", **{name: t})


def require_columns(op: str, x: Tensor, wanted: tuple[int, ...], dimension: str, **per_column: Tensor | None) -> None:
    """Raise ValueError unless each of `per_column` has the shape `wanted` and is on x's device."""
    for name, t in per_column.items():
        if t is not None and t.shape != wanted:
            raise ValueError(
                f"{op}: {name} must have shape {tuple(wanted)} to match x, got {tuple(t.shape)}; "
                f"it needs one value for each of x's {dimension}."
            )
    require_device(op, x, **per_column)


def require_residual(op: str, residual: Tensor, x: Tensor, rounded: bool = False) -> None:
    """Raise ValueError unless the residual can be added to x. rounded: it may have 16 bits where x has fp32."""
    fits = residual.dtype == x.dtype or (rounded and x.dtype == torch.float32 and residual.dtype in SIXTEEN_BITS)
    if residual.shape != x.shape or not fits:
        raise ValueError(
            f"{op}: residual must match x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; cast or reshape it before the call."
        )
    if residual.device != x.device:
        require_device(op, x, residual=residual)


def require_device(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless each of `others` is on x's device."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}; move one of them to the other's device.")
