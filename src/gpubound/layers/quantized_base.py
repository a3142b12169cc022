"""Frozen weights in codes, with fewer bits than a weight needs that trains.

The layer's weight stays a parameter under its name, without a gradient, and holds codes: as many rows as before, several
numbers to an element. So weights that are multiplied as one still lie one behind the other, and nothing takes codes for
numbers: a product that does not ask the weight's record, or a state_dict of another format, ends in an error. What else the
numbers are made of is the layer's child `base`.

For a product the numbers are written out in the product's dtype, forward and backward. That memory goes back to the allocator
at once and serves the next product: at any time it holds one product's weights.

A format is a class here or in a file of its own, and named in FORMATS of lora/base.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.nf4 import BLOCK, Nf4, dequantize_nf4, to_nf4
from ..kernels.packed_weights import Packed, pack
from ..kernels.quantized_product import dequantize
from ..kernels.tensor_state import drop_record, made_record
from .linear_formats import Format, Joined, format_of, shape_of, size_of, whole
from .state_dict_storage import own_storages

CHILD = "base"  # what a layer calls what its codes are read by


class Frozen(Format):
    """The format of one weight in codes. Of several that are multiplied as one, each writes out its own numbers."""

    name = ""
    bits = 0.0  # of a number, with what the codes are read by
    codes = torch.uint8  # what holds them
    reads_input = False
    coded = True

    def __init__(self, base: "Base"):
        self.base = base

    @staticmethod
    def refusal(weight: Tensor) -> str | None:
        """Why this weight cannot be in this format."""
        return None

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The codes of a matrix, row by row, and by name what else its numbers are made of."""
        raise NotImplementedError

    def write(self, codes: Tensor, out: Tensor) -> None:
        """out (O, K) = the dequantised weight."""
        raise NotImplementedError

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        return self.base.shape

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, written([weight], x.dtype), bias)

    def evaluate(self, x: Tensor, joined: Joined) -> Tensor:
        bias = joined.bias
        return F.linear(x, written(joined.weights, x.dtype), None if bias is None else bias.to(x.dtype))

    def backward(
        self, g: Tensor, x: Tensor | None, kept: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        return g @ written(joined.weights, g.dtype) if wants_dx else None, [None] * len(wanted)


@torch.no_grad()
def written(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of weights in codes, one below the other."""
    rows = [shape_of(weight)[0] for weight in weights]
    out = torch.empty(sum(rows), shape_of(weights[0])[1], device=weights[0].device, dtype=dtype)
    for weight, part in zip(weights, out.split(rows)):
        format: Any = format_of(weight)
        codes = whole(weight.detach())
        format.write(codes if codes.dtype == format.codes else codes.view(format.codes), part)
    return out


class OnlyCodes(nn.Module):
    """A layer whose weights are buffers of codes and no parameters: none of them trains, whatever the layer's forward does."""

    linear = False  # whether it is of one linear layer

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
        made = to_nf4(weight)
        return made.codes, made._asdict()

    def write(self, codes: Tensor, out: Tensor) -> None:
        base = self.base
        dequantize_nf4(Nf4(codes, base.numbers("absmax", torch.uint8), base.numbers("scale"), base.numbers("offset")), out)


class InInt8(Frozen):
    """255 levels of a bf16 scale for every 128 columns of a row."""

    name, bits, codes = "int8", 8.13, torch.int32

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        made = pack(weight, "int8")
        return made.words, {"scale": made.scale}

    def write(self, codes: Tensor, out: Tensor) -> None:
        dequantize(Packed(codes, self.base.numbers("scale", torch.bfloat16), self.base.shape[1], "int8"), out)


class Base(nn.Module):
    """Quantisation scales of a layer's weight, as its child module, so that `.to()`, copies and state_dict include them.

    Its buffers are bytes, whatever they mean: `.to(torch.bfloat16)` rounds every floating-point number that it finds.
    """

    like: Tensor
    _layer: tuple[nn.Linear]
    _weight: nn.Parameter
    shape: tuple[int, int]
    kind: type[Frozen]
    rounds: bool = True  # x and dy, too, where the format multiplies in fewer bits

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
        # of the weight's dtype, which `.to()` changes with the model's
        self.register_buffer("like", torch.empty(0, device=weight.device, dtype=weight.dtype), persistent=False)
        weight.requires_grad_(False)
        weight.grad = None
        weight.data = codes
        layer.add_module(CHILD, self)
        self.register_load_state_dict_post_hook(_reload)
        self.register_state_dict_post_hook(own_storages)  # absmax is a part of a larger memory
        self.hang()

    def numbers(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._buffers[name].view(dtype)  # type: ignore[union-attr]

    @property
    def layer(self) -> nn.Linear:
        return self._layer[0]

    def hang(self) -> None:
        """Restore codes that were sharded as fp32 values of the same bits after they are gathered."""
        record = made_record(self._weight)
        record.format = self.kind(self)
        if record.gathered is not None and record.gathered.dtype != self.kind.codes:
            record.gathered.data = record.gathered.data.view(self.kind.codes)

    def hang_anew(self) -> None:
        """The layer may have another Parameter than the one that has the format."""
        old, new = self._weight, self.layer.weight
        if old is not new:
            made_record(old).format = None
            drop_record(old)
            self.__dict__.update(_weight=new)
            self.hang()

    @torch.no_grad()
    def dissolve(self, dtype: torch.dtype | None = None) -> None:
        """The weight as numbers again."""
        weight = self._weight
        numbers = written([weight], dtype or self.like.dtype)
        weight.data = numbers
        made_record(weight).format = None
        drop_record(weight)
        del self.layer._modules[CHILD]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's weight has no record yet."""
        super().__setstate__(state)
        self.hang()


@contextmanager
def by_numbers(model: nn.Module) -> Iterator[None]:
    """Inside, every product uses dequantised weights and rounds nothing else, for verification."""
    before = [(module, module.rounds) for module in model.modules() if isinstance(module, Base)]
    try:
        for base, _ in before:
            base.rounds = False
        yield
    finally:
        for base, rounds in before:
            base.rounds = rounds


def _reload(base: Any, keys: Any) -> None:
    """`load_state_dict(assign=True)` puts another parameter in the place of the one that has the format."""
    base.hang_anew()
