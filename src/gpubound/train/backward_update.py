"""Updates inside backward: each block's weights move as soon as its gradient is complete, and the next one takes its memory.

With one micro-batch a step, a gradient is complete as soon as backward has passed its block. Only the largest block, the
largest matrix outside of blocks, and all that is no matrix then need fp32 memory, instead of 4 bytes for every parameter. What
an update needs is known by then, the number of items and the rate, but not the norm of the whole gradient: nothing is clipped.

The numbers are those of an update after backward, bit for bit, where all is finite. A loss that is not finite moves no weight.
A block whose gradient is not finite keeps its weights, the others move, and the step is counted as skipped.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..kernels.accumulate import close_sums, deliver_all
from ..kernels.adamw import BLOCK
from ..kernels.tensor_state import made_record
from .accumulate import Accumulators
from .adamw import AdamW, FlatAdamW
from .adamw8 import AdamW8bit
from .flat_layout import ALIGN, FlatLayout, FlatSlot, Group
from .precision import Precision
from .recompute import blocks_of

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
        self._check_turns(unit)
        gradients = [self.gradient[r.at : r.at + r.stop - r.start] for r in unit.ranges]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        self._square += square
        plan = torch.where(square.isfinite(), self._plan, 0.0)
        for gradient, r in zip(gradients, unit.ranges):
            self._optimizer.advance(r.group, r.start, r.stop, gradient, plan)

    def _check_turns(self, unit: UpdateUnit) -> None:
        """Raise ValueError if a unit with the same memory, which is not complete, has a gradient in it already."""
        for other in self.units:
            if unit.area is None or other.area != unit.area or not self._left[id(other)]:
                continue
            if early := next((s.name for s in other.slots if made_record(s.parameter).opening is None), None):
                raise ValueError(
                    f"TrainStep: {WHERE}: backward gave {early} a gradient before that of {unit.slots[-1].name} was complete, "
                    f"and both are to have the same memory; leave {WHERE} out for this model."
                )

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
