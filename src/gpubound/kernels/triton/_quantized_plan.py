"""How a product over a packed weight is cut into programs: rows of the weight a program, words of a row a tile, warps."""

from typing import NamedTuple

from torch import Tensor

from ..packed import Packed
from ._launch import power_of_two

LANE_WORDS = 4  # of a row that a thread reads at once: 16 bytes
WARPS = 4
# Of a tile, that a thread holds. Each row of x wants as many registers again for its products.
THREAD_WORDS = {"add": 32, "qkv": 32, "gate_up": 64, "head": 64}


class QuantizedPlan(NamedTuple):
    rows: int
    words: int
    warps: int

    def grid(self, weight: Packed, x: Tensor) -> tuple[int, int]:
        return x.shape[0] // at_once(x), -(-weight.rows // self.rows)

    def shape(self, weight: Packed, x: Tensor) -> tuple:
        """B, K, KIND, R, C, WHOLE of the kernels."""
        whole = weight.rows % self.rows == 0 and weight.words.shape[1] % self.words == 0
        return at_once(x), weight.columns, weight.kind, self.rows, self.words, whole


def at_once(x: Tensor) -> int:
    """Rows of x that a program multiplies."""
    return 2 if x.shape[0] % 2 == 0 else 1


# (kind, use, rows, columns) -> (rows a program, words a tile, warps), where a search of whole steps on an H200 found
# better than the rule (LOG.md).
SEARCHED: dict[tuple[str, str, int, int], tuple[int, int, int]] = {
    ("int4", "qkv", 6144, 4096): (16, 512, 4),
    ("int4", "add", 4096, 14336): (8, 256, 2),
    ("int8", "qkv", 6144, 4096): (4, 512, 4),
    ("int8", "gate_up", 28672, 4096): (8, 512, 4),
    ("int8", "head", 128256, 4096): (16, 256, 2),
    ("fp8", "qkv", 6144, 4096): (4, 512, 4),
    ("fp8", "add", 4096, 14336): (4, 512, 4),
}


def plan_quantized(use: str, weight: Packed) -> QuantizedPlan:
    """The plan of a product; `use` is qkv, add, gate_up or head.

    All warps lie along a row, whatever the number of rows, so that its sum is added up in one order in any batch.
    """
    if (found := SEARCHED.get((weight.kind, use, weight.rows, weight.columns))) is not None:
        return QuantizedPlan(*found)
    held = weight.words.shape[1]
    warps = min(WARPS, power_of_two(-(-held // (32 * LANE_WORDS))))
    while held % (32 * LANE_WORDS * warps) and warps > 1:
        warps //= 2
    return QuantizedPlan(THREAD_WORDS[use] // LANE_WORDS, 32 * LANE_WORDS * warps, warps)
