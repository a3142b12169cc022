"""Weights in 4 bits, in the format of bitsandbytes' NF4 with double quantisation (QLoRA, arXiv 2305.14314).

codes    two numbers a byte, the first in its upper half: places in CODE, sixteen quantiles of a normal distribution
absmax   the largest magnitude of every 64 numbers, which theirs are multiples of: 8 bits, places in `dynamic_code`
scale    what every 256 of absmax are multiples of, fp32
offset   the mean of all of them, which was taken off before they were rounded, fp32

A number is CODE[code] · (dynamic_code[absmax] · scale + offset). That is 4.13 bits a number. Blocks go on from row to row, so a
weight whose rows are whole blocks may be split and joined by rows.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import constant
from .dispatch import implementation, require
from .registry import definition, draw, frozen

CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # numbers that share an absmax
GROUP = 256  # of absmax, that share a scale
CHUNK = 1 << 24  # numbers widened at a time


class Nf4(NamedTuple):
    """A matrix. codes (rows, columns / 2) and absmax (blocks,) are uint8, scale (groups,) and offset (1,) fp32."""

    codes: Tensor
    absmax: Tensor
    scale: Tensor
    offset: Tensor


@torch.no_grad()
def to_nf4(weight: Tensor) -> Nf4:
    """Round a matrix whose rows are whole blocks. A part at a time is wide in memory."""
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel() or weight.shape[1] % BLOCK:
        raise ValueError(
            f"to_nf4: weight: got {weight.dtype} {tuple(weight.shape)}, wanted a floating-point matrix whose columns are a "
            f"multiple of {BLOCK}."
        )
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, device=weight.device, dtype=torch.uint8)
    largest = torch.empty(rows, columns // BLOCK, device=weight.device, dtype=torch.float32)
    borders = _borders(nf4_code(weight.device))
    for part, into, most in zip(*(t.split(max(1, CHUNK // columns)) for t in (weight, codes, largest))):
        blocks = part.float().unflatten(1, (-1, BLOCK))
        most.copy_(blocks.abs().amax(2))
        of_most = blocks * most.reciprocal()[..., None]
        positions = torch.bucketize(of_most.nan_to_num_(0.0, 0.0, 0.0), borders, out_int32=True).to(torch.uint8)
        upper, lower = positions.view(-1, 2).unbind(1)
        into.copy_((upper << 4 | lower).view(into.shape))
    return Nf4(codes, *_to_8_bits(largest.flatten()))


def _to_8_bits(largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """absmax, its scale and its offset."""
    offset = largest.mean().view(1)
    groups = torch.nn.functional.pad(largest - offset, (0, -len(largest) % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(1)
    of_scale = (groups * scale.reciprocal()[:, None]).nan_to_num_(0.0, 0.0, 0.0)
    positions = torch.bucketize(of_scale, _borders(dynamic_code(largest.device)))
    return positions.to(torch.uint8).flatten()[: len(largest)].contiguous(), scale, offset


def _borders(code: Tensor) -> Tensor:
    """Midpoints between the values of a code. A midpoint itself is rounded down, as in bitsandbytes."""
    return ((code[1:].double() + code[:-1].double()) / 2).float()


@constant
def nf4_code(device: torch.device) -> Tensor:
    return _on(device)[0]


@constant
def dynamic_code(device: torch.device) -> Tensor:
    """bitsandbytes' 256 signed numbers: seven decades, of which each holds twice as many as the one below it; zero, and one."""
    return _on(device)[1]


@cache
def _on(device: torch.device) -> tuple[Tensor, Tensor]:
    means = []
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        means.append(10.0 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2))
    positive = torch.cat(means)
    dynamic = torch.cat([positive, -positive, torch.tensor([0.0, 1.0], device="cpu", dtype=torch.float32)]).sort().values
    return torch.tensor(CODE, device="cpu", dtype=torch.float32).to(device), dynamic.to(device)


def absmax_of(weight: Nf4) -> Tensor:
    """Return the largest magnitude of every block, dequantised to fp32."""
    groups = weight.scale.repeat_interleave(GROUP)[: len(weight.absmax)]
    return dynamic_code(weight.absmax.device)[weight.absmax.int()] * groups + weight.offset


def dequantize_nf4(weight: Nf4, out: Tensor) -> Tensor:
    """out (rows, columns) = the dequantised `weight`, rounded to out's dtype."""
    _check("dequantize_nf4", weight, out)
    return implementation("dequantize_nf4", out)(weight, out)


@definition(lambda g: (to_nf4(draw(g, 9, 64 * 31).detach()), frozen(draw(g, 9, 64 * 31))))
@torch.no_grad()
def dequantize_nf4_reference(weight: Nf4, out: Tensor) -> Tensor:
    codes, largest = weight.codes, absmax_of(weight)
    numbers = nf4_code(out.device)[torch.stack((codes >> 4, codes & 15), 2).int()]
    return out.copy_((numbers.view(-1, BLOCK) * largest[:, None]).view(out.shape))


def _check(op: str, weight: Nf4, out: Tensor) -> None:
    device = weight.codes.device
    require(op, "codes", weight.codes, torch.uint8, ("rows", "columns / 2"), device)
    rows, columns = weight.codes.shape[0], 2 * weight.codes.shape[1]
    if columns % BLOCK:
        raise ValueError(f"{op}: codes: got {columns} columns, wanted a multiple of {BLOCK}; make them with to_nf4.")
    blocks = rows * columns // BLOCK
    require(op, "absmax", weight.absmax, torch.uint8, (blocks,), device)
    require(op, "scale", weight.scale, torch.float32, (-(-blocks // GROUP),), device)
    require(op, "offset", weight.offset, torch.float32, (1,), device)
    require(op, "out", out, None, (rows, columns), device, "it is written")
