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

A new format is a subclass of `Frozen`, and a name in FORMATS of lora/base.py.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.nf4 import BLOCK, Nf4, dequantize_nf4, to_nf4
from ..kernels.packed_weights import Packed, pack
from ..kernels.quantize import FINE, MULTIPLE, has_cores, quantize_rows, scaled_product, transpose
from ..kernels.quantized_product import dequantize
from ..kernels.tensor_state import drop_record, made_record
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
        raise NotImplementedError

    def dequantise(self, codes: Tensor, out: Tensor) -> None:
        """Write the dequantised weight into out (O, K)."""
        raise NotImplementedError

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

    def dequantise(self, codes: Tensor, out: Tensor) -> None:
        base = self.base
        dequantize_nf4(Nf4(codes, base.buffer("absmax", torch.uint8), base.buffer("scale"), base.buffer("offset")), out)


class InInt8(Frozen):
    """Integers of -127 to 127, with a bf16 scale for every 128 columns of a row."""

    name, bits, codes = "int8", 8.13, torch.int32

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        packed = pack(weight, "int8")
        return packed.words, {"scale": packed.scale}

    def dequantise(self, codes: Tensor, out: Tensor) -> None:
        dequantize(Packed(codes, self.base.buffer("scale", torch.bfloat16), self.base.shape[1], "int8"), out)


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


class Base(nn.Module):
    """Quantisation scales of a layer's weight, as its child module, so that `.to()`, copies and state_dict include them.

    All buffers are stored as bytes: `.to(torch.bfloat16)` would round floating-point ones.
    """

    like: Tensor
    _layer: tuple[nn.Linear]
    _weight: nn.Parameter
    shape: tuple[int, int]
    kind: type[Frozen]
    rounds_inputs: bool = True  # x and dy, where the format multiplies in fewer bits

    def __init__(self, layer: nn.Linear, kind: type[Frozen]):
        super().__init__()
        weight = layer.weight
        shape = tuple(weight.shape)
        # not as nn.Module sets attributes, which would register them: the layer is this module's parent
        self.__dict__.update(_layer=(layer,), _weight=weight, shape=shape, kind=kind)
        codes, others = kind.encode(weight.detach())
        for name, tensor in others.items():
            if tensor is not codes:
                self.register_buffer(name, tensor.contiguous().view(torch.uint8))
        # has the weight's dtype, which `.to()` changes with the model's
        self.register_buffer("like", torch.empty(0, device=weight.device, dtype=weight.dtype), persistent=False)
        weight.requires_grad_(False)
        weight.grad = None
        weight.data = codes
        layer.add_module(CHILD, self)
        self.register_load_state_dict_post_hook(_reload)
        self.register_state_dict_post_hook(own_storages)  # absmax is a part of a larger memory
        self.attach()

    def buffer(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._buffers[name].view(dtype)  # type: ignore[union-attr]

    @property
    def layer(self) -> nn.Linear:
        return self._layer[0]

    def attach(self) -> None:
        """Set the format in the weight's record. Gathered codes that were sharded as fp32 get the codes' dtype again."""
        record = made_record(self._weight)
        record.format = self.kind(self)
        if record.gathered is not None and record.gathered.dtype != self.kind.codes:
            record.gathered.data = record.gathered.data.view(self.kind.codes)

    def reattach(self) -> None:
        """Move the format to the layer's Parameter, if that was replaced."""
        old, new = self._weight, self.layer.weight
        if old is not new:
            made_record(old).format = None
            drop_record(old)
            self.__dict__.update(_weight=new)
            self.attach()

    @torch.no_grad()
    def dissolve(self, dtype: torch.dtype | None = None) -> None:
        """Dequantise the weight, and remove this module."""
        weight = self._weight
        weight.data = dequantised([weight], dtype or self.like.dtype)
        made_record(weight).format = None
        drop_record(weight)
        del self.layer._modules[CHILD]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.attach()


def _reload(base: Any, keys: Any) -> None:
    """Reattach the format: `load_state_dict(assign=True)` replaces the parameter."""
    base.reattach()
