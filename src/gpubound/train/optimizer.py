"""AdamW over flat buffers: decided by one tiny kernel, carried out in one pass (kernels/optim.py), not seen by the host."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import adamw, plan_update
from .flat import ADAMW, Layout, Weights, matrices
from .precision import Precision
from .schedule import Schedule

START_SCALE = 256.0  # of a *sum* of losses: for a batch of 256 items, what 65,536 is for their mean
GROWTH_INTERVAL = 2000  # good steps before the loss scale doubles


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW's numbers. Matrices decay, gains and biases do not; `decays` (name, parameter) -> bool is the rule."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decays: Callable[[str, Parameter], bool] = matrices

    def __post_init__(self):
        if self.lr < 0 or self.eps < 0 or self.weight_decay < 0:
            raise ValueError(
                f"AdamW: lr, eps and weight_decay must not be negative, got {self.lr}, {self.eps} and {self.weight_decay}."
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"AdamW: betas must be two numbers from 0 to below 1, got {self.betas}.")


class FlatAdamW:
    """The moments and the four numbers that the optimizer carries from step to step, and the update itself.

    `state` (updates, skipped, loss scale, good steps) lives on the device in fp64 and is written by the device alone.
    """

    def __init__(
        self, config: AdamW, weights: Weights, precision: Precision, clip: float | None, schedule: Schedule, seed: int
    ):
        self.config, self.weights, self.clip, self.schedule = config, weights, clip, schedule
        layout = weights.layout
        self.m = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        self.v = torch.zeros(layout.adamw_size, dtype=torch.float32, device=layout.device)
        self.growth_interval = GROWTH_INTERVAL if precision.loss_scale else 0
        start = START_SCALE if precision.loss_scale else 1.0
        self.state = torch.tensor([0, 0, start, 0], dtype=torch.float64).to(layout.device)
        self.rates = schedule.table(config.lr, layout.device)
        self._seed = seed if precision.at_random else None

    @property
    def loss_scale(self) -> Tensor | None:
        """The scalar to begin backward with, on the device; None when no loss is scaled."""
        return self.state[2] if self.growth_interval else None

    def update(self, gradient: Tensor, totals: Tensor) -> Tensor:
        """Clip, decide and update; the report of kernels.plan_update. `totals`: the sum of losses, the number of items."""
        config = self.config
        plan, report = plan_update(
            gradient, totals, self.state, self.rates, config.betas, config.weight_decay, self.clip, self.growth_interval
        )
        self.carry_out(gradient, plan, report)
        return report

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        config = self.config
        for group, weight, master in zip(self.weights.layout.groups, self.weights.flat, self.weights.masters):
            if group.rule != ADAMW:
                continue
            here = slice(group.start, group.stop)
            seed = self._seed if weight.dtype == torch.bfloat16 and master is None else None
            adamw(
                weight, gradient[here], self.m[here], self.v[here], plan, master,
                config.betas, config.eps, group.decay_stop - group.start, seed,
            )  # fmt: skip

    def set_lr(self, lr: float) -> None:
        """A new base rate from the next step on, also for a captured step: its table is rewritten where it lies."""
        self.config = replace(self.config, lr=lr)
        self.rates.copy_(self.schedule.table(lr))


def memory(layout: Layout, precision: Precision) -> dict[str, int]:
    """Bytes that training these parameters takes besides activations, before any of it is allocated."""
    counts = [(group.dtype, group.stop - group.start) for group in layout.groups]
    return {
        "weights": sum(n * dtype.itemsize for dtype, n in counts),
        "masters": sum(4 * n for dtype, n in counts if precision.masters and dtype != torch.float32),
        "gradient": 4 * layout.size,
        "moments": 4 * layout.size + 4 * layout.adamw_size,
    }
