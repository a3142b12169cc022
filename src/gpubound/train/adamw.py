"""The trained weights in flat buffers, and AdamW over them: options, state, and the update.

An update is one pass: one small kernel decides on the device whether and how to update (kernels/adamw.py).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..distributed import Ranks
from ..kernels import adamw, plan_update
from ..kernels.adamw import join_fp32, plan_shape, split_fp32
from ..kernels.dispatch import hasten
from ..kernels.tensor_state import made_record
from .flat_layout import ADAMW, FlatLayout, Group, lay_out, matrices
from .offload import PART as OFFLOADED_PART, HostMemory, State, StateMemory
from .precision import Precision
from .schedule import Schedule, is_rate

VERSION = attrgetter("_version")
PART = 1 << 24  # elements that are split or averaged at a time
JOINED = 1 << 22  # elements that a certificate joins at a time: the intermediates, 17 bytes each, add to those of a graph
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


class Weights:
    """The parameters in flat buffers, one a group, perhaps with masters. The Parameter objects stay the same.

    masters  dtype of the masters of 16-bit weights: fp32, or int16 for the remainders of bf16 weights; None for none
    memory   where masters and moments are; None: on the weights' device
    """

    part = 0  # the rank whose rows of every parameter these are

    def __init__(self, layout: FlatLayout, masters: torch.dtype | None, memory: StateMemory | None = None):
        self.layout, self.memory = layout, memory or StateMemory(layout.device)
        self.flat: list[Tensor] = []
        self.masters: list[Tensor | None] = []
        for group in layout.groups:
            flat = torch.zeros(group.stop - group.start, dtype=group.dtype, device=layout.device)
            master = self.memory.zeros(len(flat), masters) if masters and group.dtype != torch.float32 else None
            if masters == torch.int16 and master is not None:
                made_record(master).numbers = partial(_joined_parts, flat)
            for slot in layout.slots_of(group):
                view, parameter = slot.view(flat, group.start), slot.parameter
                original = parameter.detach().to(layout.device)  # of offloaded state it is in host memory now
                view.copy_(original)
                if master is not None:  # from the original: an fp32 one is not rounded
                    stored = slot.view(master, group.start)
                    if masters != torch.int16:
                        stored.copy_(original)
                    elif original.dtype != group.dtype:
                        rows = max(1, PART * len(original) // original.numel()) if original.dim() else 1
                        for some in zip(*(t.split(rows) if t.dim() else [t] for t in (view, stored, original))):
                            for target, part in zip(some, split_fp32(some[2].float())):
                                target.copy_(part)
                parameter.grad = None  # it may have another dtype
                parameter.data = view
            self.flat.append(flat)
            self.masters.append(master)
        buffers = zip(layout.groups, self.flat, self.masters)
        self.rounded = [(group, flat, master) for group, flat, master in buffers if master is not None]
        self.split = masters == torch.int16
        self._parameters = [slot.parameter for slot in layout.slots]
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._versions = list(map(VERSION, self._parameters))

    def stepped(self) -> None:
        """Increment the parameters' versions after an update: torch does not see the writes of kernels and graphs."""
        torch.autograd.graph.increment_version(self._parameters)
        # Otherwise the next step would read all of them back, as after writes by other code.
        self._versions = list(map(VERSION, self._parameters))

    def check(self) -> None:
        """Raise ValueError if a parameter is no longer in its flat buffer (after a cast, a move, an assigning load).

        Values that were copied into the weights since the last step, as by load_state_dict, are copied to the masters.
        """
        now = list(map(Tensor.data_ptr, self._parameters))
        if now != self._addresses:
            moved = next(slot.name for slot, a, b in zip(self.layout.slots, now, self._addresses) if a != b)
            raise ValueError(
                f"parameters: {moved} is no longer in the flat buffer it was moved to (a .to(), .data = or "
                f"load_state_dict(assign=True) since?); copy new values into it in place, or make a new TrainStep."
            )
        if (versions := list(map(VERSION, self._parameters))) != self._versions:
            self._versions = versions
            self._read_back()

    def _read_back(self) -> None:
        """Set the masters of 16-bit weights that were written: those that are not their master rounded.

        A remainder stays: it is at most half of the weight's last place, and belongs to weights that are loaded.
        """
        self.memory.wait()
        for _, flat, master in () if self.split else self.rounded:
            for weights, masters in zip(flat.split(PART), master.split(PART)):
                before = masters.to(weights.device)
                masters.copy_(torch.where(weights == before.to(weights.dtype), before, weights.float()))

    def finest(self) -> list[Tensor]:
        """Return the flat buffers of highest precision: the masters where there are any, and the weights of remainders."""
        return [flat if master is None or self.split else master for flat, master in zip(self.flat, self.masters)]

    def add_to(self, averages: list[Tensor], weight: Tensor) -> None:
        """Move fp32 buffers towards the weights in fp32, by the fraction `weight`."""
        for average, finest, remainder in zip(averages, self.finest(), self.masters if self.split else repeat(None)):
            for start in range(0, len(average), PART):
                here = slice(start, start + PART)
                values = finest[here].float() if remainder is None else join_fp32(finest[here], remainder[here])
                average[here].lerp_(values, weight)

    def by_name(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (weight, its master or itself) by the parameter's name."""
        self.memory.wait()
        groups = zip(self.layout.groups, self.finest())
        return {
            slot.name: (slot.parameter.detach(), slot.view(finest, group.start))
            for group, finest in groups
            for slot in self.layout.slots_of(group)
        }

    def round_masters(self) -> None:
        """Round the masters to the 16-bit weights, as after an update."""
        for _, flat, master in () if self.split else self.rounded:
            flat.copy_(master)


def _joined_parts(flat: Tensor, raw: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Yield the masters of these remainders, perhaps a copy in host memory, in parts, for the comparison of two of them."""
    for weights, remainders in zip(flat.split(JOINED), raw.view(torch.int16).split(JOINED)):
        yield join_fp32(weights.to(device), remainders.to(device))


class FlatAdamW:
    """The optimizer's state, its moments and four scalars, and the update."""

    loads: tuple[str, ...] = ()  # prefixes of names of a state that `load` loads; the others are copied in place
    kernel: Callable[..., None] = staticmethod(adamw)
    fused_update = True  # few launches, whatever the model

    def __init__(
        self, config: AdamW, weights: Weights, precision: Precision, clip: float | None, schedule: Schedule, seed: int
    ):
        self.config, self.lr, self.weights, self.clip, self.schedule = config, config.lr, weights, clip, schedule
        self._seed = seed if precision.at_random else None  # all weights are bf16 without masters then
        self.growth_interval = GROWTH_INTERVAL if precision.loss_scale else 0
        self.memory = weights.memory
        self.host = self.memory if isinstance(self.memory, HostMemory) else None
        self._begin_moments(weights.layout)
        if self.host is not None:
            parts = (slice(0, min(OFFLOADED_PART, group.stop - group.start)) for group in weights.layout.groups)
            self.host.reserve([self._state_of(group, part) for group, part in zip(weights.layout.groups, parts)])
        # updates, skipped, loss scale, good steps: written by the device alone
        start = START_SCALE if precision.loss_scale else 1.0
        self.state = torch.tensor([0, 0, start, 0], dtype=torch.float64, device="cpu").to(weights.layout.device)
        self.loss_scale = self.state[2] if precision.loss_scale else None
        self.rates = schedule.table(config.lr, weights.layout.device)

    def _begin_moments(self, layout: FlatLayout) -> None:
        self.m = self.memory.zeros(layout.size, torch.float32)
        self.v = self.memory.zeros(layout.adamw_size, torch.float32)

    def hasten(self) -> None:
        """Start the self-tests of the kernels that an update calls."""
        layout = self.weights.layout
        constants = self.config.betas, self.config.weight_decay, self.clip, self.growth_interval
        hasten([("plan_update", plan_shape(layout.size, *constants))], layout.device, torch.float32)
        for weight, master in zip(self.weights.flat, self.weights.masters):
            split = master is not None and self.weights.split
            kind = self.config.betas, self.config.eps, master is not None, self._seed is not None, split
            hasten([("adamw", kind)], layout.device, weight.dtype)

    def agree(self, ranks: Ranks) -> None:
        """Use the first rank's choices where ranks may differ: AdamW has none."""

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

    def update(self, gradient: Tensor, totals: Tensor, of_norm: Tensor) -> Tensor:
        """Clip, decide and update; return the report of kernels.plan_update.

        totals   sum of losses, number of items
        of_norm  a tensor with the norm of the whole gradient: `gradient` itself, unless ranks hold parts of it
        """
        plan, report = self.plan(of_norm, totals)
        self.carry_out(gradient, plan, report)
        return report

    def plan(self, of_norm: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Return the plan and the report of kernels.plan_update. It begins an update."""
        if self.host is not None:
            self.host.begin()
        constants = self.config.betas, self.config.weight_decay, self.clip, self.growth_interval
        return plan_update(of_norm, totals, self.state, self.rates, *constants)

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        for group in self.weights.layout.groups:
            if group.rule == ADAMW:
                self.advance(group, group.start, group.stop, gradient[group.start : group.stop], plan)

    def advance(self, group: Group, start: int, stop: int, gradient: Tensor, plan: Tensor) -> None:
        """Update the elements start to stop, all of one group, by their gradient: in parts where the state is offloaded."""
        weights, betas, eps = self.weights.flat[self.weights.layout.groups.index(group)], self.config.betas, self.config.eps
        size = max(1, stop - start) if self.host is None else OFFLOADED_PART
        for begin in range(start, stop, size):
            part = gradient[begin - start : begin - start + size]
            first = begin - group.start
            inside = slice(first, first + len(part))
            decay_until = min(max(group.decay_stop - begin, 0), len(part))
            seed = None if self._seed is None else self._seed + first  # the noise is drawn by position
            state = self._state_of(group, inside)
            with nullcontext(state) if self.host is None else self.host.on_device(state) as (*moments, master):
                self.kernel(weights[inside], part, *moments, plan, master, betas, eps, decay_until, seed)

    def _state_of(self, group: Group, inside: slice) -> State:
        """Return moments and master, or None, of elements of a group, counted from its first one, as the kernel takes them."""
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
