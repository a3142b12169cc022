"""Part of a layer with a separate input: the stream's gate times a vector of the token, which the token's id and embedding
give for all layers at once.

Legend: B rows, T tokens of a prompt.
"""

import torch.nn.functional as F
from torch import Tensor

from ..kernels import norm_rows
from ..layers.linear_product import format_of
from ..models.decoding import LayerInputs
from .layer import UngatedMLP, Workspace, normed
from .quantized import PackedLinear
from .weights import DenseLinear, LiveFormat


class LayerInput(UngatedMLP):
    """Gate, its activation times the layer's input, output."""

    def inputs(self, rows: int) -> Tensor:
        return self.workspace.step_inputs[self.number, :rows]

    def prompt(self, x: Tensor) -> Tensor:
        """Return the part's output for the stream x (B, T, hidden)."""
        return self.linear(self.down, self._activate(x, self.workspace.prompt_inputs[:, :, self.number]))[0]

    def ops(self) -> list[tuple[str, str, str]]:
        return [
            ("layer input's gate", f"{self.up.prefix}norm_product", ""),
            *self.activation("activation, times the input"),
            ("layer input's output", f"{self.down.prefix}add_product", ""),
        ]


class InputProduct:
    """Computes the inputs of all layers, by the model's own weights in any format."""

    def __init__(self, weights: LayerInputs, workspace: Workspace, layers: int) -> None:
        self.weights, self.workspace = weights, workspace
        coded = format_of(weights.projection.weight).coded
        self.product: DenseLinear | PackedLinear = (LiveFormat().stacked if coded else DenseLinear)(weights.projection)
        width = weights.width
        self._product = workspace.buffer("inputs", workspace.rows, layers * width)
        self._normed = workspace.buffer("normed inputs", workspace.rows * layers, width)
        workspace.step_inputs = workspace.buffer("layer inputs", layers, workspace.rows, width)

    def step(self, token: Tensor, x: Tensor, own_kernels: bool) -> None:
        """Compute those of a step's tokens (B,) with embeddings x (B, hidden), in fp32."""
        w, product = self.weights, self._product[: len(x)]
        if own_kernels:
            self.product.norm_product(x, None, product, 0)
        else:
            product.copy_(F.linear(x.to(self.workspace.dtype), self.product.matrices()[0]))
        parts = product.view(-1, w.width)
        parts = norm_rows(parts, w.norm, self._normed[: len(parts)])
        self.workspace.step_inputs[:, : len(x)] = w.of(token, parts.view(len(x), -1)).transpose(0, 1)

    def of_prompt(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return those (B, T, layers, width) of a prompt's tokens with embeddings x (B, T, hidden)."""
        product = F.linear(x, self.product.matrices()[0])
        return self.weights.of(ids, normed(product.unflatten(-1, (-1, self.weights.width)), self.weights.norm))
