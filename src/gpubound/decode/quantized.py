"""Products of a decoding step with weights that the model has quantised itself (layers/quantized_base.py), over their codes."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..kernels import norm_rows, quantized_add_product, quantized_norm_gate_up, quantized_norm_product
from ..kernels.accumulate import join_rows
from ..kernels.decode_product import ACTIVATIONS, Norm
from ..kernels.packed_weights import Packed, join_packed
from ..layers.linear_product import format_of
from ..models.decoding import AttentionWeights, DenseWeights, LayerWeights, Linear
from .lora import LoraDelta


def is_coded(weight: Tensor) -> bool:
    return format_of(weight).coded


def unlike(layers: Sequence[LayerWeights]) -> str | None:
    """Return which layers that read one input are not of formats that a step multiplies together; None where all are."""
    for number, (attention, mlp) in enumerate(layers):
        groups: list[tuple[str, Sequence[Linear]]] = []
        if isinstance(attention, AttentionWeights):
            groups.append((f"model.layers.{number}.self_attn", (attention.q, attention.k, attention.v)))
        if isinstance(mlp, DenseWeights):
            groups.append((f"model.layers.{number}.mlp", (mlp.gate, mlp.up)))
        for name, group in groups:
            coded = {is_coded(layer.weight) for layer in group}
            if len(coded) > 1:
                return f"{name}: only some of the layers that read its input are quantised"
            if coded == {True} and len(group) == 2 and len({kind_of(_packed(layer)) for layer in group}) > 1:
                return f"{name}: gate and up are quantised in two formats"
    return None


def kind_of(packed: Packed) -> tuple[str, torch.dtype]:
    return packed.kind, packed.scale.dtype


def _packed(layer: Linear) -> Packed:
    format: Any = format_of(layer.weight)
    return format.packed(layer.weight.detach())


class CodedLinear:
    """Layers that read one x. Those of one format are one product, over codes that are neighbours in memory.

    Of gate and up, the kernel takes rows of both alternately. Adapters are added after the product.
    """

    prefix = "quantized_"
    added: LoraDelta | None = None  # of the layers' adapters; set by the layer's part
    gemv_rows: int | None = None
    copy: Tensor | None = None

    def __init__(self, form: Any, layers: Sequence[Linear]) -> None:
        self.form, self.layers = form, layers
        self.counts = [len(layer.weight) for layer in layers]
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        together = [[*group] for _, group in groupby(map(_packed, layers), kind_of)]
        self.parts = [join_packed(group, join_rows([one.words for one in group])) for group in together]
        self.formats = Counter(group[0].kind for group in together for _ in group)
        self.rows = [packed.rows for packed in self.parts]
        self.columns, device = self.parts[0].columns, self.parts[0].words.device
        self.nbytes = sum(packed.nbytes for packed in self.parts)
        self._bias = torch.cat(self.biases).detach() if self.biases else None
        self._alternate_bias = torch.stack(self.biases, 1).flatten().detach() if len(self.biases) == 2 else self._bias
        size = sum(self.rows), self.columns
        self._scratch = None if form.on_host else form.scratch(*size, device)  # now, since no graph may allocate it
        self._stored = self._unpacked(torch.empty(size, device=device, dtype=form.dtype)) if form.on_host else []

    def norm_product(
        self, x: Tensor, norm: Norm | None, out: Tensor, mode: int, best: Any = (None, None), cap: float = 0.0
    ) -> Tensor:
        biases = [None] * len(self.parts) if self._bias is None else self._bias.split(self.rows)
        if len(self.parts) == 1:
            quantized_norm_product(x, norm, self.parts[0], biases[0], out, None, None, mode)
        else:
            each = [quantized_norm_product(x, norm, *pair, None, None, None, mode) for pair in zip(self.parts, biases)]
            torch.cat(each, 1, out=out)
        if self.added is not None:
            self.added.add(self._normed(x, norm), *out.split(self.counts, 1))
        return out

    def norm_gate_up(self, x: Tensor, norm: Norm | None, activation: str, out: Tensor, mode: int) -> None:
        (packed,) = self.parts
        if self.added is None:
            quantized_norm_gate_up(x, norm, packed, self._alternate_bias, out, mode, activation, False)
            return
        gate, up = quantized_norm_product(x, norm, packed, self._bias, None, None, None, mode).split(self.counts, 1)
        self.added.add(self._normed(x, norm), gate, up)
        out.copy_(ACTIVATIONS[activation](gate) * up)

    def add_product(self, h: Tensor, x: Tensor, mode: int) -> None:
        quantized_add_product(h, self.parts[0], self._bias, x, mode)
        if self.added is not None:
            self.added.add(h, x)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        out = torch.empty_like(x, dtype=self.form.dtype)
        return out.copy_(x) if norm is None else norm_rows(x, norm, out)

    def matrices(self) -> list[Tensor]:
        return self._stored or self._unpacked(self._scratch)

    def exact(self) -> Sequence[Linear]:
        return self.layers

    def tensors(self) -> list[Tensor]:
        codes = self._stored or [t for packed in self.parts for t in packed.tensors()]
        return [*codes, *self.biases, *(self.added.tensors() if self.added else ())]

    def _unpacked(self, to: Any) -> list[Tensor]:
        for packed, part in zip(self.parts, to.split(self.rows)):
            self.form.unpack(packed, part)
        return list(to.split(self.counts))
