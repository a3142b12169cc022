"""Weight formats: the matrices that the parts of a layer multiply by, made from a model's weights.

`LiveFormat` reads the model's weights in place, dense ones and the codes of quantised ones (`PackedLinear`). `PackedFormat` has
int8, int4 or fp8 copies. A step of up to MATMUL_ROWS rows reads codes and packed copies alone. Prompts and steps of more rows
unpack a layer's weights into a scratch that all layers share, and multiply on tensor cores. The embedding, norms and biases are
not packed. A weight that has changed since it was packed is found at the next request (`changed`), and all are packed again.

stacked(*layers)         layers that read one x (q, k and v; o; down)
gate_up(gate, up)        the two halves of a gated MLP
head(layer)              a single layer, too large for a scratch
experts(gate_up, down)   the layers of a sparse MLP, stacked by expert

Each product has the operations of a step under the names of their kernels; `matrices()` in the model's dtype for many rows,
with `biases`; `exact()` in fp32 for the certificate; and `tensors()`, which a step reads. A format also has the `prefix` of
its kernels' names, whether they add adapters (`adds`), the most bytes with which they trigger their successors early
(`early_bytes`), and rows for the decoder's table (`report`).

`PackedLinear` has the products of a decoding step over packed numbers: rounded copies of the weights, or the codes of a
quantised model.

`LayerInput` is the part of a layer with a separate input: the stream's gate times a vector of the token, which the token's id
and embedding give for all layers at once.

Legend: B rows, T tokens of a prompt.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..kernels.accumulate import join_rows
from ..kernels.decode_product import ACTIVATIONS, Norm
from ..kernels.packed_weights import KINDS, Packed, join_packed, pack, pack_gate_up, pack_stacked, unpack
from ..kernels.peer_exchange import Mail
from ..kernels.split_product import parts_of
from ..layers.linear_product import format_of, fused_linear
from ..models.decoding import LayerInputs, Linear, RowParts
from ..trace import notice
from .layer import EARLY_BYTES, UngatedMLP, Workspace, add_linear, normed
from .lora import LoraDelta, adapters_for
from .model_watch import WeightVersions

# The most rows of x that are multiplied by codes together. H200, us of the products of a layer of llama-8b in int4, and of
# cuBLAS's by 16-bit weights: 8 rows 78, 114; 32 161, 119; 64 264, 123; 128 418, 136. Unpacking to 16 bits, which was not
# timed, moves 0.55 GB a layer: 130 us at the memory's rate.
MATMUL_ROWS = 64

Maxima = tuple[Tensor | None, Tensor | None]
"""partial maxima of a product, and their rows"""
NO_MAXIMA = (None, None)


def kind_of(packed: Packed) -> tuple[str, torch.dtype, list[int] | None]:
    """Return what packed weights that are multiplied as one have in common."""
    return packed.kind, packed.scale.dtype, None if packed.order is None else packed.order.tolist()


def packed_of(layer: Linear) -> Packed:
    format: Any = format_of(layer.weight)
    return format.packed(layer.weight.detach())


def own_codes(layers: Sequence[Linear]) -> list[Packed]:
    """Return the codes of quantised layers, those of one format and order as one weight, which are neighbours in memory."""
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
        self.gates = "norm_gate_up" if len(parts) == 1 else "norm_product"  # the op that multiplies by gate and up
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
            kernels.norm_product(x, norm, self.parts[0], None, None, self.bias, None, None, out, *best, mode, cap)
        else:
            biases = [None] * len(self.parts) if self.bias is None else self.bias.split(self.rows)
            pairs = zip(self.parts, biases)
            each = [kernels.norm_product(x, norm, part, bias=bias, dependent=mode) for part, bias in pairs]
            torch.cat(each, 1, out=out)
        if self.added is not None:
            self.added.add(self._normed(x, norm), *out.split(self.counts, 1))
        return out

    def norm_up(
        self, x: Tensor, norm: Norm | None, activation: str, by: Tensor | None, scratch: Tensor, out: Tensor, mode: int
    ) -> Tensor:
        return kernels.activate_rows(self.norm_product(x, norm, scratch, mode), activation, out, mode, by)

    def norm_gate_up(self, x: Tensor, norm: Norm | None, activation: str, out: Tensor, mode: int) -> None:
        if self.added is None and len(self.parts) == 1:
            kernels.quantized_norm_gate_up(x, norm, self.parts[0], self.alternate_bias, out, mode, activation, self.turns == 2)
            return
        both = torch.empty(len(x), self.size[0], device=self.device, dtype=torch.float32)
        gate, up = self.norm_product(x, norm, both, mode).split(self.counts, 1)
        out.copy_(ACTIVATIONS[activation](gate) * up)

    def add_product(self, h: Tensor, x: Tensor, mode: int) -> None:
        kernels.add_product(h, self.parts[0], self.bias, x, mode)
        if self.added is not None:
            self.added.add(h, x)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        out = torch.empty_like(x, dtype=self.form.dtype)
        return out.copy_(x) if norm is None else kernels.norm_rows(x, norm, out)

    def multiply(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Return h (B, K) times the weights side by side, with biases. out: of a single part that `reads_codes`"""
        if not self.reads_codes(h):
            return fused_linear(h, self.matrices(), self.biases or None)
        h = h.contiguous()
        if len(self.parts) == 1:
            return kernels.quantized_matmul(h, self.parts[0], self.bias, out, self.turns)
        biases = [None] * len(self.parts) if self.bias is None else self.bias.split(self.rows)
        return torch.cat([kernels.quantized_matmul(h, part, bias) for part, bias in zip(self.parts, biases)], 1)

    def accumulate(self, to: Tensor, h: Tensor) -> None:
        """Add h (B, K) times the weight to `to`."""
        if self.reads_codes(h):
            kernels.quantized_matmul(h.contiguous(), self.parts[0], self.bias, to, add=True)
        else:
            add_linear(to, h, self.matrices()[0], *self.biases)

    def reads_codes(self, h: Tensor) -> bool:
        """Return whether rows h are multiplied by the codes together, and not by unpacked weights."""
        return len(h) <= MATMUL_ROWS and not self._stored

    def matrices(self) -> list[Tensor]:
        return self._stored or self._unpacked(self._empty(self.form.dtype) if self._scratch is None else self._scratch)

    def exact(self) -> Sequence[Linear]:
        if self.form.kind is None:
            return self.layers
        begins = [0] * len(self.layers) if self.turns > 1 else accumulate(self.counts[:-1], initial=0)
        exact = [partial(self._exact_rows, index, begin) for index, begin in enumerate(begins)]
        kind = self.parts[0].kind
        weights: list[Any] = [RowParts((count, self.size[1]), rows, kind) for count, rows in zip(self.counts, exact)]
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


class WeightFormat:
    """Base class: the scratch that the matrices of all layers are unpacked to, one after the other."""

    on_host = False
    unpacked = 0  # weights, by calls; a graph's replays are not counted
    dtype = torch.float32

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int], Tensor] = {}

    def scratch(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return the buffer that matrices of this size are unpacked to."""
        if (rows, columns) not in self._scratch:
            self._scratch[rows, columns] = torch.empty(rows, columns, device=device, dtype=self.dtype)
        return self._scratch[rows, columns]

    def unpack(self, weight: Packed, to: Tensor, turns: int = 1) -> Tensor:
        self.unpacked += 1
        return kernels.dequantize(weight, to, turns)

    def refresh_copies(self) -> None:
        """Follow, in place, what has changed in the model and is cheap to copy."""

    def changed(self) -> str | None:
        """Return the name of a weight whose change means that all are read again."""
        return None


class LiveFormat(WeightFormat):
    kind: str | None = None
    prefix = ""
    reads = "the live weights"
    adds = True
    # Largest gate and up of a layer whose kernels trigger their successors early. H200, a whole step: 350m 398 us against 437
    # late, 1b (67 MB) 745 / 789, but eight layers of Qwen3.5-4B (94 MB) 872 / 843, and 8b (235 MB) 4,250 / 4,018.
    early_bytes = 80 << 20

    def __init__(self, kind: None = None) -> None:
        super().__init__()
        self.formats = Counter[str]()  # of quantised weights
        self._joined: list[tuple[PackedLinear, list[int]]] = []  # products with a copy of biases, and the versions of these

    def begin(self, model: nn.Module, device: torch.device, on_host: bool) -> None:
        """Prepare to read the model's current weights on `device`. on_host: for the CPU's step, which no kernel serves."""
        self.on_host, self.formats, self._joined = on_host, Counter(), []
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if on_host and any(format_of(p).coded for p in model.parameters()):
            notice("decoder: no kernel reads quantised weights on a CPU: their numbers are kept in full, nothing is saved")

    def refresh_copies(self) -> None:
        """Copy joined biases again, in place, where they have changed. All other weights are read where they are."""
        for product, versions in self._joined:
            if versions != (now := [bias._version for bias in product.biases]):
                product.copy_biases()
                versions[:] = now

    def stacked(self, *layers: Linear) -> "DenseLinear | PackedLinear":
        if not format_of(layers[0].weight).coded:
            return DenseLinear(*layers)
        self.formats.update(packed_of(layer).kind for layer in layers)
        product = PackedLinear(self, layers, own_codes(layers))
        if len(product.biases) > 1:
            self._joined.append((product, [bias._version for bias in product.biases]))
        return product

    gate_up = stacked

    def head(self, layer: Linear) -> "DenseLinear":
        return DenseLinear(layer)

    def experts(self, gate_up: Tensor, down: Tensor) -> "DenseExperts":
        return DenseExperts(gate_up, down)

    def report(self, kernels: str, read: int, unpacked: int, steps: str) -> list[tuple[str, str, str]]:
        if not self.formats:
            return []
        formats = ", ".join(f"{count} in {kind}" for kind, count in self.formats.items())
        if self.on_host:
            return [("weights", formats, "kept in full: no kernel reads quantised ones on a CPU")]
        return [
            (f"prompts{steps}", f"{kernels}: dequantize, products by torch", f"{self.unpacked} weights unpacked so far"),
            ("weights", f"the model's own: {formats}", f"{read / 1e6:,.3g} MB a step"),
        ]


class DenseLinear:
    """Up to three weights that read one x. More than `gemv_rows` rows of x are a tiled GEMM."""

    prefix = ""
    added: LoraDelta | None = None  # of the layers' adapters; set by the layer's part
    gates = "norm_gate_up"
    keeps = True  # whether `add_product` takes a second place for the stream
    gemv_rows: int | None = None
    copy: Tensor | None = None  # of the stream, which tiled GEMMs read and write

    def __init__(self, *layers: Linear) -> None:
        assert len(layers) <= 3
        self.layers = layers
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        self.nbytes = sum(layer.weight.nbytes for layer in layers)
        self._matrices = [layer.weight.detach() for layer in layers]  # without tensor states: adapters are added separately
        missing = [(None, None)] * (3 - len(layers))
        self._operands: Any = tuple(zip(*(layer[:2] for layer in layers), *missing))  # weights, biases

    def norm_product(
        self, x: Tensor, norm: Norm | None, out: Tensor, mode: int, best: Maxima = NO_MAXIMA, cap: float = 0.0
    ) -> Tensor:
        (q, k, v), (q_bias, k_bias, v_bias) = self._operands
        adapters, tiled = adapters_for(self.added, len(x)), self._tiled(x)
        return kernels.norm_product(x, norm, q, k, v, q_bias, k_bias, v_bias, out, *best, mode, cap, adapters, tiled=tiled)

    def norm_up(
        self, x: Tensor, norm: Norm | None, activation: str, by: Tensor | None, scratch: Tensor, out: Tensor, mode: int
    ) -> Tensor:
        """Return activation(the product) · by. scratch: fp32 of out's shape, which packed weights need"""
        (up, *_), (bias, *_) = self._operands
        last = mode, 0.0, adapters_for(self.added, len(x)), activation, by
        return kernels.norm_product(x, norm, up, None, None, bias, None, None, out, None, None, *last)

    def norm_gate_up(self, x: Tensor, norm: Norm | None, activation: str, out: Tensor, mode: int) -> None:
        (gate, up, _), (gate_bias, up_bias, _) = self._operands
        last = mode, activation, adapters_for(self.added, len(x)), self._tiled(x)
        kernels.norm_gate_up(x, norm, gate, up, gate_bias, up_bias, out, *last)

    def add_product(self, h: Tensor, x: Tensor, mode: int, keep: Tensor | None = None) -> None:
        tiled = self._tiled(h)
        copy = self.copy[: len(h)] if tiled and self.copy is not None else None
        kernels.add_product(h, *self.layers[0][:2], x, mode, adapters_for(self.added, len(h)), copy, keep, tiled)

    def _tiled(self, x: Tensor) -> bool:
        """Return whether the rows of x are multiplied together."""
        return self.gemv_rows is not None and len(x) > self.gemv_rows

    def send_product(self, h: Tensor, to: Mail, mode: int) -> None:
        kernels.send_product(h, *self.layers[0][:2], to, mode)

    def split_product(self, h: Tensor, scratch: Tensor, mode: int) -> Tensor:
        """Return h times the weights side by side, as the parts of a sum, in the beginning of scratch (fp32)."""
        (q, k, v), (q_bias, k_bias, v_bias) = self._operands
        rows = sum(len(weight) for weight in self._matrices)
        shape = parts_of(rows, q, len(h)), len(h), rows
        return kernels.split_product(h, q, k, v, q_bias, k_bias, v_bias, scratch[: math.prod(shape)].view(shape), mode)

    def split_gate_up(self, h: Tensor, activation: str, out: Tensor, mode: int) -> None:
        (gate, up, _), (gate_bias, up_bias, _) = self._operands
        kernels.split_gate_up(h, gate, up, gate_bias, up_bias, out, mode, activation)

    def reads_codes(self, h: Tensor) -> bool:
        return False

    def multiply(self, h: Tensor) -> Tensor:
        """Return h (B, K) times the weights side by side, with biases: one GEMM where it can be."""
        return fused_linear(h, self.matrices(), self.biases or None)

    def accumulate(self, to: Tensor, h: Tensor) -> None:
        """Add h (B, K) times the weight to `to`."""
        add_linear(to, h, self.matrices()[0], *self.biases)

    def matrices(self) -> list[Tensor]:
        return self._matrices

    def exact(self) -> Sequence[Linear]:
        return self.layers

    def tensors(self) -> list[Tensor]:
        return [*self._matrices, *self.biases, *(self.added.tensors() if self.added else ())]


class DenseExperts:
    """gate_up (E, 2 I, hidden) and down (E, hidden, I)."""

    grouped_steps = True  # whether steps of many rows are products grouped by expert

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up: Any = gate_up
        self.down: Any = down
        self.gate_up_bytes = gate_up[0].nbytes  # of one expert
        self.nbytes = gate_up[0].nbytes + down[0].nbytes  # of one expert

    def routed_gate_up(self, x: Tensor, norm: Norm, activation: str, ids: Tensor, out: Tensor, mode: int) -> None:
        kernels.routed_gate_up(x, norm, self.gate_up, ids, out, mode, activation=activation)

    def add_routed(self, h: Tensor, ids: Tensor, shares: Tensor, x: Tensor, mode: int) -> None:
        kernels.add_routed(h, self.down, ids, shares, x, mode)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    exact = matrices


class PackedFormat(WeightFormat):
    prefix = "quantized_"
    adds = False
    # Packed bytes. Unpacking needs the multiprocessors that a waiting successor occupies: int8 at 8b (117 MB) 2.65 ms a token
    # early and 2.43 late. Levels are multiplied as integers since, by fewer registers: 8 layers in int4 (58 MB) 439 us and 451.
    early_bytes = 64 << 20

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.reads = kind, f"{kind} copies of the weights"
        self._versions: WeightVersions | None = None

    def begin(self, model: nn.Module, device: torch.device, on_host: bool) -> None:
        """Prepare to pack the model's current weights on `device`, where they need not be. on_host: store the rounded values
        unpacked, for the CPU's step."""
        again, self.device, self.on_host = self._versions is not None, device, on_host
        self._versions = WeightVersions(model)
        self.dtype = next(model.parameters()).dtype
        if again:
            notice(f"decoder: the weights have changed since they were rounded to {self.kind}: rounded again")
        if on_host:  # unpacking takes longer than a step there, and so do the kernels' references
            notice(
                f"decoder: no kernel reads {self.kind} weights on a CPU: the rounded numbers are kept in full, nothing is saved"
            )

    def changed(self) -> str | None:
        return None if self._versions is None else self._versions.changed()

    def stacked(self, *layers: Linear) -> PackedLinear:
        return PackedLinear(self, layers, [pack_stacked([layer.weight for layer in layers], self.kind, self.device)])

    def gate_up(self, gate: Linear, up: Linear) -> PackedLinear:
        return PackedLinear(self, (gate, up), [pack_gate_up(gate.weight, up.weight, self.kind, self.device)], turns=2)

    def head(self, layer: Linear) -> PackedLinear:
        """Pack the head. It is unpacked for each use, since its scratch would be the largest of all."""
        return PackedLinear(self, [layer], [pack(layer.weight, self.kind, self.device)], shared=False)

    def experts(self, gate_up: Tensor, down: Tensor) -> "PackedExperts":
        return PackedExperts(self, gate_up, down)

    def report(self, kernels: str, read: int, unpacked: int, steps: str) -> list[tuple[str, str, str]]:
        if self.on_host:
            return [("weights", f"rounded to {self.kind}", "kept in full: no kernel reads packed ones on a CPU")]
        return [
            (f"prompts{steps}", f"{kernels}: dequantize, products by torch", f"{self.unpacked} weights unpacked so far"),
            ("weights", self.kind, f"{read / 1e6:,.3g} MB a step, {unpacked / 1e6:,.3g} as they were"),
        ]


class PackedExperts(DenseExperts):
    """gate_up (E, 2 I, hidden) and down (E, hidden, I), each packed as one weight with the experts' rows concatenated."""

    grouped_steps = False  # unpacking every expert costs more bytes than reading the chosen ones' packed bytes row by row

    def __init__(self, form: PackedFormat, gate_up: Tensor, down: Tensor) -> None:
        self.form, self.shapes = form, (gate_up.shape, down.shape)
        self.gate_up, self.down = (pack(stack.flatten(0, 1), form.kind) for stack in (gate_up, down))
        self.gate_up_bytes = self.gate_up.nbytes // len(gate_up)  # of one expert
        self.nbytes = (self.gate_up.nbytes + self.down.nbytes) // len(gate_up)  # of one expert
        self._scratch = [form.scratch(one.rows, one.columns, one.words.device) for one in (self.gate_up, self.down)]

    def matrices(self) -> tuple[Tensor, Tensor]:
        weights = zip((self.gate_up, self.down), self._scratch, self.shapes)
        gate_up, down = (self.form.unpack(weight, to).view(shape) for weight, to, shape in weights)
        return gate_up, down

    def exact(self) -> tuple[Any, Any]:
        return UnpackedExperts(self.gate_up, self.shapes[0]), UnpackedExperts(self.down, self.shapes[1])


class UnpackedExperts:
    """Stacked experts that are unpacked when they are selected: all of a layer in fp32 would be gigabytes."""

    def __init__(self, packed: Packed, shape: torch.Size) -> None:
        self.packed, self.shape = packed, shape

    def index_select(self, dim: int, ids: Tensor) -> Tensor:
        return unpack(self.packed.experts(ids, self.shape[1])).view(len(ids), *self.shape[1:])


FORMATS: dict[str | None, Any] = {None: LiveFormat, **dict.fromkeys(KINDS, PackedFormat)}


def weight_format(kind: str | None) -> LiveFormat | PackedFormat:
    """Return the format of that name; None is the model's own weights."""
    if kind not in FORMATS:
        known = ", ".join(filter(None, FORMATS))
        raise ValueError(f"decoder: weights: got {kind!r}, wanted one of {known}, or None for the live ones.")
    return FORMATS[kind](kind)


class LayerInput(UngatedMLP):
    """Gate, its activation times the layer's input, output."""

    early_bytes = EARLY_BYTES  # 12 layers of Gemma 4 E4B: 1,120 us a step, 1,126 before (H200)

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
        self.product = LiveFormat().stacked(weights.projection)
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
        parts = kernels.norm_rows(parts, w.norm, self._normed[: len(parts)])
        self.workspace.step_inputs[:, : len(x)] = w.of(token, parts.view(len(x), -1)).transpose(0, 1)

    def of_prompt(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return those (B, T, layers, width) of a prompt's tokens with embeddings x (B, T, hidden)."""
        product = F.linear(x, self.product.matrices()[0])
        return self.weights.of(ids, normed(product.unflatten(-1, (-1, self.weights.width)), self.weights.norm))
