"""How a decoding product is cut into programs: rows of the weight a program, columns a tile, warps.

A step of a small model is launches and latency, not bandwidth: a program should ask for all of its weights at once, before it
waits for x, and one wave of programs should hold the whole weight in registers.
"""

from typing import NamedTuple

from torch import Tensor

from ._launch import power_of_two

THREAD_ELEMENTS = 64  # of the tiles a program holds, a thread
WARPS = 4
ROUTERS = 64  # programs over which the few rows of a router are spread


class ProductPlan(NamedTuple):
    rows: int
    columns: int
    warps: int

    def grid(self, rows: int) -> tuple[int]:
        return (-(-rows // self.rows),)

    def shape(self, x: Tensor) -> tuple[int, int, int, int]:
        """B, K, R, BK of the kernels."""
        return x.shape[0], x.shape[1], self.rows, self.columns

    def whole(self, rows: int, columns: int) -> bool:
        return rows % self.rows == 0 and columns % self.columns == 0


# (kind, rows, columns) -> (rows a program, columns a tile, warps) for 16-bit weights: what a search of whole steps on an H200
# found better than the rule (LOG.md): 135m 358 us a step against 424, 350m 399 / 426, 1b 737 / 777, 8b 3,771 / 4,018.
SEARCHED: dict[tuple[str, int, int], tuple[int, int, int]] = {
    ("qkv", 960, 576): (4, 1024, 4),
    ("add", 576, 576): (1, 1024, 4),
    ("gate_up", 1536, 576): (2, 1024, 8),
    ("add", 576, 1536): (1, 2048, 8),
    ("head", 49152, 576): (16, 1024, 4),
    ("add", 1024, 1024): (2, 1024, 4),
    ("gate_up", 4096, 1024): (2, 512, 2),
    ("qkv", 3072, 2048): (4, 2048, 2),
    ("add", 2048, 2048): (4, 1024, 4),
    ("gate_up", 8192, 2048): (4, 512, 2),
    ("add", 2048, 8192): (4, 4096, 4),
    ("qkv", 6144, 4096): (8, 512, 4),
    ("add", 4096, 4096): (4, 512, 2),
    ("gate_up", 14336, 4096): (2, 2048, 4),
    ("add", 4096, 14336): (2, 2048, 4),
    ("head", 128256, 4096): (16, 256, 4),
}


def plan_product(kind: str, rows: int, columns: int, weight: Tensor, parts: tuple[int, ...]) -> ProductPlan:
    """The plan of a product with a (rows, columns) weight whose `parts` lie apart: no program may span two of them."""
    if (kind, rows, columns) in SEARCHED and weight.element_size() == 2:
        return ProductPlan(*SEARCHED[kind, rows, columns])
    if kind == "head":  # its height is the stretch that a partial maximum stands for
        return ProductPlan(16, min(512, power_of_two(columns)), WARPS)
    tile = min(power_of_two(columns), 4096 if weight.element_size() <= 2 else 2048)
    most = THREAD_ELEMENTS * 32 * WARPS // tile // (2 if kind.endswith("gate_up") else 1)
    if kind == "router":
        most = min(most, power_of_two(rows) // ROUTERS)
    height = max(1, min(16, most))
    while any(part % height for part in parts) and height > 1 and len(parts) > 1:
        height //= 2
    return ProductPlan(height, tile, WARPS)
