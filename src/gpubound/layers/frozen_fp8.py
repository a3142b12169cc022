"""Frozen weights in e4m3, multiplied in 8 bits: rounded once, with a scale a row.

x is rounded for each call over a scale a token: y = (x_q W_qᵀ) · s_x · s_W. So is the gradient g for dx = g W. That sums over
W's rows, whose scales g takes in before it is rounded. Nothing is kept from step to step, and no weight gradient is made.

Tensor cores multiply 8 bits along the rows of both matrices alone. So W is transposed for each dx: a second copy that stays
would take the memory that 8 bits save.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.quantize import FINE, MULTIPLE, has_cores, quantize_rows, scaled_product, transpose
from ..trace import fallback
from .linear_formats import Joined, format_of, rows_of
from .quantized_base import Frozen


class InFp8(Frozen):
    """On a GPU without 8-bit tensor cores, or for x not in bf16, the numbers are written out instead."""

    name, bits, codes = "fp8", 8.01, torch.int32

    @staticmethod
    def refusal(weight: Tensor) -> str | None:
        outputs, inputs = weight.shape
        return f"is {outputs} x {inputs}, no multiples of {MULTIPLE}" if outputs % MULTIPLE or inputs % MULTIPLE else None

    @staticmethod
    def encode(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, scale = quantize_rows(weight)
        return q.view(torch.int32), {"scale": scale[:, 0]}

    def write(self, codes: Tensor, out: Tensor) -> None:
        torch.mul(codes.view(FINE).to(out.dtype), self.base.numbers("scale")[:, None], out=out)

    def evaluate(self, x: Tensor, joined: Joined) -> Tensor:
        if not self._in_8_bits(x, joined):
            return super().evaluate(x, joined)
        x_q, scale = quantize_rows(rows_of(x))
        y = scaled_product(x_q, joined.weight.view(FINE), scale, _scales(joined)[None], x.dtype, fast=True)
        y = y if joined.bias is None else y.add_(joined.bias)
        return y.view(*x.shape[:-1], -1)

    def backward(
        self, g: Tensor, x: Tensor | None, kept: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        if not wants_dx or not self._in_8_bits(g, joined):
            return super().backward(g, x, kept, joined, wants_dx, wanted)
        g_q, scale = quantize_rows(g, _scales(joined))
        turned = transpose(joined.weight.view(torch.uint8)).view(FINE)
        return scaled_product(g_q, turned, scale, scale.new_ones(1, len(turned)), g.dtype), [None] * len(wanted)

    def _in_8_bits(self, x: Tensor, joined: Joined) -> bool:
        formats, why = [format_of(weight) for weight in joined.weights], None
        if not all(type(format) is InFp8 and format.base.rounds for format in formats):
            return False
        if x.is_cuda and not has_cores(x.device):
            why = "the GPU has no 8-bit tensor cores"
        elif x.is_cuda and x.dtype != torch.bfloat16:
            why = f"with a scale a row the product is in bfloat16, and x is {x.dtype}"
        if why is not None:
            fallback("fp8 base", f"{why}; its numbers are written out in {x.dtype}")
        return why is None and x.numel() > 0


def _scales(joined: Joined) -> Tensor:
    """(ΣO,) of all weights that are multiplied as one."""
    each = [format_of(weight).base.numbers("scale") for weight in joined.weights]  # type: ignore[attr-defined]
    return each[0] if len(each) == 1 else torch.cat(each)
