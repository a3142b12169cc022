"""A model in host memory as a decoder on a GPU reads it: its matrices are packed there individually, the rest is copied.

The embedding, norms and biases are copies on the GPU. The matrices of the layers and the head stay where they are: a weight
format rounds them part by part, and keeps the packed numbers alone. So a model whose 16-bit weights do not fit the GPU can be
decoded in 4 bits. As of any other model, weights that change are found at the next request, and all is packed again.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels.decode_product import Norm
from ..kernels.row_ops import LayerNorm
from ..models.decoding import DenseWeights, LayerWeights
from .weight_view import WeightView


class HostView:
    """A WeightView on another device than its model's."""

    sliced, adapted, apart, positions, layer_inputs = False, False, None, None, None

    def __init__(self, original: WeightView, device: torch.device) -> None:
        if any(type(layer.mlp) is not DenseWeights or layer.extra is not None for layer in original.layers):
            raise ValueError(
                f"decoder: device: got {device} for a model on {original.device} whose MLPs are experts or have no gate or an "
                f"input besides, wanted one with dense, gated MLPs; move the model."
            )
        self.original, self.device, self.dtype = original, device, original.dtype
        self.model, self.shape, self.coded = original.model, original.shape, original.coded
        self.numbers, self.bytes_read = original.numbers, original.bytes_read
        self._read()

    @property
    def copied(self) -> Any:
        return self.original.copied

    def refresh_copies(self) -> None:
        self.original.refresh_copies()

    def refresh(self) -> None:
        """Read the weights again, after `moved` or when a module was replaced."""
        self.original.refresh()
        self._read()

    def _read(self) -> None:
        live = self.original
        self.reader, self.moved = live.reader, live.moved  # which is another one after a refresh
        self.layers = [self._layer(layer) for layer in live.layers]
        self.embed, self.norm, self.head = self._copy(live.embed), self._moved(live.norm), live.head

    def tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(cos.to(self.device), sin.to(self.device)) for cos, sin in self.original.tables(length)]

    def _layer(self, layer: LayerWeights) -> LayerWeights:
        factor = None if layer.factor is None else self._copy(layer.factor)
        return layer.mapped(self._moved)._replace(factor=factor)

    def _moved(self, value: Any) -> Any:
        """Return a norm, a vector, or a linear layer with its bias, on the device."""
        if isinstance(value, Tensor):
            return self._copy(value)
        if isinstance(value, Norm | LayerNorm):
            value = value._replace(weight=self._copy(value.weight))
        if isinstance(value, Norm):
            return value
        return value if value.bias is None else value._replace(bias=self._copy(value.bias))

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device)
