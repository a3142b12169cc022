"""AdamW and Muon over flat buffers: decided by one tiny kernel (kernels/adamw.py), not seen by the host.

AdamW is one pass, with its moments in fp32 or in 8 bits. Muon (Keller Jordan, 2024) moves a matrix by its one moment, made
orthogonal by five Newton-Schulz steps in 16 bits: every direction moves alike, however weak its gradient. Rates carry over: an
update has the size that AdamW's would have (0.2 · √ of the longer side). AdamW moves what Muon leaves, under one plan: one
norm, one clip, one schedule, one skip.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..kernels import adamw, plan_update
from ..kernels.adamw import BLOCK, adamw8, decode, plan_shape
from ..kernels.choose import hasten
from ..kernels.record import made_record
from ..layers.vocabulary import head_of
from .flat_buffers import ADAMW, MUON, FlatLayout, FlatSlot, Group, Weights, lay_out, matrices
from .precision import Precision
from .schedule import Schedule, is_rate

START_SCALE = 256.0  # of a *sum* of losses: for a batch of 256 items, what 65,536 is for their mean
GROWTH_INTERVAL = 2000  # good steps before the loss scale doubles
PART_BLOCKS = 1 << 14  # blocks of codes read as numbers at a time: 16 MiB of fp32
# The quintic whose slope at zero is steepest: it takes singular values from anywhere below one to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class AdamW:
    """The settings of torch.optim.AdamW. `decays(name, parameter)` says what weight decay applies to: by default, matrices."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decays: Callable[[str, Parameter], bool] = matrices
    whole: ClassVar[str | None] = None  # why it must see whole matrices

    def __post_init__(self):
        if not all(map(is_rate, (self.lr, self.eps, self.weight_decay))):
            raise ValueError(
                f"{type(self).__name__}: lr, eps and weight_decay must be finite numbers of at least 0, "
                f"got {self.lr}, {self.eps} and {self.weight_decay}."
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"{type(self).__name__}: betas must be two numbers from 0 to below 1, got {self.betas}.")

    def lay_out(self, model: Any, precision: Precision) -> FlatLayout:
        """Where the model's parameters will lie. What can be refused is refused here, before the model is touched."""
        return lay_out(model.named_parameters(), precision.dtype, self.decays, others=model.named_buffers())

    def moment_bytes(self, layout: FlatLayout) -> int:
        return 4 * layout.size + 4 * layout.adamw_size

    def flat(self, *rest: Any) -> "FlatAdamW":
        """The optimizer itself; `rest` as FlatAdamW takes it."""
        return FlatAdamW(self, *rest)


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW that keeps its moments in 8 bits: 2 bytes per parameter instead of 8. Gradient and master weights stay in fp32."""

    def moment_bytes(self, layout: FlatLayout) -> int:
        return sum(2 * coded_bytes(group.stop - group.start) for group in layout.groups)

    def flat(self, *rest: Any) -> "FlatAdamW":
        return FlatAdamW8bit(self, *rest)


@dataclass(frozen=True)
class Muon:
    """Muon for matrices, `rest` for other parameters. `takes(name, parameter)` chooses; None: every nn.Linear but the head."""

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    iterations: int = 5
    takes: Callable[[str, Parameter], bool] | None = None
    rest: AdamW = field(default_factory=AdamW)
    whole: ClassVar[str | None] = "Muon makes whole matrices orthogonal"

    def __post_init__(self):
        rates = is_rate(self.lr) and is_rate(self.weight_decay)
        if not rates or not 0 <= self.momentum < 1 or self.iterations < 1:
            raise ValueError(
                f"Muon: lr and weight_decay must be finite and not negative, momentum lies from 0 to below 1, "
                f"iterations is at least 1; got {self.lr}, {self.weight_decay}, {self.momentum} and {self.iterations}."
            )
        if not self.rest.lr > 0:
            raise ValueError(f"Muon: rest.lr must be above 0, for one schedule moves both rates, got {self.rest.lr}.")
        if isinstance(self.rest, AdamW8bit):
            raise ValueError("AdamW8bit: got it as the rest of Muon, wanted it by itself; take rest=AdamW(...).")

    def lay_out(self, model: Any, precision: Precision) -> FlatLayout:
        precision.check_not_at_random("Muon")
        named, takes = list(model.named_parameters()), self.chooser(model)
        layout = lay_out(named, precision.dtype, self.rest.decays, takes, model.named_buffers())
        for slot in layout.slots:
            if takes(slot.name, slot.parameter) and slot.parameter.dim() != 2:
                shape = tuple(slot.parameter.shape)
                raise ValueError(f"Muon: takes {slot.name} of shape {shape}, wanted matrices; leave it to rest.")
        return layout

    def moment_bytes(self, layout: FlatLayout) -> int:
        return self.rest.moment_bytes(layout)

    def flat(self, *rest: Any) -> "FlatAdamW":
        return FlatMuon(self, *rest)

    def chooser(self, model: Any) -> Callable[[str, Parameter], bool]:
        """The rule that says which parameters of `model` Muon updates."""
        if self.takes is not None:
            return self.takes
        head = head_of(model)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(getattr(head, "weight", None))}
        linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
        return lambda name, parameter: id(parameter) in linear


def numbers_by_rule(model: Any, optimizer: Any) -> tuple[int, int]:
    """How many trained numbers AdamW updates, and how many Muon. `model` may be on the meta device."""
    takes = optimizer.chooser(model) if isinstance(optimizer, Muon) else lambda name, parameter: False
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    by_muon = sum(p.numel() for name, p in trained if takes(name, p))
    return sum(p.numel() for _, p in trained) - by_muon, by_muon


class FlatAdamW:
    """The moments and the four numbers that the optimizer carries from step to step, and the update itself."""

    loads: tuple[str, ...] = ()  # how those names of a state begin that `load` takes; the others are written in place

    def __init__(
        self, config: AdamW, weights: Weights, precision: Precision, clip: float | None, schedule: Schedule, seed: int
    ):
        self.config, self.lr, self.weights, self.clip, self.schedule = config, config.lr, weights, clip, schedule
        self._seed = seed if precision.at_random else None  # all weights are bf16 without masters then
        self.growth_interval = GROWTH_INTERVAL if precision.loss_scale else 0
        self._begin_moments(weights.layout)
        # updates, skipped, loss scale, good steps: written by the device alone
        start = START_SCALE if precision.loss_scale else 1.0
        self.state = torch.tensor([0, 0, start, 0], dtype=torch.float64).to(weights.layout.device)
        self.rates = schedule.table(config.lr, weights.layout.device)

    def _begin_moments(self, layout: FlatLayout) -> None:
        self.m = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        self.v = torch.zeros(layout.adamw_size, dtype=torch.float32, device=layout.device)

    def hasten(self) -> None:
        """Let the self-tests of what an update calls begin."""
        layout = self.weights.layout
        hasten([("plan_update", plan_shape(layout.size, *self._constants()))], layout.device, torch.float32)
        for weight, master in zip(self.weights.flat, self.weights.masters):
            kind = self.config.betas, self.config.eps, master is not None, self._seed is not None
            hasten([("adamw", kind)], layout.device, weight.dtype)

    def _constants(self) -> tuple[tuple[float, float], float, float | None, int]:
        """What `plan_update` is compiled for."""
        return self.config.betas, self.config.weight_decay, self.clip, self.growth_interval

    @property
    def moments(self) -> list[Tensor]:
        """One tensor for each piece of memory that the moments lie in."""
        return [self.m, self.v]

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Live views by parameter, for checkpoints."""
        for slot in self.weights.layout.slots:
            yield f"m.{slot.name}", slot.view(self.m)
            if slot.start < len(self.v):
                yield f"v.{slot.name}", slot.view(self.v)

    @property
    def loss_scale(self) -> Tensor | None:
        """The scalar to begin backward with, on the device; None when no loss is scaled."""
        return self.state[2] if self.growth_interval else None

    def update(self, gradient: Tensor, totals: Tensor) -> Tensor:
        """Clip, decide and update; the report of kernels.plan_update. `totals`: the sum of losses, the number of items."""
        plan, report = plan_update(self.weights.of_norm(gradient), totals, self.state, self.rates, *self._constants())
        self.carry_out(gradient, plan, report)
        return report

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        config = self.config
        for group, weight, master in zip(self.weights.layout.groups, self.weights.flat, self.weights.masters):
            if group.rule == ADAMW:
                rest = plan, master, config.betas, config.eps, group.decay_stop - group.start, self._seed
                self._advance(group, weight, gradient[group.start : group.stop], *rest)

    def _advance(self, group: Group, weight: Tensor, gradient: Tensor, *rest: Any) -> None:
        here = slice(group.start, group.stop)
        adamw(weight, gradient, self.m[here], self.v[here], *rest)

    def carry_on(self, gradient: Tensor) -> None:
        """What is left of the update behind the step's own graph: nothing, of ours."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Take from a saved state what `loads` says."""

    def set_lr(self, lr: float) -> None:
        """A new base rate from the next step on, also for a captured step: its table is rewritten where it lies."""
        self.lr = lr
        self.rates.copy_(self.schedule.table(lr))


class Coded:
    """A moment in 8 bits: the codes and, behind them in the same memory, the scale of every 256 of them."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        raw = torch.zeros(coded_bytes(size), dtype=torch.uint8, device=device)
        self.codes, self.scales = _codes_and_scales(raw, size, dtype)
        # Two codes say nothing of how far apart their numbers are: a certificate of the step is to compare those.
        made_record(self.codes).numbers = partial(_numbers, size=size, dtype=dtype)


def coded_bytes(size: int) -> int:
    return size + 4 * -(-size // BLOCK)


def _codes_and_scales(raw: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return raw[:size].view(dtype), raw[size:].view(torch.float32)


def _numbers(raw: Tensor, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """What these bytes stand for, part by part."""
    codes, scales = _codes_and_scales(raw, size, dtype)
    for part, scale in zip(codes.split(BLOCK * PART_BLOCKS), scales.split(PART_BLOCKS)):
        yield decode(part, scale)


class FlatAdamW8bit(FlatAdamW):
    """FlatAdamW with coded moments, a pair for each group: blocks of 256 begin where a group does."""

    def hasten(self) -> None:
        """Its kernels are the same in every caller's shape; they are tested at their first use."""

    def _begin_moments(self, layout: FlatLayout) -> None:
        sizes = {group: group.stop - group.start for group in layout.groups}
        self.m8 = {group: Coded(size, torch.int8, layout.device) for group, size in sizes.items()}
        self.v8 = {group: Coded(size, torch.uint8, layout.device) for group, size in sizes.items()}

    @property
    def moments(self) -> list[Tensor]:
        return [coded.codes for coded in (*self.m8.values(), *self.v8.values())]

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Codes by parameter, scales by group: a block may hold the end of one parameter and the beginning of the next."""
        for kind, moments in (("m", self.m8), ("v", self.v8)):
            for number, (group, coded) in enumerate(moments.items()):
                yield f"scale.{kind}.{number}", coded.scales
                for slot in self.weights.layout.slots_of(group):
                    yield f"{kind}.{slot.name}", slot.view(coded.codes, group.start)

    def _advance(self, group: Group, weight: Tensor, gradient: Tensor, *rest: Any) -> None:
        m, v = self.m8[group], self.v8[group]
        adamw8(weight, gradient, m.codes, v.codes, m.scales, v.scales, *rest)


class FlatMuon(FlatAdamW):
    """FlatAdamW with another rule for the groups that Muon takes; `m` is their momentum, and `v` does not reach them."""

    def __init__(self, config: Muon, *arguments):
        super().__init__(config.rest, *arguments)
        self.muon, self._ratio = config, config.lr / config.rest.lr
        layout = self.weights.layout
        self._stacks: list[tuple[Group, Tensor, list[FlatSlot]]] = []
        for group, finest in zip(layout.groups, self.weights.finest()):
            slots = layout.slots_of(group) if group.rule == MUON else []
            for shape in dict.fromkeys(slot.parameter.shape for slot in slots):
                self._stacks.append((group, finest, [slot for slot in slots if slot.parameter.shape == shape]))

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        super().carry_out(gradient, plan, report)
        muon, go, lr = self.muon, plan[0] != 0, (report[4] * self._ratio).float()
        for group, finest, slots in self._stacks:
            momenta, weights = [slot.view(self.m) for slot in slots], [slot.view(finest, group.start) for slot in slots]
            g = torch.stack([slot.view(gradient) for slot in slots]) * plan[1]
            m_old, p_old = torch.stack(momenta), torch.stack(weights)
            m = m_old.lerp(g, 1 - muon.momentum)
            u = orthogonal(g.lerp(m, muon.momentum) if muon.nesterov else m, muon.iterations)
            size = 0.2 * max(u.shape[-2:]) ** 0.5
            p = p_old * (1 - lr * muon.weight_decay) - lr * size * u
            torch._foreach_copy_(momenta, list(torch.where(go, m, m_old).unbind()))
            torch._foreach_copy_(weights, list(torch.where(go, p, p_old).unbind()))
        for group, flat, master in self.weights.rounded:
            if group.rule == MUON:
                flat.copy_(master)


def orthogonal(x_KRC: Tensor, iterations: int) -> Tensor:
    """The nearest orthogonal matrix to each of K (R rows, C columns), roughly: bf16, by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    tall = x_KRC.shape[1] > x_KRC.shape[2]
    x = x_KRC.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
