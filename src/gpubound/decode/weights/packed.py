"""Packed weights: int8, int4 or fp8 copies of a model's matrices, made when the decoder is.

A step reads the packed weights alone (kernels/packed_weights.py says how they lie). Prompts, and many rows at once, have
products for tensor cores: a layer's weights are unpacked to a scratch that all layers share, and multiplied there. The
embedding, norms and biases are not packed.

The copies are of the weights as they were. `changed` names one that has changed since (versions.py) at the next request, and
all of them are packed again, a layer at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import (
    Norm,
    dequantize,
    quantized_add_product,
    quantized_add_routed,
    quantized_norm_gate_up,
    quantized_norm_product,
    quantized_routed_gate_up,
)
from ...kernels.packed_weights import Packed, pack, pack_gate_up, pack_stacked, unpack
from ...models.decoding import Linear
from ...trace import notice
from ..lora import LoraDelta
from ..model_watch import WeightVersions
from .own import NO_MAXIMA, Maxima


class PackedFormat:
    prefix = "quantized_"
    adds = False
    # As of own weights, of packed bytes. Unpacking needs the multiprocessors that a waiting successor sits on: int4 at 8b (58
    # MB) 2.15 ms a token early and 1.91 late, int8 (117 MB) 2.65 and 2.43.
    early_bytes = 32 << 20

    def __init__(self, kind: str) -> None:
        self.kind, self.reads = kind, f"{kind} copies of the weights"
        self.kept = False
        self.unpacked = 0  # weights, by calls; the replays of a graph are not seen
        self.dtype = torch.float32
        self._versions: WeightVersions | None = None
        self._scratch: dict[tuple[int, int], Tensor] = {}

    def begin(self, model: nn.Module, kept: bool) -> None:
        """The weights of `model` are taken from here on; `kept`: their rounded numbers stay in full, for a CPU's own step."""
        again, self.kept = self._versions is not None, kept
        self._versions = WeightVersions(model)
        self.dtype = next(model.parameters()).dtype
        if again:
            notice(f"decoder: the weights have changed since they were rounded to {self.kind}: rounded again")
        if kept:  # unpacking takes longer than a step there, and so do the kernels' references
            notice(
                f"decoder: no kernel reads {self.kind} weights on a CPU: the rounded numbers are kept in full, nothing is saved"
            )

    def changed(self) -> str | None:
        return None if self._versions is None else self._versions.changed()

    def stacked(self, *layers: Linear) -> "PackedLinear":
        return PackedLinear(self, pack_stacked([layer.weight for layer in layers], self.kind), layers)

    def gate_up(self, gate: Linear, up: Linear) -> "PackedLinear":
        return PackedLinear(self, pack_gate_up(gate.weight, up.weight, self.kind), (gate, up), turns=2)

    def head(self, weight: Tensor) -> "PackedLinear":
        """Unpacked anew each time: kept, it would be the largest scratch of all."""
        return PackedLinear(self, pack(weight, self.kind), [Linear(weight)], shared=False)

    def experts(self, gate_up: Tensor, down: Tensor) -> "PackedExperts":
        return PackedExperts(self, gate_up, down)

    def scratch(self, weight: Packed) -> Tensor:
        """Where matrices of this size are unpacked, the next layer's over this one's."""
        size = weight.rows, weight.columns
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, device=weight.words.device, dtype=self.dtype)
        return self._scratch[size]

    def unpack(self, weight: Packed, to: Tensor, turns: int = 1) -> Tensor:
        self.unpacked += 1
        return dequantize(weight, to, turns)

    def report(self, kernels: str, read: int, whole: int, wide: str) -> list[tuple[str, str, str]]:
        if self.kept:
            return [("weights", f"rounded to {self.kind}", "kept in full: no kernel reads packed ones on a CPU")]
        return [
            (f"prompts{wide}", f"{kernels}: dequantize, products by torch", f"{self.unpacked} weights unpacked so far"),
            ("weights", self.kind, f"{read / 1e6:,.3g} MB a step, {whole / 1e6:,.3g} as they were"),
        ]


class PackedLinear:
    """Weights that read one x, packed as one: the rows of each below each other, or by `turns`."""

    added: LoraDelta | None = None

    def __init__(
        self, form: PackedFormat, packed: Packed, layers: Sequence[Linear], turns: int = 1, shared: bool = True
    ) -> None:
        self.form, self.packed, self.turns, self.layers = form, packed, turns, layers
        self.counts = [len(layer.weight) for layer in layers]
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _together(self.biases, turns)
        self.nbytes = packed.nbytes
        self._scratch = form.scratch(packed) if shared and not form.kept else None  # made now: no graph may hold its making
        self._kept = self._unpacked(self._empty(form.dtype)) if form.kept else None

    def norm_product(
        self, x: Tensor, norm: Norm | None, out: Tensor, mode: int, best: Maxima = NO_MAXIMA, cap: float = 0.0
    ) -> Tensor:
        return quantized_norm_product(x, norm, self.packed, self.bias, out, *best, mode, cap)

    def norm_gate_up(self, x: Tensor, norm: Norm | None, activation: str, out: Tensor, mode: int) -> None:
        quantized_norm_gate_up(x, norm, self.packed, self.bias, out, mode, activation)

    def add_product(self, h: Tensor, x: Tensor, mode: int) -> None:
        quantized_add_product(h, self.packed, self.bias, x, mode)

    def matrices(self) -> list[Tensor]:
        if self._kept is not None:
            return self._kept
        return self._unpacked(self._empty(self.form.dtype) if self._scratch is None else self._scratch)

    def exact(self) -> list[Linear]:
        unpacked = self._unpacked(self._empty(torch.float32))
        return [layer._replace(weight=weight) for layer, weight in zip(self.layers, unpacked)]

    def tensors(self) -> list[Tensor]:
        return [*(self._kept or (self.packed.words, self.packed.scale)), *self.biases]

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.packed.rows, self.packed.columns, device=self.packed.words.device, dtype=dtype)

    def _unpacked(self, to: Tensor) -> list[Tensor]:
        return list(self.form.unpack(self.packed, to, self.turns).split(self.counts))


def _together(biases: Sequence[Tensor], turns: int) -> Tensor | None:
    """The biases as the kernels take them: as the rows of the weights lie."""
    if len(biases) < 2:
        return biases[0] if biases else None
    return (torch.stack(list(biases), 1).flatten() if turns > 1 else torch.cat(list(biases))).detach()


class PackedExperts:
    """gate_up (E, 2 I, hidden) and down (E, hidden, I), each packed as one weight whose rows are the experts' in turn."""

    wide_steps = False  # unpacking every expert would read and write more than the chosen ones' packed bytes, row by row

    def __init__(self, form: PackedFormat, gate_up: Tensor, down: Tensor) -> None:
        self.form, self.shapes = form, (gate_up.shape, down.shape)
        self.gate_up, self.down = (pack(stack.flatten(0, 1), form.kind) for stack in (gate_up, down))
        self.gate_up_bytes = self.gate_up.nbytes // len(gate_up)  # of one expert
        self.nbytes = (self.gate_up.nbytes + self.down.nbytes) // len(gate_up)  # of one expert
        self._scratch = [form.scratch(weight) for weight in (self.gate_up, self.down)]

    def routed_gate_up(self, x: Tensor, norm: Norm, ids: Tensor, out: Tensor, mode: int) -> None:
        quantized_routed_gate_up(x, norm, self.gate_up, ids, out, mode)

    def add_routed(self, h: Tensor, ids: Tensor, shares: Tensor, x: Tensor, mode: int) -> None:
        quantized_add_routed(h, self.down, ids, shares, x, mode)

    def matrices(self) -> tuple[Tensor, Tensor]:
        weights = zip((self.gate_up, self.down), self._scratch, self.shapes)
        gate_up, down = (self.form.unpack(weight, to).view(shape) for weight, to, shape in weights)
        return gate_up, down

    def exact(self) -> tuple[Any, Any]:
        return UnpackedExperts(self.gate_up, self.shapes[0]), UnpackedExperts(self.down, self.shapes[1])


class UnpackedExperts:
    """Stacked experts of which the judge unpacks the chosen ones alone: all of a layer in fp32 would be gigabytes."""

    def __init__(self, packed: Packed, shape: torch.Size) -> None:
        self.packed, self.shape = packed, shape

    def index_select(self, dim: int, ids: Tensor) -> Tensor:
        words, scale = (t.view(*self.shape[:2], -1).index_select(dim, ids) for t in (self.packed.words, self.packed.scale))
        chosen = self.packed._replace(words=words.flatten(0, 1), scale=scale.flatten(0, 1))
        return unpack(chosen).view(len(ids), *self.shape[1:])
