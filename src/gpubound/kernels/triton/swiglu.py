"""SwiGLU: silu(gate) · up in one pass each way (kernels in _gated.py)."""

from torch import Tensor

from ._gated import Gated


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return Gated.apply(gate, up, "silu", "swiglu")
