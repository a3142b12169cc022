"""How a row-wise kernel is cut into programs: rows a program, programs, warps. The figures come from searches on the GPU (LOG.md)."""

from functools import cache
from typing import NamedTuple

import torch
import triton

from ...device import interpreted, sm_count


class Plan(NamedTuple):
    block: int  # columns, rounded up to a power of two
    rows: int  # rows a program holds at a time
    programs: int
    warps: int


@cache
def schedule(rows: int, cols: int, backward: bool = False) -> Plan:
    """Forward: one visit a row, many programs. Backward: few enough programs that the partial weight gradients stay small.

    H200, 16384 x 1024 bf16: backward with 4 rows, 8 programs a multiprocessor and 2 warps takes 41 us (floor 31); 2 rows, 4 and 8 take 104.
    """
    block = triton.next_power_of_2(cols)
    at_once = max(1, min(4, 4096 // block))
    warps = 8 if block >= 2048 or not backward else 2
    if not backward:
        return Plan(block, at_once, triton.cdiv(rows, at_once), warps)
    multiprocessors = 2 if interpreted() else sm_count(torch.cuda.current_device())
    return Plan(block, at_once, max(1, min(8 * multiprocessors, triton.cdiv(rows, at_once))), warps)


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of `x` seen as a matrix of its last dimension."""
    cols = x.shape[-1]
    return x.numel() // cols if cols else 0, cols
