"""The gated activations."""

from torch import Tensor

from .choose import implementation


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up. Give both, or one tensor (..., 2 I) that holds [gate | up]; the result is (..., I)."""
    _check("swiglu", gate, up)
    return implementation("swiglu", gate)(gate, up)


def swiglu_backward(dh: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient of a packed gate_up (..., 2 I), h again) from dh (..., I), the gradient of h = silu(gate) · up.

    For an autograd.Function that multiplies h and would rather not keep it until backward.
    """
    _check("swiglu_backward", gate_up, None)
    if dh.shape != (*gate_up.shape[:-1], gate_up.shape[-1] // 2) or dh.dtype != gate_up.dtype or dh.device != gate_up.device:
        raise ValueError(
            f"swiglu_backward: dh must be half of gate_up, {tuple(gate_up.shape)} {gate_up.dtype} on {gate_up.device}, "
            f"got {tuple(dh.shape)} {dh.dtype} on {dh.device}; pass the gradient of its SwiGLU."
        )
    return implementation("swiglu_backward", gate_up)(dh, gate_up)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up, packed or apart as in `swiglu`. `approximate` as torch's gelu: "tanh", or "none" for the exact one."""
    if approximate not in ("tanh", "none"):
        raise ValueError(
            f"geglu: approximate must be 'tanh' or 'none', got {approximate!r}; take the one the model was trained with."
        )
    _check("geglu", gate, up)
    return implementation("geglu", gate)(gate, up, approximate)


def _check(op: str, gate: Tensor, up: Tensor | None) -> None:
    if not gate.is_floating_point() or gate.dim() == 0:
        raise ValueError(
            f"{op}: gate must be a floating-point tensor with a last dimension, got {gate.dtype} {tuple(gate.shape)}; "
            f"cast it before the call."
        )
    if up is None and gate.shape[-1] % 2:
        raise ValueError(
            f"{op}: a packed [gate | up] needs an even last dimension, got {tuple(gate.shape)}; pass gate and up apart instead."
        )
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device):
        raise ValueError(
            f"{op}: up must match gate, {tuple(gate.shape)} {gate.dtype} on {gate.device}, "
            f"got {tuple(up.shape)} {up.dtype} on {up.device}; cast, move or reshape it before the call."
        )
