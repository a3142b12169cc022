"""The normalisations."""

from torch import Tensor

from .choose import implementation
from .triton._launch import WIDEST


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""
    _check_rows("rms_norm", x, weight=weight)
    return implementation("rms_norm", x, _too_wide(x))(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, s) with s = x + residual and y = rms_norm(s): the residual add costs no pass of its own."""
    _check_rows("add_rms_norm", x, weight=weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: residual must match x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}; cast or reshape it before the call."
        )
    _check_device("add_rms_norm", "residual", residual, x)
    return implementation("rms_norm.add_rms_norm", x, _too_wide(x))(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last dimension."""
    _check_rows("layer_norm", x, weight=weight, bias=bias)
    return implementation("layer_norm", x, _too_wide(x))(x, weight, bias, eps)


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm of each of `groups` runs of channels of x (N, C, *), with a weight and a bias for each channel."""
    _check_floating("group_norm", x)
    if x.dim() < 2:
        raise ValueError(f"group_norm: x must have shape (samples, channels, ...), got {tuple(x.shape)}; add what is missing.")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: groups must divide x's {channels} channels, got {groups}; choose a divisor of {channels}."
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            _check_shape("group_norm", name, t, x, (channels,), "channels")
    return implementation("group_norm", x)(x, groups, weight, bias, eps)


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """tanh(alpha · x) · weight + bias: no statistics, `alpha` a tensor of one element."""
    _check_rows("dynamic_tanh", x, weight=weight, bias=bias)
    if alpha.numel() != 1:
        raise ValueError(
            f"dynamic_tanh: alpha must hold one element, got shape {tuple(alpha.shape)}; reduce it before the call."
        )
    _check_device("dynamic_tanh", "alpha", alpha, x)
    return implementation("dynamic_tanh", x, _too_wide(x))(x, alpha, weight, bias)


def _too_wide(x: Tensor) -> str | None:
    return f"its kernel holds rows of up to {WIDEST} elements" if x.shape[-1] > WIDEST else None


def _check_floating(op: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{op}: x must be a floating-point tensor, got {x.dtype}; cast it before the call.")


def _check_rows(op: str, x: Tensor, **per_column: Tensor | None) -> None:
    """x holds rows of floats, and each of `per_column` that is given one value for each of its columns."""
    _check_floating(op, x)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar; reshape it to (1,).")
    for name, t in per_column.items():
        if t is not None:
            _check_shape(op, name, t, x, x.shape[-1:], "last dimension")


def _check_shape(op: str, name: str, t: Tensor, x: Tensor, wanted: tuple[int, ...], what: str) -> None:
    if t.shape != wanted:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(wanted)} to match x, got {tuple(t.shape)}; "
            f"it needs one value for each of x's {what}."
        )
    _check_device(op, name, t, x)


def _check_device(op: str, name: str, t: Tensor, x: Tensor) -> None:
    if t.device != x.device:
        raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}; move one of them to the other's device.")
