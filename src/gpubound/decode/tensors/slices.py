"""What one of several devices has of a bound model: copies of its slices, which a body reads as if they were a model.

Rows of q, k, v, gate, up and the head are sliced, and columns of output and down: then each device computes some heads and some
columns of the MLP by itself, and of what is added to the stream a part, which all devices sum. A bias of that sum is on the
first alone.
"""

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from ...kernels.decode_product import Norm
from ...models.decoding import AttentionWeights, DenseWeights, LayerWeights, Linear
from ..weight_view import WeightView
from .plan import SlicePlan


class ModelSlice:
    """It has what a body asks of a WeightView."""

    whole = False
    adapted = False
    apart = None

    def __init__(self, live: WeightView, plan: SlicePlan) -> None:
        self.live, self.plan, self.device, self.dtype = live, plan, plan.device, live.dtype
        self.model, self.tables = live.model, live.tables
        shape, count = live.shape, plan.count
        self.shape = replace(shape, heads=shape.heads // count, kv_heads=shape.kv_heads // count, vocab=len(plan.words))
        self._copies: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Copy the numbers as they are now, from the second time on into the same memory where sizes are the same."""
        live, self._copied = self.live, 0
        self.reader, self.layers = live.reader, [self._layer(layer) for layer in live.layers]
        self.norm = self._norm(live.norm)
        self.head = self._copy(live.head[self.plan.words.start : self.plan.words.stop])
        self.embed: Any = self._copy(live.embed) if self.plan.number == 0 else None  # tokens are chosen on the first
        del self._copies[self._copied :]  # of biases that there were

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._copies)

    def bytes_read(self) -> int:
        return self.nbytes - (0 if self.embed is None else self.embed.nbytes)

    def moved(self) -> str | None:
        return None  # the model's body asks the model

    def _layer(self, layer: LayerWeights) -> LayerWeights:
        attention: AttentionWeights = layer.attention
        mlp: DenseWeights = layer.mlp
        return LayerWeights(self._part(attention, attention.o), self._part(mlp, mlp.down))

    def _part(self, weights: Any, last: Linear) -> Any:
        """`last` gives what is added to the stream, from all that the others give."""
        found: dict[str, Any] = {}
        for field in fields(weights):
            value = getattr(weights, field.name)
            if isinstance(value, Norm):
                found[field.name] = self._norm(value)
            elif isinstance(value, Linear):
                found[field.name] = self._columns(value) if value is last else self._rows(value)
        return replace(weights, **found)

    def _rows(self, layer: Linear) -> Linear:
        mine = self.plan.of(len(layer.weight))
        return Linear(self._copy(layer.weight[mine]), None if layer.bias is None else self._copy(layer.bias[mine]))

    def _columns(self, layer: Linear) -> Linear:
        weight = self._copy(layer.weight[:, self.plan.of(layer.weight.shape[1])])
        return Linear(weight, None if layer.bias is None or self.plan.number else self._copy(layer.bias))

    def _norm(self, norm: Norm) -> Norm:
        return norm._replace(weight=self._copy(norm.weight))

    def _copy(self, source: Tensor) -> Tensor:
        """Its copy on the device, contiguous. The n-th of a refresh is the n-th of the one before."""
        number, self._copied = self._copied, self._copied + 1
        copies = self._copies
        if number == len(copies) or copies[number].shape != source.shape:
            copies[number : number + 1] = [source.new_empty(source.shape, device=self.device)]
        if not copies[number].is_meta:
            copies[number].copy_(source.detach())
        return copies[number]
