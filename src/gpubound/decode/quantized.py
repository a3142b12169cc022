"""The body for packed weights: int8, int4 or fp8 copies of a Llama-shaped model's matrices, made when the decoder is.

A step reads the packed weights alone (kernels/quantized_product.py). Prompts, and more than NARROW rows at once, have products
for tensor cores: a layer's weights are unpacked to a scratch and multiplied there. Embedding, norms and biases are not packed.

The copies are of the weights as they were. A weight that is changed in place raises its version counter, and `moved` names it
at the next request; `rebind` packs all of them again, a layer at a time. Two ways to change a weight count as no version:
writing through `.data`, and the replay of a graph that holds an optimizer's step. After those, call `rebind`, or tell torch by
`torch.autograd.graph.increment_version(parameters)`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import can_launch
from ..kernels import dequantize, quantized_add_product, quantized_norm_gate_up, quantized_norm_product
from ..kernels.packed import KINDS, Packed, pack, pack_gate_up, pack_stacked
from ..trace import notice
from .cache import PLAIN, CacheLayout
from .fused import EARLY, LATE, NARROW, FusedBody
from .live import BoundModel, Layer

# As in fused.py, of packed bytes. Unpacking needs the multiprocessors that a waiting successor sits on: int4 at 8b (58 MB) 2.15
# ms a token EARLY and 1.91 LATE, int8 (117 MB) 2.65 and 2.43.
EARLY_BYTES = 32 << 20


class PackedLayer(NamedTuple):
    qkv: Packed
    qkv_bias: Tensor | None
    o: Packed
    gate_up: Packed
    gate_up_bias: Tensor | None
    down: Packed

    @property
    def weights(self) -> tuple[Packed, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class QuantizedBody(FusedBody):
    """A fused body whose matrices are packed. `live` reads as a model of the numbers that the packed ones stand for."""

    live: Any  # an Unpacked, or on a CPU a Whole

    def __init__(
        self, live: BoundModel, max_batch: int, max_length: int, kind: str, tokens: int = 1, *, cache: CacheLayout = PLAIN
    ) -> None:  # fmt: skip
        if kind not in KINDS:
            raise ValueError(f"decoder: weights: got {kind!r}, wanted one of {', '.join(KINDS)}, or None for the live ones.")
        super().__init__(live, max_batch, max_length, tokens, cache=cache)
        self.kind: str = kind
        self.original = live
        self.layers: list[PackedLayer] = []
        self._pack()

    def _pack(self) -> None:
        """Round the weights as they are now. What was packed before is dropped layer by layer."""
        self._versions = [(name, weight, weight._version) for name, weight in self.original.model.named_parameters()]
        for number, layer in enumerate(self.original.layers):
            self.layers[number : number + 1] = [_pack_layer(layer, self.kind)]
        self.packed_head = pack(self.original.head, self.kind)
        self.live = Unpacked(self.original, self.layers, self.packed_head, self.original.dtype)
        self.measured = None
        if self.host:  # unpacking takes longer than a step there, and so do the kernels' references
            self.live = Whole(self.live)
            self.host.forget()
            notice(
                f"decoder: no kernel reads {self.kind} weights on a CPU: the rounded numbers are kept in full, nothing is saved"
            )

    def exact(self) -> "Unpacked":  # type: ignore[override]  # it reads as a BoundModel
        """The packed model unrounded, for judge.py: layers are fp32, each unpacked when it is read."""
        return Unpacked(self.original, self.layers, self.packed_head, torch.float32)

    def moved(self) -> str | None:
        changed = (name for name, weight, version in self._versions if weight._version != version)
        return self.original.moved() or next(changed, None)

    def rebind(self) -> None:
        self.original.refresh()
        self._pack()
        notice(f"decoder: the weights have changed since they were rounded to {self.kind}: rounded again")

    def _dependent(self, rows: int) -> int:
        if not self.narrow(rows) or self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) < (9, 0):
            return 0
        return EARLY if self.layers[0].gate_up.nbytes <= EARLY_BYTES else LATE

    def _narrow_block(self, number: int, position: Tensor) -> None:
        rows, layer, packed, eps = position.numel(), self.original.layers[number], self.layers[number], self.live.shape.eps
        x, qkv, mixed, gated, mode = self.x[:rows], self.qkv[:rows], self.mixed[:rows], self.gated[:rows], self._dependent(rows)
        quantized_norm_product(x, layer.norm, eps, packed.qkv, packed.qkv_bias, qkv, dependent=mode)
        self._attend(number, qkv, position, mode)
        quantized_add_product(mixed, packed.o, layer.o_bias, x, mode)
        quantized_norm_gate_up(x, layer.mlp_norm, eps, packed.gate_up, packed.gate_up_bias, gated, mode)
        quantized_add_product(gated, packed.down, layer.down_bias, x, mode)

    def _head(self, rows: int) -> Tensor:
        if not self.narrow(rows):
            return super()._head(rows)
        return quantized_norm_product(
            self.x[:rows], self.live.norm, self.live.shape.eps, self.packed_head, None, self.logits[:rows], self.best[:rows],
            self.arg[:rows], self._dependent(rows),
        )  # fmt: skip

    def report(self) -> list[tuple[str, str, str]]:
        if self.host:
            return [
                *super().report(),
                ("weights", f"rounded to {self.kind}", "kept in full: no kernel reads packed ones on a CPU"),
            ]
        fused = super().report()[:5]
        rows = [(part, what if "attention" in part else what.replace(": ", ": quantized_"), why) for part, what, why in fused]
        packed, whole = (body.bytes_read() / 1e6 for body in (self.live, self.original))
        source = "triton" if can_launch(self.device) else "reference"
        wide = f", more than {NARROW} rows" if len(self.x) > NARROW else ""
        rows += [
            (f"prompts{wide}", f"{source}: dequantize, products by torch", f"{self.live.unpacked} weights unpacked so far"),
            ("weights", self.kind, f"{packed:,.3g} MB a step, {whole:,.3g} as they were"),
        ]
        return [*rows, *self._rounding()]


class Unpacked:
    """A packed model that reads like a `BoundModel`: matrices are unpacked to one layer's scratch whenever they are read."""

    def __init__(self, live: BoundModel, packed: list[PackedLayer], head: Packed, dtype: torch.dtype) -> None:
        self.original, self.packed, self.packed_head, self.made = live, packed, head, dtype
        self.unpacked = 0  # weights, by calls; the replays of a graph are not seen
        shapes = {(w.rows, w.columns) for layer in packed for w in layer.weights}
        self._scratch = {shape: torch.empty(shape, device=live.device, dtype=dtype) for shape in shapes}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    @property
    def layers(self) -> "_Layers":
        return _Layers(self)

    @property
    def head(self) -> Tensor:
        """Made anew each time: kept, it would be the largest of all."""
        self.unpacked += 1
        shape = self.packed_head.rows, self.packed_head.columns
        return dequantize(self.packed_head, torch.empty(shape, device=self.original.device, dtype=self.made))

    def unpack(self, weight: Packed, turns: int = 1) -> Tensor:
        self.unpacked += 1
        return dequantize(weight, self._scratch[weight.rows, weight.columns], turns)

    def bytes_read(self) -> int:
        """Packed weights once each, and what is not packed: norms and biases."""
        packed = [weight for layer in self.packed for weight in layer.weights]
        small = [t for layer in self.original.layers for t in layer.tensors() if t.dim() == 1]
        return sum(p.nbytes for p in (*packed, self.packed_head)) + sum(t.nbytes for t in small) + self.original.norm.nbytes


class Whole:
    """The rounded numbers in tensors that stay, as large as the weights they were made of."""

    def __init__(self, unpacked: Unpacked) -> None:
        self.original, self.head = unpacked.original, unpacked.head
        self.layers = [layer.kept() for layer in unpacked.layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _Layers:
    def __init__(self, model: Unpacked) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(self.model.packed)

    def __getitem__(self, number: int) -> "_Layer":
        return _Layer(self.model, self.model.original.layers[number], self.model.packed[number])

    def __iter__(self) -> Iterator["_Layer"]:
        return (self[number] for number in range(len(self)))


class _Layer:
    """A `Layer` whose matrices are unpacked when they are first read. The next layer's take their place."""

    def __init__(self, model: Unpacked, layer: Layer, packed: PackedLayer) -> None:
        self.model, self.layer, self.packed = model, layer, packed

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet; a matrix is, from then on."""
        if name in ("q", "k", "v"):
            counts = [w.shape[0] for w in (self.layer.q, self.layer.k, self.layer.v)]
            self.q, self.k, self.v = self.model.unpack(self.packed.qkv).split(counts)
        elif name in ("gate", "up"):
            self.gate, self.up = self.model.unpack(self.packed.gate_up, turns=2).chunk(2)
        elif name in ("o", "down"):
            setattr(self, name, self.model.unpack(getattr(self.packed, name)))
        else:
            return getattr(self.layer, name)
        return self.__dict__[name]

    def kept(self) -> Layer:
        """All of it, in tensors of its own."""
        return replace(self.layer, **{name: getattr(self, name).clone() for name in ("q", "k", "v", "o", "gate", "up", "down")})


def _pack_layer(layer: Layer, kind: str) -> PackedLayer:
    biases = [b for b in (layer.q_bias, layer.k_bias, layer.v_bias) if b is not None]
    both = [b for b in (layer.gate_bias, layer.up_bias) if b is not None]
    return PackedLayer(
        pack_stacked([layer.q, layer.k, layer.v], kind),
        torch.cat(biases).detach() if biases else None,
        pack(layer.o, kind),
        pack_gate_up(layer.gate, layer.up, kind),
        torch.stack(both, 1).flatten().detach() if both else None,
        pack(layer.down, kind),
    )
