"""Learning-rate schedules, counted in updates, read on the device.

A schedule becomes a table on the GPU with one rate for each update (4 million updates are 32 MB), which the step indexes with
the device's count of updates. So any Python function may be a schedule, and a skipped step uses up no rate.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHAPES = ("constant", "linear", "cosine", "wsd")
MOST_STEPS = 10_000_000  # a table of 80 MB, which takes a second or two to make


@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rate for each update 1, 2, … `steps`. Later updates keep the last factor.

    shape    "constant"; "linear" or "cosine" from 1 to `final`; "wsd" (warm-up, stable, decay): 1, then linear to `final`
             over the last `decay` x `steps` updates; or a function from the number of the update (1, 2, …) to the factor
    steps    the planned number of updates; only "constant" does without it
    warmup   the number of updates, or if below 1 the fraction of `steps`, in which the factor rises evenly from above 0 to 1
    """

    shape: str | Callable[[int], float] = "constant"
    steps: int | None = None
    warmup: float = 0
    final: float = 0.0
    decay: float = 0.2

    def __post_init__(self) -> None:
        if not callable(self.shape) and self.shape not in SHAPES:
            raise ValueError(
                f"Schedule: shape must be one of {', '.join(SHAPES)} or a function of the update, got {self.shape!r}."
            )
        if self.steps is not None and not (isinstance(self.steps, int) and 1 <= self.steps <= MOST_STEPS):
            raise ValueError(f"Schedule: steps must be a whole number from 1 to {MOST_STEPS:,}, got {self.steps!r}.")
        if not is_rate(self.warmup):
            raise ValueError(f"Schedule: warmup must be a number of updates, or below 1 a part of steps, got {self.warmup!r}.")
        if self.steps is None and (self.shape != "constant" or 0 < self.warmup < 1):
            raise ValueError(
                f"Schedule: shape={self.shape!r} with warmup={self.warmup} needs steps, got None; "
                f"say how many updates the run is planned for."
            )
        if self.warmup_steps > (self.steps or MOST_STEPS):
            raise ValueError(f"Schedule: warmup must lie between 0 and steps={self.steps or MOST_STEPS}, got {self.warmup}.")
        for name, value in (("final", self.final), ("decay", self.decay)):
            if not is_rate(value) or value > 1:
                raise ValueError(f"Schedule: {name} must lie between 0 and 1, got {value!r}.")

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * (self.steps or 1)) if self.warmup < 1 else int(self.warmup)

    def factor(self, update: int) -> float:
        """Return the factor at this update; the first update is 1."""
        return float(self._factors(np.array([update]))[0])

    def _factors(self, updates: np.ndarray) -> np.ndarray:
        if callable(self.shape):
            return np.array([self._checked(self.shape(update), update) for update in updates.tolist()])
        warmup = self.warmup_steps
        rising = updates / max(1, warmup)
        if self.shape == "constant" or self.steps is None:
            return np.where(updates <= warmup, rising, 1.0)
        if self.shape == "wsd":  # the last `decay` of all steps, or what the warm-up leaves of them
            falling_steps = min(round(self.decay * self.steps), self.steps - warmup)
            done = np.clip((updates - (self.steps - falling_steps)) / (falling_steps + 1), 0.0, float(falling_steps > 0))
        else:
            done = np.minimum(1.0, (updates - 1 - warmup) / max(1, self.steps - warmup))  # of what follows the warm-up
        if self.shape == "cosine":  # by math.cos: numpy's has other last bits on other machines
            falling = 0.5 * (1 + np.fromiter(map(math.cos, (math.pi * done).tolist()), np.float64, len(done)))
        else:
            falling = 1 - done
        return np.where(updates <= warmup, rising, self.final + (1 - self.final) * falling)

    def _checked(self, factor: Any, update: int) -> float:
        """Check a factor: a rate that is not finite makes every weight NaN, and the finite check covers gradients only."""
        if isinstance(factor, Tensor | np.generic):
            factor = factor.item()
        if not is_rate(factor):
            raise ValueError(f"Schedule: shape gives {factor!r} at update {update}, wanted a finite factor of at least 0.")
        return float(factor)

    def table(self, lr: float, device: torch.device | str = "cpu") -> Tensor:
        """Return the rates of updates 1, 2, … in fp64. The last one holds for all later updates."""
        length = self.warmup_steps if self.shape == "constant" or self.steps is None else self.steps
        return torch.from_numpy(lr * self._factors(np.arange(1, length + 2))).to(device)


def is_rate(value: Any) -> bool:
    """Return whether this is a finite number of at least 0."""
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max
