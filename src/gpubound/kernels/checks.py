"""What ops ask of their arguments from outside: dtype, shape, layout, device. No number of a device tensor is read.

A number that only the device knows (a label, an id, a position) is checked in the kernel. What a bad one does is said in the
op's docstring: no access outside a tensor, and a NaN where silence would hide the mistake.
"""

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""What ids and labels may be. torch hardly computes with the wider unsigned types."""


def require(
    op: str, name: str, t: Tensor, dtype: torch.dtype | None, shape: tuple[int, ...], device: torch.device, why: str
) -> None:
    """Refuse a `t` that is not contiguous, of `dtype` (None: floating point) and `shape`, and on `device`."""
    fits = t.is_floating_point() if dtype is None else t.dtype == dtype
    if fits and t.shape == shape and t.is_contiguous() and t.device == device:
        return
    wanted, got = f"{dtype or 'floating-point tensor'} {tuple(shape)}", f"{t.dtype} {tuple(t.shape)}"
    if not t.is_contiguous():
        got += ", not contiguous"
    if t.device != device:
        wanted, got = f"{wanted} on {device}", f"{got} on {t.device}"
    raise ValueError(f"{op}: {name} must be a contiguous {wanted}, got {got}; {why}.")
