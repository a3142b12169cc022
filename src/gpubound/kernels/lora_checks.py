"""Argument checks of the ops of lora.py. All shapes follow from the first argument's and the rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import require, require_device
from .hash_dropout import Drop

BLOCKS, BLOCK = 3, 16  # an op takes at most 3 blocks; each has a multiple of 16 outputs
# Of one call, at most. Programs share sums where a GPU has more multiprocessors than there are tiles of columns, each of which
# may have up to four tiles of ranks.
SHARED_SUMS = 2048


def check_matrices(op: str, x: Tensor, **others: tuple[Tensor | None, tuple[int | str, ...]]) -> None:
    """Check that x is a float matrix and each of the others a float tensor on its device. A name in a shape is any size."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{op}: its first argument must be a floating-point matrix, got {x.dtype} {tuple(x.shape)}; reshape it."
        )
    for name, (t, shape) in others.items():
        if t is None:
            continue
        fits = t.dim() == len(shape) and all(
            got > 0 if isinstance(want, str) else got == want for want, got in zip(shape, t.shape)
        )
        if not fits or not t.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be a floating-point tensor ({', '.join(map(str, shape))}), got {t.dtype} {tuple(t.shape)}; "
                f"its sizes follow from the first argument and the rank."
            )
        require_device(op, name, t, x)


def check_drop(op: str, drop: Drop | None, x: Tensor) -> None:
    if drop is not None:
        require(op, "drop.seed", drop.seed, torch.int64, (1,), x.device, "make it once, and write each step's seed into it")


def as_in_memory(t: Tensor | None, rows: int, columns: int) -> tuple[Tensor | None, tuple[int, int]]:
    """The matrix and its shape, transposed where its columns are the rows in memory, as those of several b side by side are."""
    turned = t is not None and t.dim() == 2 and t.stride(0) == 1 < t.stride(1)
    return (t.t(), (columns, rows)) if t is not None and turned else (t, (rows, columns))


def check_outputs(op: str, x: Tensor, **outputs: tuple[Tensor | None, tuple[int, int]]) -> None:
    check_matrices(op, x, **outputs)
    for name, (t, (rows, columns)) in outputs.items():
        if t is None or t.numel() == 0:
            continue
        if (columns > 1 and t.stride(1) != 1) or (rows > 1 and t.stride(0) < columns):
            raise ValueError(
                f"{op}: {name} is written, so its rows must be dense and apart, got strides {t.stride()}; "
                f"pass a contiguous one."
            )


def check_blocks(op: str, blocks: Sequence[int] | None, columns: int) -> None:
    if blocks is None:
        return
    if not 1 <= len(blocks) <= BLOCKS or sum(blocks) != columns or any(size < BLOCK or size % BLOCK for size in blocks):
        raise ValueError(
            f"{op}: blocks must be one to {BLOCKS} multiples of {BLOCK} that add up to {columns}, got {list(blocks)}; "
            f"multiply others separately."
        )
