"""Rotary position embedding: the angles, as tables on the device.

A position p turns the pair (i, i + D/2) of every q and k head by p · frequency_i. Training reads positions 0..T-1 again and
again, so their cosines and sines are computed once and kept; any other positions are computed when asked for, on the
device.
"""

from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]
"""cos and sin in fp32: (T, D/2), or (B, T, D/2) where rows have positions of their own"""


class Angles(Protocol):
    """Where the angles come from."""

    def __call__(self, positions: Tensor) -> Rope:
        """positions (..., T) on the device -> cos and sin (..., T, D/2)."""
        ...

    def stamp(self) -> object:
        """Changes when the frequencies do; a table of an older stamp is stale."""
        ...


class RotaryAngles:
    """The plain rotary angles: frequency_i = theta^(-2i / head_dim)."""

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        if head_dim % 2:
            raise ValueError(f"RotaryAngles: head_dim must be even, got {head_dim}; rotation works on pairs.")
        self.head_dim, self.theta = head_dim, theta

    def __call__(self, positions: Tensor) -> Rope:
        i = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32)
        turn = positions[..., None].float() * self.theta ** (-i / self.head_dim)
        return turn.cos(), turn.sin()

    def stamp(self) -> object:
        return self.head_dim, self.theta


class RopeTable:
    """cos and sin of positions 0..T-1, computed at the first call for a device or a greater T, then sliced."""

    def __init__(self, angles: Angles) -> None:
        self.angles = angles
        self._kept: Rope | None = None
        self._stamp: object = None

    def __deepcopy__(self, memo) -> "RopeTable":
        return RopeTable(deepcopy(self.angles, memo))

    def __getstate__(self):
        return {"angles": self.angles, "_kept": None, "_stamp": None}

    def first(self, length: int, device: torch.device) -> Rope:
        """(cos, sin) of positions 0..length-1, each (length, D/2)."""
        kept, stamp = self._kept, self.angles.stamp()
        if kept is None or kept[0].shape[0] < length or kept[0].device != device or stamp != self._stamp:
            cos, sin = self.at(torch.arange(length, device=device))
            kept = cos.contiguous(), sin.contiguous()
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._kept, self._stamp = (
                    kept,
                    stamp,
                )  # what a capture allocates is its graph's, to be overwritten at the next replay
        return kept[0][:length], kept[1][:length]

    def at(self, positions: Tensor) -> Rope:
        """(cos, sin) of these positions (..., T), not kept."""
        with torch.no_grad(), torch.autocast(positions.device.type, enabled=False):
            return self.angles(positions)
