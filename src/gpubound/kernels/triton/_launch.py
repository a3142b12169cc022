"""How a row-wise kernel is cut into programs. The figures come from searches on the GPU (benchmarks/tune_norms.py, LOG.md).

Forward, a program visits one tile of rows. Backward, a fixed crowd of programs strides over the rows. Each sums its own part of
the weight gradient and writes it once; a sum over the programs follows. The same bits in every run, which atomics do not give.
"""

from math import prod
from typing import NamedTuple

import torch

from ...device import constant, sm_count

# Rows of a forward tile. H200, 16384 x 4096 bf16: layer_norm takes 68.7 us with two (copying as much: 69.0), 70.2 with one;
# dynamic_tanh, bound by arithmetic, 75.6 us with four and 32 elements a thread, 81.3 with one.
TILE_ROWS = 2
HEAVY_ROWS = 4
WIDEST_TILE = 16384

# What a backward holds. A thread has 64 elements of each tensor of the tile, half of them if it sums two gradients: so compiled
# for compute capability 9.0, rms_norm takes 250 to 254 of 255 registers and layer_norm 160 to 240, up to a width of 8192. More
# spills. 16384 elements a tile because 256 threads of that kind are all that a multiprocessor's registers serve.
THREAD_ELEMENTS = 64
BACKWARD_TILE = 16384

# What all programs together may hold of partial weight gradients. They are written and read once more, from the L2 where they
# fit (50 MB on an H200): 1056 programs at width 4096 would make 17 MB each way, beside 537 MB for 16384 rows of bf16; at width
# 1024, 4.3 MB.
PARTIAL_BYTES = 10 << 20

# Widest row that one program holds whole; the doors give wider ones to the reference. At 16384 the backward's four fp32 rows
# (dy, x, weight, sum) are as many as a multiprocessor's 65536 registers: from there on they spill, which is slow but right.
WIDEST = 65536


class Plan(NamedTuple):
    block: int  # columns of a tile: the width rounded up to a power of two
    rows: int  # rows of a tile
    programs: int  # at most this many programs, each striding over the rows; 0: as many as there are tiles
    warps: int

    def grid(self, rows: int) -> tuple[int]:
        tiles = -(-rows // self.rows)
        return (min(self.programs, tiles) if self.programs else tiles,)


# Backward plans that a search found better than the rule below: (block, gradients of the row's width) -> (rows, programs a
# multiprocessor, warps). H200, 16384 rows of bf16: add_rms_norm 75.5, 137 and 284 us against the rule's 79.9, 193 and 292;
# dynamic_tanh 49.4 and 136 us.
SEARCHED = {(2048, 1): (4, 2, 4), (4096, 1): (4, 1, 16), (8192, 1): (2, 1, 8), (1024, 2): (2, 4, 4), (4096, 2): (2, 1, 16)}

# (columns, backward) -> Plan: what a tuning script or a user knows better than `schedule`.
OVERRIDE: dict[tuple[int, bool], Plan] = {}


def schedule(cols: int, device: torch.device, backward: bool = False, sums: int = 1, heavy: bool = False) -> Plan:
    """The plan for rows of `cols` elements on `device`; `sums` is how many gradients of the row's width the backward sums,
    `heavy` says that the forward is bound by arithmetic.

    H200, backward at 16384 x 1024 bf16 with the residual's gradient: 4 rows, 8 programs a multiprocessor and 2 warps take 41 us
    (floor 31); 2 rows, 4 programs and 8 warps 104 us; the worst choice tried 856. A thread loads 8 neighbours, so 2 warps lie
    along 512 of the 1024 columns and summing a column over the tile's rows stays inside a thread; 8 warps lie in two rows.
    """
    if (plan := OVERRIDE.get((cols, backward))) is not None:
        return plan
    block = power_of_two(cols)
    if not backward:
        rows = max(1, min(HEAVY_ROWS if heavy else TILE_ROWS, WIDEST_TILE // block))
        return Plan(block, rows, 0, max(1, min(16, block // (256 if heavy else 512))))
    crowd = multiprocessors(device)
    if (block, sums) in SEARCHED:
        rows, each, warps = SEARCHED[block, sums]
        return Plan(block, rows, each * crowd, warps)
    warps = max(1, min(block // 512, 4), min(block // 1024, 16))
    rows = max(1, min(BACKWARD_TILE, THREAD_ELEMENTS * 32 * warps) // sums // block)
    fits = PARTIAL_BYTES // (4 * cols * sums * crowd)
    return Plan(block, rows, crowd * max(1, min(8, fits)), warps)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


@constant
def multiprocessors(device: torch.device) -> int:
    return sm_count(device.index) if device.type == "cuda" else 2  # the interpreter runs programs one by one


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of `x` seen as a matrix of its last dimension."""
    return prod(x.shape[:-1]), x.shape[-1]


def first_order_only(op: str) -> None:
    """Called by every backward: under create_graph its result would silently count as a constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{op}: its kernel has no second derivative (create_graph=True); "
            f"call gpubound.kernels.reference's {op} where one is needed."
        )
