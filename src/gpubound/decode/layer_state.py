"""State of a recurrent layer for each row of a cache: the last inputs of its convolution, and the matrix of its recurrence.

The inputs are in a ring, that of position p at place p % P: a step that takes a rejected draft back writes them again. The
matrix is replaced by each step. A row at position 0 begins with zeros, whatever its state holds, so nothing is reset.

Legend: B rows, T tokens of a prompt, C channels, K taps of the convolution, P places of the ring.
"""

from typing import Any

import torch
from torch import Tensor

from ..models.decoding import StateShape


class LayerState:
    def __init__(self, shape: StateShape, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """tokens: that a step takes, and steps take back"""
        self.taps = shape.taps
        self.ring = torch.zeros(rows, shape.taps - 1 + tokens, shape.channels, device=device, dtype=dtype)
        matrix = torch.zeros(rows, *shape.matrix, device=device, dtype=torch.float32) if shape.matrix else None
        self.matrix: Any = matrix  # None where the recurrence has none

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ring] if self.matrix is None else [self.ring, self.matrix]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def extend(self, x: Tensor, start: int, targets: Tensor | None, ends: Tensor | None) -> Tensor:
        """Write inputs x (B, T, C) of a prompt from position `start` on. Return them after the K - 1 inputs before them.

        targets, ends: as of kv_cache.LayerStore.write
        """
        slots = self.ring.shape[1]
        position, source = ring_positions(x, slots, start, ends)
        before = self.ring[slice(len(x)) if targets is None else targets[:, 0]]
        earlier = torch.arange(start + 1 - self.taps, start, device=x.device)
        past, new = before[:, earlier % slots].masked_fill((earlier < 0)[:, None], 0), x[source]
        write_rows(self.ring, torch.where((position < start)[..., None], before, new), targets)
        return torch.cat([past, x], 1)

    def matrix_before(self, start: int, rows: int, targets: Tensor | None) -> Tensor:
        """Return the matrices (B, ...) of a prompt's rows before position `start`."""
        if start == 0:
            return self.matrix.new_zeros(rows, *self.matrix.shape[1:])
        return self.matrix[slice(rows) if targets is None else targets[:, 0]]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the state of the rows `sources` to the rows `targets`."""
        for t in self.tensors:
            t.index_copy_(0, targets, t[sources])


def ring_positions(x: Tensor, size: int, start: int, ends: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the last position (B, size) at each place of a ring once x (B, T, ...) of a prompt from `start` on is written, and
    its index in x. What is at a place whose position came before `start` stays."""
    (rows, tokens), device = x.shape[:2], x.device
    last = torch.full((rows,), start + tokens, device=device) if ends is None else ends.clamp(max=start + tokens)
    position = last[:, None] - 1 - (last[:, None] - 1 - torch.arange(size, device=device)) % size
    return position, (torch.arange(rows, device=device)[:, None], (position - start).clamp(min=0))


def write_rows(state: Tensor, new: Tensor, targets: Tensor | None) -> None:
    """Write new rows (B, ...) to the first rows of a state, or to the rows `targets` (B, C), C copies each."""
    if targets is None:
        state[: len(new)] = new
    else:
        copies = new[:, None].expand(-1, targets.shape[1], *new.shape[1:]).flatten(0, 1)
        state.index_copy_(0, targets.flatten(), copies)
