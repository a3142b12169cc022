"""Products of a decoding step over packed numbers: rounded copies of the weights, or the codes of a quantised model."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from ..kernels import activate_rows, norm_rows, quantized_add_product, quantized_norm_gate_up, quantized_norm_product
from ..kernels.accumulate import join_rows
from ..kernels.decode_product import ACTIVATIONS, Norm
from ..kernels.packed_weights import Packed, join_packed
from ..layers.linear_product import format_of
from ..models.decoding import Linear, RowParts
from .lora import LoraDelta

Maxima = tuple[Tensor | None, Tensor | None]
"""partial maxima of a product, and their rows"""
NO_MAXIMA = (None, None)


def kind_of(packed: Packed) -> tuple[str, torch.dtype]:
    return packed.kind, packed.scale.dtype


def packed_of(layer: Linear) -> Packed:
    format: Any = format_of(layer.weight)
    return format.packed(layer.weight.detach())


def own_codes(layers: Sequence[Linear]) -> list[Packed]:
    """Return the codes of quantised layers, those of one format as one weight, which are neighbours in memory."""
    together = [[*group] for _, group in groupby(map(packed_of, layers), kind_of)]
    return [join_packed(group, join_rows([one.words for one in group])) for group in together]


class PackedLinear:
    """Layers that read one x, over packed numbers: one product for each of `parts`, whose rows follow each other.

    turns   layers whose rows alternate in a part: 2 for a packed gate and up
    shared  unpack into the scratch of all layers; False: into new memory
    """

    prefix = "quantized_"
    added: LoraDelta | None = None  # of the layers' adapters, added after the product; set by the layer's part
    gemv_rows: int | None = None
    copy: Tensor | None = None

    def __init__(
        self, form: Any, layers: Sequence[Linear], parts: Sequence[Packed], turns: int = 1, shared: bool = True
    ) -> None:
        self.form, self.layers, self.parts, self.turns = form, layers, parts, turns
        self.counts, self.rows = [len(layer.weight) for layer in layers], [part.rows for part in parts]
        self.size, self.device = (sum(self.rows), parts[0].columns), parts[0].words.device
        self.nbytes = sum(part.nbytes for part in parts)
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = self.alternate_bias = self.biases[0] if self.biases else None
        if len(self.biases) > 1:
            self.bias = torch.cat(self.biases).detach()
            alternate = len(layers) == 2 and self.counts[0] == self.counts[1]  # of a gate and up
            self.alternate_bias = torch.empty_like(self.bias) if alternate else self.bias
            self.copy_biases()
        self._scratch: Tensor | None = None
        self._stored: list[Tensor] = []
        if form.on_host:
            self._stored = self._unpacked(self._empty(form.dtype))
        elif shared:
            self._scratch = form.scratch(*self.size, self.device)  # now, since no graph may allocate it

    @torch.no_grad()
    def copy_biases(self) -> None:
        """Copy the biases of several layers to where the kernels read them as one."""
        torch.cat(self.biases, out=self.bias)
        if self.alternate_bias is not None and self.alternate_bias is not self.bias:
            torch.stack(self.biases, 1, out=self.alternate_bias.view(-1, 2))

    def norm_product(
        self, x: Tensor, norm: Norm | None, out: Tensor, mode: int, best: Maxima = NO_MAXIMA, cap: float = 0.0
    ) -> Tensor:
        if len(self.parts) == 1:
            quantized_norm_product(x, norm, self.parts[0], self.bias, out, *best, mode, cap)
        else:
            biases = [None] * len(self.parts) if self.bias is None else self.bias.split(self.rows)
            each = [quantized_norm_product(x, norm, *pair, None, None, None, mode) for pair in zip(self.parts, biases)]
            torch.cat(each, 1, out=out)
        if self.added is not None:
            self.added.add(self._normed(x, norm), *out.split(self.counts, 1))
        return out

    def norm_up(
        self, x: Tensor, norm: Norm | None, activation: str, by: Tensor | None, scratch: Tensor, out: Tensor, mode: int
    ) -> Tensor:
        return activate_rows(self.norm_product(x, norm, scratch, mode), activation, out, mode, by)

    def norm_gate_up(self, x: Tensor, norm: Norm | None, activation: str, out: Tensor, mode: int) -> None:
        (packed,) = self.parts
        if self.added is None:
            quantized_norm_gate_up(x, norm, packed, self.alternate_bias, out, mode, activation, self.turns == 2)
            return
        gate, up = quantized_norm_product(x, norm, packed, self.bias, None, None, None, mode).split(self.counts, 1)
        self.added.add(self._normed(x, norm), gate, up)
        out.copy_(ACTIVATIONS[activation](gate) * up)

    def add_product(self, h: Tensor, x: Tensor, mode: int) -> None:
        quantized_add_product(h, self.parts[0], self.bias, x, mode)
        if self.added is not None:
            self.added.add(h, x)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        out = torch.empty_like(x, dtype=self.form.dtype)
        return out.copy_(x) if norm is None else norm_rows(x, norm, out)

    def matrices(self) -> list[Tensor]:
        return self._stored or self._unpacked(self._empty(self.form.dtype) if self._scratch is None else self._scratch)

    def exact(self) -> Sequence[Linear]:
        if self.form.kind is None:
            return self.layers
        begins = [0] * len(self.layers) if self.turns > 1 else accumulate(self.counts[:-1], initial=0)
        exact = [partial(self._exact_rows, index, begin) for index, begin in enumerate(begins)]
        weights: list[Any] = [RowParts((count, self.size[1]), rows) for count, rows in zip(self.counts, exact)]
        return [layer._replace(weight=weight) for layer, weight in zip(self.layers, weights)]

    def _exact_rows(self, index: int, begin: int, start: int, stop: int) -> Tensor:
        """Return rows of a layer in fp32. `begin`: its first one among the packed rows, unless layers alternate in these."""
        (packed,), turns = self.parts, self.turns
        part = packed.part(slice((begin + start) * turns, (begin + stop) * turns))
        rows = self.form.unpack(part, torch.empty(part.rows, part.columns, device=self.device, dtype=torch.float32), turns)
        return rows if turns == 1 else rows.split(stop - start)[index]

    def tensors(self) -> list[Tensor]:
        codes = self._stored or [t for packed in self.parts for t in packed.tensors()]
        return [*codes, *self.biases, *(self.added.tensors() if self.added else ())]

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.size, device=self.device, dtype=dtype)

    def _unpacked(self, to: Tensor) -> list[Tensor]:
        for packed, part in zip(self.parts, to.split(self.rows)):
            self.form.unpack(packed, part, self.turns)
        return list(to.split(self.counts))
