"""How a row-wise kernel is cut into programs. The figures come from searches on the GPU (benchmarks/tune_norms.py, LOG.md).

Forward, a program visits one tile of rows. Backward, a fixed crowd of programs strides over the rows. Each sums its own part of
the weight gradient and writes it once; a sum over the programs follows (_sums.py). The same bits in every run, which atomics
do not give.

A program that strides waits for memory and computes by turns. `stages` above 1 makes the compiler copy that many tiles, less
one, into shared memory ahead of their turn, so that both go on at once.
"""

from math import prod
from typing import NamedTuple

import torch

from ...device import constant, sm_count

# Rows of a forward tile. H200, 16384 x 4096 bf16: layer_norm takes 68.7 us with two (copying as much: 69.0), 70.2 with one.
TILE_ROWS = 2
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
    stages: int = 1  # tiles in flight, this one counted
    hint: str = ""  # eviction policy of what is read once

    def grid(self, rows: int) -> tuple[int]:
        tiles = -(-rows // self.rows)
        return (min(self.programs, tiles) if self.programs else tiles,)


# Plans that a search found better than the rules below: (op, way, block) -> (rows, programs a multiprocessor, warps, stages,
# hint); 0 programs: one a tile. A line is printed by `python -m benchmarks.tune_norms` as it stands here.
SEARCHED: dict[tuple[str, str, int], tuple[int, int, int, int, str]] = {
    ("rms_norm", "forward", 1024): (4, 8, 2, 3, ""),
    ("rms_norm", "forward", 4096): (1, 0, 4, 1, ""),
    ("rms_norm", "backward", 1024): (2, 2, 4, 4, ""),
    ("rms_norm", "backward", 2048): (4, 2, 4, 1, ""),
    ("rms_norm", "backward", 4096): (2, 1, 8, 3, ""),
    ("rms_norm", "backward", 8192): (2, 1, 8, 1, ""),
    ("add_rms_norm", "forward", 1024): (2, 8, 2, 3, ""),
    ("add_rms_norm", "forward", 4096): (2, 0, 4, 1, ""),
    ("add_rms_norm", "backward", 1024): (2, 2, 2, 4, ""),
    ("add_rms_norm", "backward", 2048): (4, 2, 4, 1, ""),
    ("add_rms_norm", "backward", 4096): (2, 1, 16, 3, ""),
    ("add_rms_norm", "backward", 8192): (2, 1, 8, 1, ""),
    ("layer_norm", "forward", 1024): (2, 0, 2, 1, "evict_first"),
    ("layer_norm", "forward", 4096): (4, 0, 8, 1, ""),
    ("layer_norm", "backward", 1024): (2, 2, 2, 4, ""),
    ("layer_norm", "backward", 4096): (2, 1, 8, 3, "evict_first"),
    ("dynamic_tanh", "forward", 1024): (1, 0, 4, 1, "evict_first"),
    ("dynamic_tanh", "forward", 4096): (2, 0, 16, 1, ""),
    ("dynamic_tanh", "backward", 1024): (4, 2, 4, 3, "evict_first"),
    ("dynamic_tanh", "backward", 4096): (2, 1, 16, 3, "evict_first"),
}

# (op, way, columns) -> Plan: what a tuning script or a user knows better than `schedule`.
OVERRIDE: dict[tuple[str, str, int], Plan] = {}


def schedule(op: str, way: str, cols: int, device: torch.device, sums: int = 1) -> Plan:
    """The plan for rows of `cols` elements on `device`; `way` is forward or backward, `sums` how many gradients of the row's
    width the backward sums.

    H200, backward at 16384 x 1024 bf16 with the residual's gradient: 4 rows, 8 programs a multiprocessor and 2 warps take 41 us
    (floor 31); 2 rows, 4 programs and 8 warps 104 us; the worst choice tried 856. A thread loads 8 neighbours, so 2 warps lie
    along 512 of the 1024 columns and summing a column over the tile's rows stays inside a thread; 8 warps lie in two rows.
    """
    if (plan := OVERRIDE.get((op, way, cols))) is not None:
        return plan
    block = power_of_two(cols)
    crowd = multiprocessors(device)
    if (op, way, block) in SEARCHED:
        rows, each, warps, stages, hint = SEARCHED[op, way, block]
        return Plan(block, rows, each * crowd, warps, stages, hint)
    if way == "forward":
        rows = max(1, min(TILE_ROWS, WIDEST_TILE // block))
        return Plan(block, rows, 0, max(1, min(16, block // 512)))
    warps = max(1, min(block // 512, 4), min(block // 1024, 16))
    rows = max(1, min(BACKWARD_TILE, THREAD_ELEMENTS * 32 * warps) // max(1, sums) // block)
    fits = PARTIAL_BYTES // (4 * cols * max(1, sums) * crowd)
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
            f"call gpubound.kernels.reference({op!r}) where one is needed."
        )
