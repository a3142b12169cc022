"""What the tests of low-rank adapters are made of: sizes, arguments, the definition, and how close two mirrors come."""

import torch
from torch import Tensor

from gpubound.kernels.lora import Drop, Owners

from .cases import TOLERANCE, definitions, draw

reference = definitions("lora")

FP32, BF16 = torch.float32, torch.bfloat16
# Between the mirrors of a whole layer: h and gh, and fp32 adapters, are rounded to 16 bits on the way.
ROUNDED = {dtype: 3 * tolerance for dtype, tolerance in TOLERANCE.items()}
# (rows, inputs, outputs, ranks): one of each; N < O; N > O; N = O; an odd rank; one over a power of two; more than a tile holds
SHAPES = [(1, 1, 1, 1), (20, 48, 70, 16), (70, 33, 20, 3), (40, 40, 40, 1), (17, 64, 24, 13), (9, 40, 16, 130)]


def dropout(device, p: float = 0.4, seed: int = 11, site: int = 2) -> Drop:
    return Drop(p, torch.tensor([seed], device=device), site)


def arguments(shape, dtype, device, adapter=None) -> tuple[Tensor, ...]:
    """(x, weight, bias, a, b)"""
    rows, inputs, outputs, rank = shape
    sizes = ((rows, inputs), (outputs, inputs), (outputs,), (rank, inputs), (outputs, rank))
    drawn = [draw(device, dtype if i < 3 else adapter or dtype, *size, seed=i) for i, size in enumerate(sizes)]
    return drawn[0], drawn[1] / inputs**0.5, drawn[2], drawn[3] / inputs**0.5, drawn[4] / rank**0.5


def routed(device, ids=(1, -1, 0, 9, 1), ranks=(3, 0, 5), dtype=torch.int32) -> Owners:
    """Adapters of these ranks, of which nobody has the second; row 3 asks for one that is not there."""
    owner = [adapter for adapter, rank in enumerate(ranks) for _ in range(rank)]
    scales = draw(device, FP32, len(owner), seed=8)
    return Owners(torch.tensor(ids, device=device, dtype=dtype), torch.tensor(owner, device=device, dtype=torch.int32), scales)
