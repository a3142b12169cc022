"""Data out of noise: the DDIM steps of a model that NoisePrediction has trained.

A step runs the model once and goes from one time to the next. It reads its number from the device, so it is captured once for a
shape and replayed for each step, and the host reads nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...decode.request import check_count
from ...graph import Captured, capture
from ...layers.diffusion_schedule import alpha_bar, check_target, ddim_step
from ..placing import mode
from .masked import MODES, MOST


class NoiseSampler:
    """Draws data from `model(x, time=t)`, on its live weights.

    target   what the model predicts: eps, v or x0
    graph    "auto": the step is captured on a GPU. "require": captured, or GraphError. "off": called
    """

    def __init__(self, model: nn.Module, target: str = "eps", graph: str = "auto") -> None:
        check_target("NoiseSampler", target)
        if graph not in MODES:
            raise ValueError(f"NoiseSampler: graph: got {graph!r}, wanted one of {', '.join(MODES)}.")
        self.model, self.target, self.graph = model, target, graph
        self._walks: dict[tuple, Walk] = {}

    @torch.no_grad()
    def generate(self, noise: Tensor, steps: int = 50, **others: Any) -> Tensor:
        """The data that `noise` (B, ...), normal numbers, becomes in so many steps, t from 1 to 0. `others` go to the model."""
        check_count("steps", steps)
        if not noise.is_floating_point() or noise.dim() < 2:
            raise ValueError(
                f"generate: noise: got {noise.dtype} {tuple(noise.shape)}, wanted a floating-point tensor (B, ...)."
            )
        with mode(self.model, training=False):
            if self.graph == "off" or (self.graph == "auto" and not noise.is_cuda):
                walk = Walk(self, noise, steps, others)
                for _ in range(steps):
                    walk.step()
                return walk.x.to(noise.dtype)
            return self._captured(noise, steps, others)

    def _captured(self, noise: Tensor, steps: int, others: dict[str, Any]) -> Tensor:
        known = [(name, value.data_ptr() if isinstance(value, Tensor) else value) for name, value in others.items()]
        key = (tuple(noise.shape), noise.dtype, noise.device, steps, tuple(known))
        if key not in self._walks:
            if len(self._walks) == MOST:
                del self._walks[next(iter(self._walks))]
            self._walks[key] = Walk(self, noise, steps, others)
        walk = self._walks[key]
        walk.begin(noise)
        walk.graph = walk.graph or capture(walk.step, state=[self.model, walk.x, walk.number, walk.times])
        for _ in range(steps):
            walk.graph()
        return walk.x.to(noise.dtype, copy=True)


class Walk:
    """Rows on their way from noise to data, and a step of it."""

    def __init__(self, sampler: NoiseSampler, noise: Tensor, steps: int, others: dict[str, Any]) -> None:
        self.sampler, self.steps, self.others, self.dtype = sampler, steps, others, noise.dtype
        self.times = torch.linspace(1, 0, steps + 1, device=noise.device, dtype=torch.float32)
        self.number = torch.zeros(1, device=noise.device, dtype=torch.int64)
        self.x = noise.to(torch.promote_types(noise.dtype, torch.float32), copy=True)
        self.graph: Captured | None = None

    def begin(self, noise: Tensor) -> None:
        self.x.copy_(noise)
        self.number.zero_()

    @torch.no_grad()
    def step(self) -> None:
        at = self.number.clamp(max=self.steps - 1)  # what a capture tries goes on behind the last
        now, later = (self.times[index].expand(len(self.x)) for index in (at, at + 1))
        predicted = self.sampler.model(self.x.to(self.dtype), time=now, **self.others).to(self.x.dtype)
        self.x.copy_(ddim_step(self.sampler.target, self.x, predicted, alpha_bar(now), alpha_bar(later)))
        self.number.add_(1)
