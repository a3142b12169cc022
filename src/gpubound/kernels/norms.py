"""The doors of the normalisations: check, choose, call."""

from torch import Tensor

from .choose import implementation


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""
    _check_weight("rms_norm", "weight", x, weight)
    return implementation("rms_norm", x)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, s) with s = x + residual and y = rms_norm(s): the residual add costs no pass of its own."""
    _check_weight("add_rms_norm", "weight", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: residual must match x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; cast or reshape it before the call."
        )
    return implementation("rms_norm.add_rms_norm", x)(x, residual, weight, eps)


def _check_weight(op: str, name: str, x: Tensor, weight: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating-point tensor, got {x.dtype}; cast it before the call.")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(x.shape[-1:])} to match x, got {tuple(weight.shape)}; "
            f"it needs one value for each of x's last dimension."
        )
    if weight.device != x.device:
        raise ValueError(f"{op}: {name} is on {weight.device}, x on {x.device}; move one of them to the other's device.")
