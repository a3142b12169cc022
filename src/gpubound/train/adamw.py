"""The trained weights in flat buffers, and the optimizers over them: AdamW, AdamW with 8-bit moments, Muon.

An update is one pass: one small kernel decides on the device whether and how to update (kernels/adamw.py).

8-bit moments are quantised in blocks of 256 elements of a rank's flat buffer, with one scale a block.

The elements of a block depend on the layout of the parameters, so a state records the layout. Under another layout, as with
another number of ranks, the moments are dequantised with their old scales and quantised in the new blocks.

Muon (Keller Jordan, 2024): the update of a matrix is its momentum, orthogonalised.

Five Newton-Schulz steps do that, in 16 bits where those are fast: every direction moves by the same amount, however weak its
gradient. Rates of AdamW carry over: an update has the same size (0.2 · √ of the longer side). AdamW updates the other
parameters under the same plan: one norm, one clip, one schedule, one skip.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..device import fast_bf16
from ..distributed import Ranks
from ..kernels import adamw, plan_update
from ..kernels.accumulate import ensure_record
from ..kernels.adamw import BLOCK, adamw8, decode, encode, join_fp32, number, plan_shape, split_fp32
from ..kernels.dispatch import start_self_tests
from ..layers.embedding_and_head import head_of
from ..layers.linear_product import full_tensor
from .accumulate import ADAMW, MUON, FlatLayout, FlatSlot, Group, lay_out, matrices
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
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not pair or not all(is_rate(beta) and beta < 1 for beta in self.betas):
            raise ValueError(f"{type(self).__name__}: betas must be two numbers from 0 to below 1, got {self.betas}.")

    def lay_out(self, model: nn.Module, named: Iterable[tuple[str, Parameter]], precision: Precision) -> FlatLayout:
        """Return the layout of the flat buffers of the parameters `named`, which are the model's, or its shards on this rank.
        Errors of the parameters are raised here, before the model is changed."""
        return lay_out(named, precision.dtype, self.decays, others=model.named_buffers())

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
                ensure_record(master).numbers = partial(_joined_parts, flat)
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

    def start_self_tests(self) -> None:
        """Start the self-tests of the kernels that an update calls."""
        layout = self.weights.layout
        constants = self.config.betas, self.config.weight_decay, self.clip, self.growth_interval
        start_self_tests([("plan_update", plan_shape(layout.size, *constants))], layout.device, torch.float32)
        for weight, master in zip(self.weights.flat, self.weights.masters):
            split = master is not None and self.weights.split
            kind = self.config.betas, self.config.eps, master is not None, self._seed is not None, split
            start_self_tests([("adamw", kind)], layout.device, weight.dtype)

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


CODED_PART = BLOCK << 13  # elements that are dequantised at a time: 8 MiB of fp32, and ten times as many of intermediates
PLACES = "places"  # name of the recorded layout in a state


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW that keeps its moments in 8 bits: 2 bytes per parameter instead of 8. Gradient and master weights stay in fp32."""

    def moment_bytes(self, layout: FlatLayout) -> int:
        return sum(2 * quantised_bytes(group.stop - group.start) for group in layout.groups)

    def flat(self, *rest: Any) -> "FlatAdamW":
        return FlatAdamW8bit(self, *rest)


class QuantisedMoment:
    """A moment in 8 bits: the quantised elements, followed in the same memory by the scale of each block of 256."""

    def __init__(self, raw: Tensor, size: int, dtype: torch.dtype):
        """Take the memory `raw`, zeros of quantised_bytes(size)."""
        self.codes, self.scales = _codes_and_scales(raw, size, dtype)
        # The certificate of a captured step compares the dequantised numbers, not the bytes.
        ensure_record(self.codes).numbers = partial(_numbers, size=size, dtype=dtype)


def quantised_bytes(size: int) -> int:
    return size + 4 * -(-size // BLOCK)


def _codes_and_scales(raw: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return raw[:size].view(dtype), raw[size:].view(torch.float32)


def _numbers(raw: Tensor, device: torch.device, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the numbers in parts, dequantised on `device`: a host would take seconds for a billion."""
    codes, scales = _codes_and_scales(raw, size, dtype)
    for part, scale in zip(codes.split(CODED_PART), scales.split(CODED_PART // BLOCK)):
        yield decode(part.to(device), scale.to(device))


def _blocks(shape: torch.Size, first: int, place: list[int]) -> Tensor:
    """Return the old block, counted over all ranks, of each element of rows from `first` on, from a parameter's old place."""
    blocks, start, rows, *strides = place
    row = torch.arange(first, first + shape[0], device="cpu")
    position, rank = start + row % rows * strides[0], row // rows
    for size, stride in zip(shape[1:], strides[1:]):
        position, rank = position[..., None] + torch.arange(size, device="cpu") * stride, rank[..., None]
    return rank * blocks + position // BLOCK


class FlatAdamW8bit(FlatAdamW):
    """FlatAdamW with quantised moments, a pair for each group: its blocks begin with the group."""

    loads = "scale.", PLACES
    kernel = staticmethod(adamw8)

    def start_self_tests(self) -> None:
        """Do nothing: `DeviceStep.compile_update` begins the self-tests of what an update calls."""

    def _begin_moments(self, layout: FlatLayout) -> None:
        sizes = {group: group.stop - group.start for group in layout.groups}
        self.m8, self.v8 = (
            {g: QuantisedMoment(self.memory.zeros(quantised_bytes(n), torch.uint8), n, dtype) for g, n in sizes.items()}
            for dtype in (torch.int8, torch.uint8)
        )

    @property
    def moments(self) -> list[Tensor]:
        return [coded.codes for coded in (*self.m8.values(), *self.v8.values())]

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield quantised moments by parameter and scales by group: a block may extend over two parameters."""
        yield PLACES, self._layout_rows()
        for kind, moments in self._by_name():
            for index, (group, coded) in enumerate(moments.items()):
                yield f"scale.{kind}.{index}", coded.scales
                for slot in self.weights.layout.slots_of(group):
                    yield f"{kind}.{slot.name}", slot.view(coded.codes, group.start)

    def _by_name(self) -> tuple[tuple[str, dict[Group, QuantisedMoment]], ...]:
        return ("m", self.m8), ("v", self.v8)

    def _layout_rows(self) -> Tensor:
        """Return a row of integers for every parameter, in the order of names: its group, the group's blocks on a rank, its
        offset in the group, its rows on a rank, and its strides."""
        layout = self.weights.layout
        width = max(1, *(slot.parameter.dim() for slot in layout.slots))
        rows_of = {}
        for index, (group, coded) in enumerate(self.m8.items()):
            for slot in layout.slots_of(group):
                codes = slot.view(coded.codes, group.start)
                strides = codes.stride() + (0,) * (width - codes.dim())
                rows_of[slot.name] = [index, len(coded.scales), slot.start - group.start, *(codes.shape or (1,))[:1], *strides]
        return torch.tensor([rows_of[name] for name in sorted(rows_of)], device="cpu")

    def load(self, state: Mapping[str, Tensor]) -> None:
        groups = state[PLACES][:, 0].unique().tolist() if PLACES in state else ()
        for name in (PLACES, *(f"scale.{kind}.{index}" for kind, _ in self._by_name() for index in groups)):
            if name not in state:
                raise ValueError(
                    f"load_state_dict: {name}: got nothing, wanted it beside moments in 8 bits; the state is another "
                    f"optimizer's, or an earlier version's; give all of what state_dict() gave."
                )

    @torch.no_grad()
    def loaded(self, state: Mapping[str, Tensor]) -> None:
        """Load the scales after the quantised elements; requantise if the state has another layout."""
        rows_of, part = state[PLACES].cpu(), self.weights.part
        same = rows_of.equal(self._layout_rows())
        for kind, moments in self._by_name():
            scales = {index: full_tensor(state[f"scale.{kind}.{index}"]) for index in rows_of[:, 0].unique().tolist()}
            for index, (group, coded) in enumerate(moments.items()):
                begin = part * len(coded.scales)
                if same and begin < len(scales[index]):
                    coded.scales.copy_(scales[index][begin : begin + len(coded.scales)])
                else:
                    self._requantise(group, coded, rows_of, {i: s.to(coded.scales.device) for i, s in scales.items()})

    def _requantise(self, group: Group, coded: QuantisedMoment, rows_of: Tensor, scales: dict[int, Tensor]) -> None:
        """Dequantise with the `scales` of the old layout, and quantise in the blocks of this one."""
        layout = self.weights.layout
        row_of = dict(zip(sorted(slot.name for slot in layout.slots), rows_of.tolist()))
        numbers = torch.zeros(len(coded.codes), device=layout.device, dtype=torch.float32)  # zeros between parameters
        for slot in layout.slots_of(group):
            codes, dequantised = (slot.view(t, group.start) for t in (coded.codes, numbers))
            if not codes.dim():
                codes, dequantised = codes.view(1), dequantised.view(1)
            index, *place = row_of[slot.name]
            first, at_once = self.weights.part * len(codes), max(1, CODED_PART // codes[0].numel())
            for begin in range(0, len(codes), at_once):
                these = codes[begin : begin + at_once]
                blocks = _blocks(these.shape, first + begin, place).to(layout.device).clamp_(max=len(scales[index]) - 1)
                dequantised[begin : begin + at_once] = number(these) * scales[index][blocks]
        for begin in range(0, len(numbers), CODED_PART):
            elements, its_scales = slice(begin, begin + CODED_PART), slice(begin // BLOCK, (begin + CODED_PART) // BLOCK)
            coded.codes[elements], coded.scales[its_scales] = encode(numbers[elements], coded.codes.dtype)

    def _moments_of(self, group: Group, inside: slice) -> list[Tensor]:
        m, v, blocks = self.m8[group], self.v8[group], slice(inside.start // BLOCK, -(-inside.stop // BLOCK))
        return [m.codes[inside], v.codes[inside], m.scales[blocks], v.scales[blocks]]


# The quintic whose slope at zero is steepest: it takes singular values from anywhere below one to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


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
    by_element: ClassVar[bool] = False

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

    def lay_out(self, model: nn.Module, named: Iterable[tuple[str, Parameter]], precision: Precision) -> FlatLayout:
        precision.check_rounded("Muon")
        takes = self.chooser(model)
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
        """Return the rule that chooses the parameters of `model` that Muon updates."""
        if self.takes is not None:
            return self.takes
        head = head_of(model)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(getattr(head, "weight", None))}
        linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
        return lambda name, parameter: id(parameter) in linear


def count_by_rule(model: Any, optimizer: Any) -> tuple[int, int]:
    """Return the numbers of trained elements that AdamW and Muon update. `model` may be on the meta device."""
    takes = optimizer.chooser(model) if isinstance(optimizer, Muon) else lambda name, parameter: False
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    by_muon = sum(p.numel() for name, p in trained if takes(name, p))
    return sum(p.numel() for _, p in trained) - by_muon, by_muon


class FlatMuon(FlatAdamW):
    """FlatAdamW with Muon's rule for its groups: `m` is their momentum, and they have no `v`."""

    fused_update = False

    def __init__(self, config: Muon, *arguments):
        super().__init__(config.rest, *arguments)
        self.muon, self._ratio = config, config.lr / config.rest.lr
        layout = self.weights.layout
        self._dtype = iteration_dtype(layout.device)
        self._stacks: list[tuple[Group, Tensor, list[FlatSlot]]] = []
        for group, finest in zip(layout.groups, self.weights.finest()):
            slots = layout.slots_of(group) if group.rule == MUON else []
            for shape in dict.fromkeys(slot.parameter.shape for slot in slots):
                self._stacks.append((group, finest, [slot for slot in slots if slot.parameter.shape == shape]))

    def agree(self, ranks: Ranks) -> None:
        """A CPU's dtype is measured, and two busy ranks may measure differently: all use the first rank's."""
        self._dtype = ranks.of_first(self._dtype)

    def carry_out(self, gradient: Tensor, plan: Tensor, report: Tensor) -> None:
        super().carry_out(gradient, plan, report)
        muon, go, lr = self.muon, plan[0] != 0, (report[4] * self._ratio).float()
        for group, finest, slots in self._stacks:
            momenta, weights = [slot.view(self.m) for slot in slots], [slot.view(finest, group.start) for slot in slots]
            g = torch.stack([slot.view(gradient) for slot in slots]) * plan[1]
            m_old, p_old = torch.stack(momenta), torch.stack(weights)
            m = m_old.lerp(g, 1 - muon.momentum)
            u = orthogonal(g.lerp(m, muon.momentum) if muon.nesterov else m, muon.iterations, self._dtype)
            size = 0.2 * max(u.shape[-2:]) ** 0.5
            p = p_old * (1 - lr * muon.weight_decay) - lr * size * u
            torch._foreach_copy_(momenta, list(torch.where(go, m, m_old).unbind()))
            torch._foreach_copy_(weights, list(torch.where(go, p, p_old).unbind()))
        for group, flat, master in self.weights.rounded:
            if group.rule == MUON:
                flat.copy_(master)


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of Newton-Schulz steps.

    They run in bf16, which is accurate enough, or in fp32 on a device where bf16 is slower: a CPU without bf16 units trained
    the demo's model at 1.6k tokens/s in bf16 and at 9.2k in fp32.
    """
    return torch.bfloat16 if fast_bf16(device) else torch.float32


def orthogonal(x_KRC: Tensor, iterations: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return approximately the nearest orthogonal matrix to each of K (R rows, C columns), by Newton-Schulz in `dtype`."""
    a, b, c = COEFFICIENTS
    tall = x_KRC.shape[1] > x_KRC.shape[2]
    x = x_KRC.to(dtype or iteration_dtype(x_KRC.device))
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
