"""GeGLU: gelu(gate) · up in one pass each way (kernels in swiglu.py)."""

from torch import Tensor

from .swiglu import Gated


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    return Gated.apply(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu_erf", "geglu")
