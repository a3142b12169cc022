"""AdamW over flat buffers: options, state, and the update.

An update is one pass: one small kernel decides on the device whether and how to update (kernels/adamw.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..distributed import Ranks
from ..kernels import adamw, plan_update
from ..kernels.adamw import plan_shape
from ..kernels.dispatch import hasten
from .flat_weights import ADAMW, FlatLayout, Group, State, Weights, lay_out, matrices
from .offload import PART
from .precision import Precision
from .schedule import Schedule, is_rate

START_SCALE = 256.0  # of a *sum* of losses: for a batch of 256 items, what 65,536 is for their mean
GROWTH_INTERVAL = 2000  # good steps before the loss scale doubles


@dataclass(frozen=True)
class AdamW:
    """Options of torch.optim.AdamW. `decays(name, parameter)` chooses what weight decay applies to: by default, matrices."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decays: Callable[[str, Parameter], bool] = matrices
    whole: ClassVar[str | None] = None  # the reason why it needs whole matrices
    by_element: ClassVar[bool] = True  # the update of an element reads no other one, so that some can be updated alone

    def __post_init__(self):
        if not all(map(is_rate, (self.lr, self.eps, self.weight_decay))):
            raise ValueError(
                f"{type(self).__name__}: lr, eps and weight_decay must be finite numbers of at least 0, "
                f"got {self.lr}, {self.eps} and {self.weight_decay}."
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"{type(self).__name__}: betas must be two numbers from 0 to below 1, got {self.betas}.")

    def lay_out(self, model: Any, precision: Precision) -> FlatLayout:
        """Return the layout of the flat buffers. Errors of the parameters are raised here, before the model is changed."""
        return lay_out(model.named_parameters(), precision.dtype, self.decays, others=model.named_buffers())

    def moment_bytes(self, layout: FlatLayout) -> int:
        return 4 * layout.size + 4 * layout.adamw_size

    def flat(self, *rest: Any) -> "FlatAdamW":
        """Return the optimizer; `rest` are the other arguments of FlatAdamW."""
        return FlatAdamW(self, *rest)


class FlatAdamW:
    """The optimizer's state, its moments and four scalars, and the update."""

    loads: tuple[str, ...] = ()  # prefixes of names of a state that `load` loads; the others are copied in place
    kernel: Callable[..., None] = staticmethod(adamw)

    def __init__(
        self, config: AdamW, weights: Weights, precision: Precision, clip: float | None, schedule: Schedule, seed: int
    ):
        self.config, self.lr, self.weights, self.clip, self.schedule = config, config.lr, weights, clip, schedule
        self._seed = seed if precision.at_random else None  # all weights are bf16 without masters then
        self.growth_interval = GROWTH_INTERVAL if precision.loss_scale else 0
        self.memory = weights.memory
        self._begin_moments(weights.layout)
        if self.memory.offloads:
            parts = (slice(0, min(PART, group.stop - group.start)) for group in weights.layout.groups)
            self.memory.reserve([self._state_of(group, part) for group, part in zip(weights.layout.groups, parts)])
        # updates, skipped, loss scale, good steps: written by the device alone
        start = START_SCALE if precision.loss_scale else 1.0
        self.state = torch.tensor([0, 0, start, 0], dtype=torch.float64, device="cpu").to(weights.layout.device)
        self.rates = schedule.table(config.lr, weights.layout.device)

    def _begin_moments(self, layout: FlatLayout) -> None:
        self.m = self.memory.zeros(layout.size, torch.float32)
        self.v = self.memory.zeros(layout.adamw_size, torch.float32)

    def hasten(self) -> None:
        """Start the self-tests of the kernels that an update calls."""
        layout = self.weights.layout
        hasten([("plan_update", plan_shape(layout.size, *self._constants()))], layout.device, torch.float32)
        for weight, master in zip(self.weights.flat, self.weights.masters):
            split = master is not None and self.weights.split
            kind = self.config.betas, self.config.eps, master is not None, self._seed is not None, split
            hasten([("adamw", kind)], layout.device, weight.dtype)

    def agree(self, ranks: Ranks) -> None:
        """Use the first rank's choices where ranks may differ: AdamW has none."""

    def _constants(self) -> tuple[tuple[float, float], float, float | None, int]:
        """Return the constants that `plan_update` is compiled for."""
        return self.config.betas, self.config.weight_decay, self.clip, self.growth_interval

    @property
    def moments(self) -> list[Tensor]:
        """One tensor for each buffer of the moments."""
        return [self.m, self.v]

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield live views by parameter, for checkpoints."""
        for slot in self.weights.layout.slots:
            yield f"m.{slot.name}", slot.view(self.m)
            if slot.start < len(self.v):
                yield f"v.{slot.name}", slot.view(self.v)

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale of the loss on the device; None when no loss is scaled."""
        return self.state[2] if self.growth_interval else None

    def update(self, gradient: Tensor, totals: Tensor) -> Tensor:
        """Clip, decide and update; return the report of kernels.plan_update. `totals`: sum of losses, number of items."""
        plan, report = self.plan(gradient, totals)
        self.carry_out(gradient, plan, report)
        return report

    def plan(self, gradient: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Return the plan and the report of kernels.plan_update. It begins an update."""
        self.memory.begin()
        return plan_update(self.weights.of_norm(gradient), totals, self.state, self.rates, *self._constants())

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        for group in self.weights.layout.groups:
            if group.rule == ADAMW:
                self.advance(group, group.start, group.stop, gradient[group.start : group.stop], plan)

    def advance(self, group: Group, start: int, stop: int, gradient: Tensor, plan: Tensor) -> None:
        """Update the elements start to stop, all of one group, by their gradient: in parts where the state is offloaded."""
        size = PART if self.memory.offloads else max(1, stop - start)
        for begin in range(start, stop, size):
            part = gradient[begin - start : begin - start + size]
            self._advance(group, slice(begin - group.start, begin - group.start + len(part)), part, plan)

    def _advance(self, group: Group, inside: slice, gradient: Tensor, plan: Tensor) -> None:
        """Update some elements of a group, counted from its first one."""
        weight, config = self.weights.flat[self.weights.layout.groups.index(group)][inside], self.config
        decay_until = min(max(group.decay_stop - group.start - inside.start, 0), len(weight))
        seed = None if self._seed is None else self._seed + inside.start  # the noise is drawn by position
        with self.memory.on_device(self._state_of(group, inside)) as (*moments, master):
            self.kernel(weight, gradient, *moments, plan, master, config.betas, config.eps, decay_until, seed)

    def _state_of(self, group: Group, inside: slice) -> State:
        """Return moments and master, or None, of some elements of a group, as the kernel takes them."""
        master = self.weights.masters[self.weights.layout.groups.index(group)]
        return [*self._moments_of(group, inside), None if master is None else master[inside]]

    def _moments_of(self, group: Group, inside: slice) -> list[Tensor]:
        here = slice(group.start + inside.start, group.start + inside.stop)
        return [self.m[here], self.v[here]]

    def check(self) -> None:
        """Raise ValueError if its settings were changed from outside since the last step: ours have none that could be."""

    def carry_on(self, gradient: Tensor, result: Any) -> None:
        """Run the part of the update that is outside of the step's graph: none of ours. `result` is the step's StepResult."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the names that begin with `loads`, or raise ValueError before anything is written."""

    def loaded(self, state: dict[str, Tensor]) -> None:
        """Called after everything else of the state has been copied."""

    def set_lr(self, lr: float) -> None:
        """Set the base rate from the next step on, captured or not: its table is rewritten in place."""
        self.lr = lr
        self.rates.copy_(self.schedule.table(lr))
