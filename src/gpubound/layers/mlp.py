"""The gated MLP: down(activation(gate(x)) · up(x)), with gate and up as one product."""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import geglu, swiglu
from . import fp8, recompute
from .linear_site import linear
from .stacked import Kernels, Stacked, cut_to_size, one_by_one, plain, product_words, stacked_product

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class MLP(nn.Module):
    """Gate and up as one product, the activation and the multiplication as one kernel, then down."""

    PROJECTIONS: tuple[str, ...] = ("gate_proj", "up_proj")  # together [gate | up]

    activation: str = "silu"

    def __init__(
        self, hidden: int, intermediate: int, bias: bool = False, activation: str = "silu", device=None, dtype=None
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"MLP: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
        where = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, **where)
        self.activation = activation
        self.stacked = Stacked()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        cut_to_size(self.projections())

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        children: dict[str, Any] = self._modules
        layers, down = self.projections(), children["down_proj"]
        stack = self.stacked.parts(layers)
        own: dict[str, Any] = down._parameters if plain(down) else {}
        weight, bias = own.get("weight"), own.get("bias")
        if stack is None:
            y = self._gated(*one_by_one(x, layers))
        else:
            usual = bias is None and self.activation == "silu" and torch.is_grad_enabled()
            trained = weight if usual and weight is not None and weight.requires_grad else None
            if trained is not None and (result := fp8.gated(x, stack, trained)) is not None:
                return result
            packed = stacked_product(x, stack)
            if trained is not None and packed.nbytes // 2 >= recompute.LEAST_BYTES and not hasattr(trained, "fp8"):
                return recompute.gated_down(packed, trained)
            y = self._gated(packed)
        return down(y) if weight is None else linear(y, weight, bias)

    def projections(self) -> list[Any]:
        children: dict[str, Any] = self._modules
        return [children[name] for name in self.PROJECTIONS]

    def fused_kernels(self) -> Kernels:
        product = product_words("gate and up", self.projections(), self.__dict__.get("stacked"))
        return f"{product}; {{}}", ("swiglu" if self.activation == "silu" else "geglu",)

    def _gated(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`gate` alone is the packed product [gate | up]."""
        if self.activation == "silu":
            return swiglu(gate, up)
        return geglu(gate, up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
