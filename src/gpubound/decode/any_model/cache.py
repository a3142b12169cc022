"""A static cache whose rows stand at positions of their own, in the shape that Hugging Face's models call.

transformers' StaticCache has one position for all its rows. Here a forward is aimed first, at a stretch of a prompt or at one
place in each row; `update`, which every attention layer calls, writes there and hands back what the attention shall read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer


@dataclass(frozen=True)
class Prompt:
    """Where a prefill writes: places start to end of the first `rows` rows. What it reads ends there too."""

    rows: int
    start: int
    end: int

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[: self.rows, :, self.start : self.end] = new
        return buffer[: self.rows, :, : self.end]


@dataclass(frozen=True)
class Places:
    """Where a step writes: each row at its own places, told by tensors on the device. It reads the whole buffer."""

    row_B1: Tensor
    place_BT: Tensor

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        # index_put_ itself reads the largest index back to the host under use_deterministic_algorithms; unsafe=True leaves
        # that check out. The places are clamped before, and no two rows share one.
        index, new = (self.row_B1, self.place_BT), new.transpose(1, 2).to(buffer.dtype)
        torch._index_put_impl_(buffer.transpose(1, 2), index, new, accumulate=False, unsafe=True)
        return buffer[: len(self.row_B1)]


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer. The first forward shows their shape; from then on they stay where they are."""

    def __init__(self, rows: int, length: int, window: int | None):
        super().__init__()
        self.rows, self.length, self.window = rows, length, window
        self.where: Prompt | Places | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(self.rows, new.shape[1], self.length, new.shape[3], dtype=new.dtype, device=new.device)
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def pair(self) -> tuple[Tensor, Tensor] | None:
        """The buffers, once a forward has reached this layer."""
        return None if self.keys is None or self.values is None else (self.keys, self.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.where is not None and self.keys is not None and self.values is not None
        return self.where.write(self.keys, key_states), self.where.write(self.values, value_states)

    def get_seq_length(self) -> int:
        """Asked by models that would count positions from here. They are given their positions, so it has no effect."""
        return self.where.start if isinstance(self.where, Prompt) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.where.end if isinstance(self.where, Prompt) else self.length), 0

    def get_max_length(self) -> int:
        return self.length


class RowCache(Cache):
    """A RowLayer for each layer that keeps keys and values of its own; the empty ones of `likes` stay as they are."""

    def __init__(self, likes: list[Any], rows: int, length: int):
        super().__init__(
            layers=[
                RowLayer(rows, length, getattr(like, "sliding_window", None)) if isinstance(like, DynamicLayer) else like
                for like in likes
            ]
        )

    def own(self) -> list[RowLayer]:
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    def aim(self, where: Prompt | Places) -> None:
        for layer in self.own():
            layer.where = where
