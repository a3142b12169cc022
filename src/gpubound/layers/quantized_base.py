"""Quantised frozen weights: NF4, int8, and e4m3 with products in 8 bits.

The layer's weight stays a parameter under its name, without a gradient, and holds codes: as many rows as before, several
values to an element. So weights that are multiplied as one stay adjacent, and codes are never taken for values: a product that
ignores the weight's record, or a state_dict of another format, ends in an error. The scales are in the layer's child `base`.

For a product the weights are dequantised in the product's dtype, forward and backward. That memory goes back to the allocator
at once and serves the next product: at any time it holds one product's weights.

In e4m3 there is a scale a row, and x is rounded for each call over a scale a token: y = (x_q W_qᵀ) · s_x · s_W. So is the
gradient g for dx = g W, which sums over W's rows, whose scales g is multiplied by before it is rounded. Tensor cores multiply
8 bits along the rows of both matrices alone, so W is transposed for each dx: a second copy would cost the memory that 8 bits
save.

`InPacked` has the formats of kernels/packed_weights.py: int8, and those in which models are published, which are read as they
are (models/quantized). A decoding step multiplies by every format's codes (`packed`).

A new format is a subclass of `Frozen`, and a name in FORMATS of lora/base.py.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import drop_record, ensure_record
from ..kernels.packed_weights import Packed, pack
from ..kernels.quantize import (
    BLOCK,
    FINE,
    MULTIPLE,
    Nf4,
    absmax_of,
    dequantize_nf4,
    has_cores,
    nf4_code,
    quantize_rows,
    scaled_product,
    to_nf4,
    transpose,
)
from ..kernels.quantized_product import dequantize
from ..trace import fallback
from .fused_weights import own_storages
from .linear_product import Format, Joined, format_of, full_tensor, rows_of, shape_of, size_of

CHILD = "base"  # a quantised layer's child with the scales


class Frozen(Format):
    """Format of a quantised weight. Of several that are multiplied as one, each is dequantised by its own format."""

    name = ""
    bits = 0.0  # of a value, with its part of the scales
    codes = torch.uint8  # dtype of the codes
    reads_input = False
    coded = True

    def __init__(self, base: "Base"):
        self.base = base

    @staticmethod
    def refusal(weight: Tensor) -> str | None:
        """Return why this weight cannot be in this format."""
        return None

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the codes of a matrix, row by row, and its scales by name."""
        raise NotImplementedError  # of a format in which weights are read, and none are rounded

    def packed(self, codes: Tensor) -> Packed:
        """Return the weight as the kernels of a decoding step read it, over the memory of its codes."""
        raise NotImplementedError

    def dequantise(self, codes: Tensor, out: Tensor) -> None:
        """Write the dequantised weight into out (O, K)."""
        dequantize(self.packed(codes), out)

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        return self.base.shape

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, dequantised([weight], x.dtype), bias)

    def forward(self, x: Tensor, joined: Joined) -> tuple[Tensor, Sequence[Tensor]]:
        bias = joined.bias
        return F.linear(x, dequantised(joined.weights, x.dtype), None if bias is None else bias.to(x.dtype)), ()

    def backward(
        self, g: Tensor, x: Tensor | None, saved: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        return g @ dequantised(joined.weights, g.dtype) if wants_dx else None, [None] * len(wanted)


@torch.no_grad()
def dequantised(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return quantised weights as one dense matrix, stacked by rows."""
    rows = [shape_of(weight)[0] for weight in weights]
    out = torch.empty(sum(rows), shape_of(weights[0])[1], device=weights[0].device, dtype=dtype)
    for weight, part in zip(weights, out.split(rows)):
        format: Any = format_of(weight)
        codes = full_tensor(weight.detach())
        format.dequantise(codes if codes.dtype == format.codes else codes.view(format.codes), part)
    return out


class OnlyCodes(nn.Module):
    """A layer whose weights are buffers of codes and no parameters: none of them trains, whatever the layer's forward does."""

    linear = False  # whether the weights are those of one linear layer

    @property
    def size(self) -> int:
        """Return the number of quantised weights."""
        raise NotImplementedError


def numbers_of(model: nn.Module) -> int:
    """Count a model's parameters; a quantised one has fewer elements, or is a buffer."""
    coded = sum(module.size for module in model.modules() if isinstance(module, OnlyCodes))
    return coded + sum(map(size_of, model.parameters()))


class RowsOf(Frozen):
    """Some rows of a quantised weight, as one of the layers that share it."""

    def __init__(self, weight: Tensor, rows: slice):
        self.weight, self.rows = weight, rows
        self.codes = weight.dtype

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        return weight.shape[0], shape_of(self.weight)[1]

    def packed(self, codes: Tensor) -> Packed:
        format: Any = format_of(self.weight)
        return format.packed(self.weight.detach()).part(self.rows)


def some_rows(weight: Tensor, rows: slice) -> Tensor:
    """Return a view of some rows; of a quantised weight one with a format, so that it is read as such."""
    view = weight.detach()[rows]
    if format_of(weight).coded:
        ensure_record(view).format = RowsOf(weight, rows)
    return view


class InNf4(Frozen):
    """NF4 with double quantisation."""

    name, bits = "nf4", 4.13

    @staticmethod
    def refusal(weight: Tensor) -> str | None:
        return f"has {weight.shape[1]} columns, no multiple of {BLOCK}" if weight.shape[1] % BLOCK else None

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        packed = to_nf4(weight)
        return packed.codes, packed._asdict()

    def _nf4(self, codes: Tensor) -> Nf4:
        base = self.base
        return Nf4(codes, base.buffer("absmax"), base.buffer("scale"), base.buffer("offset"))

    def packed(self, codes: Tensor) -> Packed:
        (rows, columns), code = self.base.shape, nf4_code(codes.device)
        return Packed(codes.view(torch.int32), absmax_of(self._nf4(codes)).view(rows, columns // BLOCK), columns, "nf4", code)

    def dequantise(self, codes: Tensor, out: Tensor) -> None:
        dequantize_nf4(self._nf4(codes), out)


class InPacked(Frozen):
    """A kind of kernels/packed_weights.py, of the same name."""

    codes = torch.int32

    @classmethod
    def split(cls, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the codes and the scales of a packed weight, as `encode` does."""
        others = {"extra": packed.extra, "order": packed.order}
        return packed.words, {"scale": packed.scale} | {name: t for name, t in others.items() if t is not None}

    def packed(self, codes: Tensor) -> Packed:
        base = self.base
        extra, order = (base.buffer(name) if name in base.dtypes else None for name in ("extra", "order"))
        return Packed(codes, base.buffer("scale"), base.shape[1], self.name, extra, order)


class InInt8(InPacked):
    """Integers, with a scale for every 128 columns of a row: in bf16 where `encode` made it, of -127 to 127."""

    name, bits = "int8", 8.13

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return InInt8.split(pack(weight, "int8"))


class InFp8(Frozen):
    """Weights in e4m3. On a GPU without 8-bit tensor cores, or for x not in bf16, they are dequantised instead."""

    name, bits, codes = "fp8", 8.01, torch.int32

    @staticmethod
    def refusal(weight: Tensor) -> str | None:
        outputs, inputs = weight.shape
        return f"is {outputs} x {inputs}, no multiples of {MULTIPLE}" if outputs % MULTIPLE or inputs % MULTIPLE else None

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, scale = quantize_rows(weight)
        return q.view(torch.int32), {"scale": scale[:, 0]}

    def dequantise(self, codes: Tensor, out: Tensor) -> None:
        torch.mul(codes.view(FINE).to(out.dtype), self.base.buffer("scale")[:, None], out=out)

    def packed(self, codes: Tensor) -> Packed:
        return Packed(codes, self.base.buffer("scale")[:, None], self.base.shape[1], "fp8_rows")

    def forward(self, x: Tensor, joined: Joined) -> tuple[Tensor, Sequence[Tensor]]:
        if not self._in_8_bits(x, joined):
            return super().forward(x, joined)
        x_q, scale = quantize_rows(rows_of(x))
        y = scaled_product(x_q, joined.weight.view(FINE), scale, _scales(joined)[None], x.dtype, fast=True)
        y = y if joined.bias is None else y.add_(joined.bias)
        return y.view(*x.shape[:-1], -1), ()

    def backward(
        self, g: Tensor, x: Tensor | None, saved: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        if not wants_dx or not self._in_8_bits(g, joined):
            return super().backward(g, x, saved, joined, wants_dx, wanted)
        g_q, scale = quantize_rows(g, _scales(joined))
        w_t = transpose(joined.weight.view(torch.uint8)).view(FINE)
        return scaled_product(g_q, w_t, scale, scale.new_ones(1, len(w_t)), g.dtype), [None] * len(wanted)

    def _in_8_bits(self, x: Tensor, joined: Joined) -> bool:
        formats, why = [format_of(weight) for weight in joined.weights], None
        if not all(type(format) is InFp8 and format.base.rounds_inputs for format in formats):
            return False
        if x.is_cuda and not has_cores(x.device):
            why = "the GPU has no 8-bit tensor cores"
        elif x.is_cuda and x.dtype != torch.bfloat16:
            why = f"with a scale a row the product is in bfloat16, and x is {x.dtype}"
        if why is not None:
            fallback("fp8 base", f"{why}; it is dequantised in {x.dtype}")
        return why is None and x.numel() > 0


def _scales(joined: Joined) -> Tensor:
    """Return (ΣO,) scales of all weights that are multiplied as one."""
    each = [format_of(weight).base.buffer("scale") for weight in joined.weights]  # type: ignore[attr-defined]
    return each[0] if len(each) == 1 else torch.cat(each)


# Bits of a number, with its share of scales and offsets. nf4: any sixteen numbers, of a base in nf4 or fp4.
_BITS = {
    "int8_32": 8.5, "int8_16": 10.0, "uint8": 8.38, "uint8_32": 10.0, "int4": 4.13, "int4_32": 4.5, "uint4": 4.38,
    "uint4_32": 6.0, "fp8_blocks": 8.25, "nf4": 4.5,
}  # fmt: skip
KINDS: dict[str, type[Frozen]] = {"int8": InInt8} | {
    name: type(f"In_{name}", (InPacked,), {"name": name, "bits": bits}) for name, bits in _BITS.items()
}
"""Formats by the kind of packed weights that they are."""


class Base(nn.Module):
    """Quantisation scales of a layer's weight, as its child module, so that `.to()`, copies and state_dict include them.

    All buffers are stored as bytes: `.to(torch.bfloat16)` would round floating-point ones.
    """

    like: Tensor
    _layer: tuple[nn.Linear]
    _weight: nn.Parameter
    shape: tuple[int, int]
    kind: type[Frozen]
    dtypes: dict[str, torch.dtype]  # of the buffers
    rounds_inputs: bool = True  # x and dy, where the format multiplies in fewer bits

    def __init__(
        self, layer: nn.Linear, kind: type[Frozen], encoded: tuple[Tensor, dict[str, Tensor]] | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        """encoded: codes and scales of a layer on the meta device, as they were published; dtype: the model's"""
        super().__init__()
        weight, shape = layer.weight, tuple(layer.weight.shape)
        codes, others = kind.encode(weight.detach()) if encoded is None else encoded
        if encoded is not None:
            weight = layer.weight = nn.Parameter(codes, requires_grad=False)
        dtypes = {name: tensor.dtype for name, tensor in others.items() if tensor is not codes}
        # not as nn.Module sets attributes, which would register them: the layer is this module's parent
        self.__dict__.update(_layer=(layer,), _weight=weight, shape=shape, kind=kind, dtypes=dtypes)
        for name in dtypes:
            tensor = others[name].contiguous()
            if tensor.shape[-1:] == (1,):  # a transposed row is contiguous with the row's stride, which no view takes
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            self.register_buffer(name, tensor.view(torch.uint8))
        # has the weight's dtype, which `.to()` changes with the model's
        self.register_buffer("like", torch.empty(0, device=codes.device, dtype=dtype or weight.dtype), persistent=False)
        weight.requires_grad_(False)
        weight.grad = None
        weight.data = codes
        layer.add_module(CHILD, self)
        self.register_load_state_dict_post_hook(_reload)
        self.register_state_dict_post_hook(own_storages)  # absmax is a part of a larger memory
        self.attach()

    def buffer(self, name: str) -> Tensor:
        return self._buffers[name].view(self.dtypes[name])  # type: ignore[union-attr]

    @property
    def layer(self) -> nn.Linear:
        return self._layer[0]

    def attach(self) -> None:
        """Set the format in the weight's record. Gathered codes that were sharded as fp32 get the codes' dtype again."""
        record = ensure_record(self._weight)
        record.format = self.kind(self)
        if record.gathered is not None and record.gathered.dtype != self.kind.codes:
            record.gathered.data = record.gathered.data.view(self.kind.codes)

    def reattach(self) -> None:
        """Move the format to the layer's Parameter, if that was replaced."""
        old, new = self._weight, self.layer.weight
        if old is not new:
            ensure_record(old).format = None
            drop_record(old)
            self.__dict__.update(_weight=new)
            self.attach()

    @torch.no_grad()
    def dissolve(self, dtype: torch.dtype | None = None) -> None:
        """Dequantise the weight, and remove this module."""
        weight = self._weight
        weight.data = dequantised([weight], dtype or self.like.dtype)
        ensure_record(weight).format = None
        drop_record(weight)
        del self.layer._modules[CHILD]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.attach()


def _reload(base: Any, keys: Any) -> None:
    """Reattach the format: `load_state_dict(assign=True)` replaces the parameter."""
    base.reattach()
