"""The work of one step on the device, from zeroed accumulators to updated weights: straight-line code, run or captured.

Its parts are `begin`, `add` and `update`, so that graphs of the last two serve steps of any number and shapes of micro-batches;
and the update consists of `sum` over all ranks and `apply`, for a graph without collectives.
Each micro-batch's loss is a sum over its items, and backward runs on it undivided. The number of items of all micro-batches is
known after the last forward, and the one division by it is part of the update's factor (kernels/adamw.py). So micro-batches of
different fill are exact, nothing has to be counted in advance, and the division costs nothing.

The report is seven scalars on the device. Each step also copies them to pinned memory in stream order; reading them waits only
while that step is still running. Reading one step late keeps the device busy (docs/training.md).

With updates inside backward (`BackwardUpdate`), each block's weights move as soon as its gradient is complete, and the next one
takes its memory. With one micro-batch a step, a gradient is complete as soon as backward has passed its block. Only the largest
block, the largest matrix outside of blocks, and all that is no matrix then need fp32 memory, instead of 4 bytes for every
parameter. What an update needs is known by then, the number of items and the rate, but not the norm of the whole gradient:
nothing is clipped.

The numbers are those of an update after backward, bit for bit, where all is finite. A loss that is not finite moves no weight.
A block whose gradient is not finite keeps its weights, the others move, and the step is counted as skipped.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..device import products
from ..distributed import ALONE
from ..distributed.failures import FOR_GPU
from ..kernels.accumulate import close_sums, deliver_all, ensure_record
from ..kernels.adamw import BLOCK
from ..kernels.dispatch import compile_ahead, start_self_tests
from ..layers.invariant import BatchInvariant
from ..lora.model import calls_of_batch
from ..models.registry import put_back
from .accumulate import ALIGN, Accumulators, FlatLayout, FlatSlot, Group
from .adamw import AdamW, AdamW8bit, FlatAdamW
from .objectives import Objective
from .offload import blocks_of
from .precision import Fp8Weights, Precision
from .sharding import Replicated, Sharded

WHERE = "update_in_backward"


@dataclass
class Range:
    """Adjacent parameters of a group: elements start to stop of the flat buffers, whose gradient begins at `at`."""

    group: Group
    start: int
    stop: int
    at: int


@dataclass(eq=False)
class UpdateUnit:
    """Parameters that are updated together. Those of all units of one `area` have the same memory for their gradients, one
    after the other; None: memory that no other unit has."""

    area: str | None
    slots: list[FlatSlot] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)


class BackwardUpdate(Accumulators):
    """Accumulators whose units share memory, and the update of each unit within backward."""

    def __init__(self, layout: FlatLayout, model: nn.Module, optimizer: AdamW):
        self.units = units_of(layout, model)
        self._size, self._begins = place_ranges(layout, self.units)
        if isinstance(optimizer, AdamW8bit):
            _check_moments(layout, self.units)
        unit_of = {id(slot): unit for unit in self.units for slot in unit.slots}
        self._units = [unit_of[id(slot)] for slot in layout.slots]
        self._updating = threading.RLock()  # autograd may run some nodes in the caller's thread
        super().__init__(layout)

    def allocate(self) -> Tensor:
        return torch.zeros(self._size, device=self.layout.device, dtype=torch.float32)

    def view(self, slot: FlatSlot) -> Tensor:
        return slot.view(self.gradient, self._begins[slot.name])

    def settle(self, parameters: Any) -> None:
        """Complete these parameters' gradients. Those of other units wait: their memory may still be in use."""
        own = {id(parameter) for parameter in parameters}
        with self._lock:
            ready = [pair for pair in self._pending if id(pair[0]) in own]
            self._pending = [pair for pair in self._pending if id(pair[0]) not in own]
        deliver_all(ready)
        close_sums(parameters)

    def _settle(self) -> None:
        """Do nothing: `settle` delivers gradients when their unit is complete."""

    @contextmanager
    def updating(self, optimizer: FlatAdamW, totals: Tensor) -> Iterator[None]:
        """Update each unit as the backward inside the block completes it, and after it those that it did not complete.

        totals  sum of losses and number of items
        """
        self._optimizer = optimizer
        self._plan, self.report = optimizer.plan(self.gradient[:0], totals)
        self._square = torch.zeros((), device=self.layout.device, dtype=torch.float64)
        self._left = {id(unit): len(unit.slots) for unit in self.units}
        # New hooks for each backward: a node kept over steps keeps its stream, and a capture on another one would wait for it.
        nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]
        handles = [node.register_hook(partial(self._arrived, unit)) for node, unit in zip(nodes, self._units)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for unit in self.units:
            if self._left[id(unit)]:
                self._update(unit)
        self._complete_report()

    def _arrived(self, unit: UpdateUnit, *_: Any) -> None:
        with self._updating:
            self._left[id(unit)] -= 1
            if not self._left[id(unit)]:
                self._update(unit)

    @torch.no_grad()
    def _update(self, unit: UpdateUnit) -> None:
        self.settle([slot.parameter for slot in unit.slots])
        self._left[id(unit)] = 0
        for other in self.units:
            if unit.area is None or other.area != unit.area or not self._left[id(other)]:
                continue
            if early := next((s.name for s in other.slots if ensure_record(s.parameter).opening is None), None):
                raise ValueError(
                    f"TrainStep: {WHERE}: backward gave {early} a gradient before that of {unit.slots[-1].name} was complete, "
                    f"and both are to have the same memory; leave {WHERE} out for this model."
                )
        gradients = [self.gradient[r.at : r.at + r.stop - r.start] for r in unit.ranges]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        self._square += square
        plan = torch.where(square.isfinite(), self._plan, 0.0)
        for gradient, r in zip(gradients, unit.ranges):
            self._optimizer.advance(r.group, r.start, r.stop, gradient, plan)

    @torch.no_grad()
    def _complete_report(self) -> None:
        """Put the norm of the whole gradient into the report; count a step in which a unit kept its weights as skipped."""
        self.report[1] = self._square.sqrt() * self._plan[1]
        skipped = (~self._square.isfinite() & (self._plan[0] != 0)).double()
        self._optimizer.state[1] += skipped
        self.report[3] += skipped


def check(
    accumulate: int, clip: float | None, precision: Precision, optimizer: Any, alone: bool = True, overlap: bool = False
) -> None:
    """Raise ValueError for a step whose update must wait for the end of backward."""
    for why, wanted in (
        (
            accumulate != 1 and f"accumulate is {accumulate}, so gradients are complete in the last backward alone",
            "accumulate=1",
        ),
        (clip is not None and f"clip is {clip}, which needs the norm of the whole gradient before any update", "clip=None"),
        (not isinstance(optimizer, AdamW) and f"{type(optimizer).__name__} updates all at once", "AdamW or AdamW8bit"),
        (precision.loss_scale and "fp16 skips a step by its whole gradient", "precision='bf16'"),
        (precision.fp8 and "fp8 measures all gradients before an update", "precision='bf16'"),
        (not alone and "gradients are summed over ranks", "one process"),
        (overlap and "overlap adds gradients on another stream", "overlap=False"),
    ):
        if why:
            raise ValueError(f"TrainStep: {WHERE}: {why}; take {wanted}, or leave {WHERE} out.")


def gradient_bytes(layout: FlatLayout, model: nn.Module) -> int:
    """Return the bytes of the memory that the gradients share."""
    return 4 * place_ranges(layout, units_of(layout, model))[0]


def units_of(layout: FlatLayout, model: nn.Module) -> list[UpdateUnit]:
    """Return the matrices of each block, every other matrix, and all that is no matrix."""
    try:
        blocks = blocks_of(model)
    except ValueError as error:
        raise ValueError(
            f"TrainStep: {WHERE}: {type(model).__name__} has no list of blocks of one class (nn.ModuleList, nn.Sequential), "
            f"whose gradients could take turns; leave {WHERE} out."
        ) from error
    block_of = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
    units: dict[str, UpdateUnit] = {}
    for slot in layout.slots:
        number = block_of.get(id(slot.parameter))
        if slot.parameter.dim() < 2:
            key, unit = "vectors", UpdateUnit(None)
        else:
            key, unit = (slot.name, UpdateUnit("others")) if number is None else (str(number), UpdateUnit("blocks"))
        units.setdefault(key, unit).slots.append(slot)
    return list(units.values())


def place_ranges(layout: FlatLayout, units: list[UpdateUnit]) -> tuple[int, dict[str, int]]:
    """Fill the units' ranges. Return the size of the memory, and by slot where the flat buffers would begin in it."""
    ends = {slot.name: slot.start + slot.parameter.numel() for slot in layout.slots}
    sizes: dict[str | None, int] = {}
    for unit in units:
        at = 0
        for slot in unit.slots:
            group = next(group for group in layout.groups if group.start <= slot.start < group.stop)
            last = unit.ranges[-1] if unit.ranges else None
            # Memory that no other unit has holds zeros between two parameters, as the weights do.
            near = last is not None and slot.start - last.stop < (ALIGN if unit.area is None else 1)
            if last is not None and near and last.group is group:
                last.stop = ends[slot.name]
            else:
                at = 0 if last is None else -(-(last.at + last.stop - last.start) // ALIGN) * ALIGN
                unit.ranges.append(Range(group, slot.start, ends[slot.name], at))
        last = unit.ranges[-1]
        size = -(-(last.at + last.stop - last.start) // ALIGN) * ALIGN
        sizes[unit.area] = max(size, sizes.get(unit.area, 0))
    begin, begins = 0, dict[str, int]()
    for area, size in sizes.items():
        for unit in (unit for unit in units if unit.area == area):
            for r in unit.ranges:
                r.at += begin
                begins |= {slot.name: r.start - r.at for slot in unit.slots if r.start <= slot.start < r.stop}
        begin += size
    return begin, begins


def _check_moments(layout: FlatLayout, units: list[UpdateUnit]) -> None:
    """Raise ValueError if two ranges have moments in one block of 8 bits, whose scale is common."""
    owners: dict[tuple[int, int], Range] = {}
    for r in (r for unit in units for r in unit.ranges):
        for element in (r.start, r.stop - 1):
            owner = owners.setdefault((r.group.start, (element - r.group.start) // BLOCK), r)
            if owner is not r:
                names = [next(slot.name for slot in layout.slots if slot.start == start) for start in (owner.start, r.start)]
                raise ValueError(
                    f"TrainStep: {WHERE}: AdamW8bit has a scale for {BLOCK} moments, and {' and '.join(names)}, which are "
                    f"updated one after the other, share one; take AdamW."
                )


Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor | int]]


@dataclass(eq=False)
class DeviceStep:
    """Model, loss, accumulators and optimizer; `run` takes a step without waiting for anything."""

    model: nn.Module
    loss: Loss | Objective
    accumulators: Accumulators
    optimizer: FlatAdamW
    precision: Precision
    single: bool  # a step has one micro-batch
    sharding: Replicated
    fp8: Fp8Weights | None
    exact: bool = False  # whether forward is batch-invariant

    def __post_init__(self) -> None:
        self.device = self.accumulators.layout.device
        # The sum of the loss, the number of items, and how many ranks had no micro-batch.
        self.summed = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.totals = self.summed[:2]
        self.one = torch.ones((), device=self.device, dtype=torch.float32)
        self.ranks = self.sharding.ranks
        self.sharded = self.sharding if isinstance(self.sharding, Sharded) else None
        self.early = self.accumulators if isinstance(self.accumulators, BackwardUpdate) else None
        self.reduces = self.ranks is not ALONE
        self.reduction = self.accumulators.reduction(self.ranks, [self.summed], [] if self.fp8 is None else [self.fp8.largest])
        # Compiled code would bake in whether a sum was opened when it was traced.
        self._compiled = any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in self.model.modules())

    def run(self, batches: Sequence[Any]) -> Tensor:
        """Run forward and backward of every batch and one update; return the report of kernels.plan_update."""
        self.begin()
        for number, batch in enumerate(batches, 1):
            self.add(batch, last=number == len(batches))
        return self.update()

    def begin(self) -> None:
        """Begin a step. A single micro-batch overwrites the last gradients; several add to zeros."""
        self.accumulators.begin() if self.single and not self._compiled else self.accumulators.zero()
        self.summed.zero_()
        if self.reduces:
            self.reduction.begin()

    def add(self, batch: Any, last: bool = False) -> None:
        """Add the loss, items and gradients of a micro-batch to those before. `last`: sums over ranks may begin."""
        mode, sharded = self.precision.products, self.sharded
        with torch.enable_grad(), nullcontext() if mode is None else products(mode):
            if sharded is None:
                total, items = self._loss_of(batch)
            else:
                total, items = sharded.loss(partial(self._loss_of, batch))
                sharded.before_backward(last)
            self.totals[0].add_(total.detach())
            self.totals[1].add_(items)
            listening = self.reduction.listening() if last and self.reduces else nullcontext()
            updating = nullcontext() if self.early is None else self.early.updating(self.optimizer, self.totals)
            with listening, updating, nullcontext() if (side := self.accumulators.side) is None else side.open():
                total.backward()
        if self.fp8 is not None:
            self.fp8.forget()

    def finish(self) -> None:
        """Complete this rank's sums, after its last micro-batch."""
        self.accumulators.finish()
        if self.fp8 is not None:
            self.fp8.look()

    def sum(self) -> None:
        """Sum over all ranks."""
        if self.reduces:
            self.reduction.finish()

    def apply(self) -> Tensor:
        """Update the weights, unless backward has, and return the report."""
        if self.early is not None:
            return self.early.report
        if self.fp8 is not None:
            self.fp8.renew()
        gradient = self.accumulators.gradient
        of_norm = gradient if self.sharded is None else self.sharded.of_norm(gradient)
        return self.optimizer.update(gradient, self.totals, of_norm)

    def update(self) -> Tensor:
        """Complete the sums and update the weights."""
        self.finish()
        self.sum()
        return self.apply()

    def take_part(self) -> Tensor | None:
        """Take part in a step without a micro-batch; return None if no rank has one. Waits for the device."""
        self.begin()
        self.summed[2] = 1
        self.finish()
        self.sum()
        return None if self.summed[2].item() == self.ranks.world else self.apply()

    def compile_update(self) -> None:
        """Begin to compile the kernels of the update, and their self-tests, whose examples are smaller than models of more than
        2^31 elements: these count in 64 bits, and theirs were compiled after the first backward, for 2.9 s."""
        gradient, optimizer = self.accumulators.gradient, self.optimizer
        if optimizer.fused_update and optimizer.host is None and self.early is None and self.sharded is None:
            compile_ahead(lambda: optimizer.update(gradient, self.totals, gradient), self.device)

    def start_self_tests(self, batch: Any) -> None:
        """Start the self-tests of the products with adapters, which depend on the number of tokens."""
        start_self_tests(calls_of_batch(self.model, batch), self.device, self.precision.dtype)

    def prepare(self, batch: Any) -> None:
        """Prepare the first step with one batch; the state of a step is unchanged afterwards.

        This finds fp8's first scales and, with several ranks, the order in which backward finishes parameters.
        """
        if self.fp8 is not None and not self.fp8.calibrated:
            with self._trying(), self.fp8.calibrating():
                self.add(batch)
            self.ranks.take_largest(self.fp8.states)
        if self.reduction.learns:
            with self._trying(), put_back([] if self.fp8 is None else [self.fp8.states]):
                self.reduction.learn(lambda: self.add(batch, last=True))

    @contextmanager
    def _trying(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), put_back(self.model.buffers()):
            self.accumulators.zero()
            yield
        # Else a capture would copy sums that are not zero to host memory: 32 GB of 8B's, and back before each round.
        self.accumulators.zero()
        self.summed.zero_()

    def sums(self) -> list[Tensor]:
        """Return every tensor that a micro-batch writes, except the model's buffers."""
        fp8 = [] if self.fp8 is None else [self.fp8.states, self.fp8.largest]
        figures = self.loss.written() if isinstance(self.loss, Objective) else []
        return [self.accumulators.gradient, self.summed, *fp8, *figures]

    def state(self) -> list[Tensor]:
        """Return every tensor that a step writes, except the model's buffers."""
        optimizer = self.optimizer
        masters = [master for _, _, master in optimizer.weights.rounded]
        return [*self.sums(), optimizer.state, *optimizer.moments, *optimizer.weights.flat, *masters]

    def _loss_of(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        scale = self.optimizer.loss_scale
        with BatchInvariant() if self.exact else nullcontext():
            if isinstance(self.loss, Objective):  # it may compute gradients in forward, and needs the scale for that
                return _checked(self.loss(self.model, batch, scale=self.one if scale is None else scale.float()), self.device)
            total, items = _checked(self.loss(self.model, batch), self.device)
        return total if scale is None else total.float() * scale.float(), items


def _checked(result: Any, device: torch.device) -> tuple[Tensor, Tensor | int]:
    """Check types and shapes of a loss function's result: reading values would wait for the device."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"loss: got {_described(result)}, wanted two things, the sum of the loss over the valid items and their number; "
            f"return (loss.sum(), count), not a mean."
        )
    total, items = result
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point() or not total.requires_grad:
        raise ValueError(
            f"loss: its sum is {_described(total)}, wanted a floating-point scalar that requires grad; "
            f"reduce it with .sum() and keep it attached to what trains of the model. Adapters that are off or merged do not."
        )
    if isinstance(items, Tensor):
        if items.dim() or items.device != device:
            raise ValueError(
                f"loss: its number of items is {_described(items)}, wanted a scalar on {device}, or a Python number; "
                f"count on the device, as in (labels != -100).sum()."
            )
    elif not isinstance(items, int | float) or isinstance(items, bool):
        raise ValueError(f"loss: its number of items is {_described(items)}, wanted a scalar tensor or a Python number.")
    return total, items


def _described(thing: Any) -> str:
    if isinstance(thing, Tensor):
        grad = ", requires_grad" if thing.requires_grad else ""
        return f"a {thing.dtype} tensor of shape {tuple(thing.shape)} on {thing.device}{grad}"
    return f"a {type(thing).__name__}"


@dataclass(frozen=True)
class StepValues:
    """A step's report on the host. `skipped` counts the steps so far that were not finite, `updates` those that moved weights.

    A step in which no item counted (`tokens` 0) has no loss (nan), and neither count includes it.
    """

    loss: float
    grad_norm: float
    tokens: float
    skipped: int
    lr: float
    updates: int
    loss_scale: float
    waited_s: float | None = field(default=None, repr=False)
    """Time that this rank's device waited for other ranks' sums; None for one process, and for a sharded model."""


class StepResult:
    """One step's report: scalars on the device, which no later step overwrites, and `read()` for the host."""

    def __init__(
        self,
        report: Tensor,
        sums: Tensor | None = None,
        timing: Callable[[str], AbstractContextManager[None]] = ALONE.timing,
    ):
        """Begin to copy the report to the host.

        sums    int64 (2,), ns: begin and end of the device's wait for the step's sums
        timing  surrounds a wait for the report, which may be one for other ranks
        """
        self._report, self._timing = report, timing
        self._sums = sums if sums is None else sums.to("cpu", non_blocking=True, copy=True)
        self._on_host = report.to("cpu", non_blocking=True)  # from a GPU into pinned memory, in stream order
        self._sent = torch.cuda.current_stream(report.device).record_event() if report.is_cuda else None
        self._values: StepValues | None = None

    loss = property(lambda self: self._report[0], doc="mean loss over the step's valid items")
    grad_norm = property(lambda self: self._report[1], doc="global norm of the gradient of that mean, before clipping")
    tokens = property(lambda self: self._report[2], doc="valid items of all micro-batches")
    skipped = property(lambda self: self._report[3], doc="steps skipped so far because they were not finite")
    lr = property(lambda self: self._report[4], doc="the learning rate of this update")
    updates = property(lambda self: self._report[5], doc="updates applied so far")
    loss_scale = property(lambda self: self._report[6], doc="fp16's loss scale after this step; 1 elsewhere")

    def ready(self) -> bool:
        """Return whether `read` would return without waiting."""
        return self._values is not None or self._sent is None or self._sent.query()

    def read(self) -> StepValues:
        """Return the values on the host. Waits for this step only, and not at all once it is done."""
        if self._values is None:
            if self._sent is not None and not self._sent.query():
                with self._timing(FOR_GPU):
                    self._sent.synchronize()
            loss, norm, tokens, skipped, lr, updates, scale = self._on_host.tolist()
            begin, end = (0, 0) if self._sums is None else self._sums.tolist()
            waited = None if self._sums is None else (end - begin) / 1e9
            self._values = StepValues(loss, norm, tokens, int(skipped), lr, int(updates), scale, waited)
        return self._values

    def __repr__(self) -> str:
        return f"StepResult({self._values if self._values else 'not read'})"
