"""Which products of a model run in 8 bits (layers/fp8.py), and their scales: found before the first step, renewed at each.

Those of the linear layers inside the model's blocks, but for what is tied to an embedding. The head, norms, attention and the
residual stream stay in bf16. What is kept from step to step stays in fp32: masters, moments and gradient sums.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..device import label
from ..kernels.quantize import CAPABILITY, MULTIPLE
from ..kernels.record import drop_record, made_record
from ..layers.fp8 import SMALLEST, Fp8, new_states, renew
from ..layers.linear_site import AS_IT_IS, format_of, linear
from ..trace import fallback
from .flat_buffers import FlatLayout, FlatSlot
from .recompute import find_blocks


class Fp8Weights:
    """The weights of one model that are multiplied in 8 bits, until `release`."""

    def __init__(self, model: nn.Module, layout: FlatLayout):
        _check_device(layout.device)
        self.slots = _eligible(model, layout)
        self.states = new_states(len(self.slots), layout.device)
        self.calibrated = self._calibrating = False
        self._formats = [Fp8(states, lambda: self._calibrating) for states in self.states]
        for slot, format in zip(self.slots, self._formats):
            made_record(slot.parameter).format = format
        self._undo = _multiply_by_records(model)

    def forget(self) -> None:
        """Let the rounded weights go: a micro-batch may not read what another one made, which may be another graph's memory."""
        for format in self._formats:
            format.forget()

    def renew(self) -> None:
        """All micro-batches of a step are done: take the scales from what was seen."""
        renew(self.states)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Inside, every tensor is measured before it is rounded; what is not reached has its scale from the first step on."""
        self.forget()
        self._calibrating = True
        try:
            yield
        finally:
            self._calibrating = False
            self.forget()
        unreached = self.states[..., 0] == 0
        self.states[..., 0].masked_fill_(unreached, SMALLEST)
        self.calibrated = True

    def loaded(self) -> None:
        """The scales are those of another run now, unless that had none yet."""
        self.calibrated = bool(self.states[..., 0].any())

    def release(self) -> None:
        for slot in self.slots:
            made_record(slot.parameter).format = None
            drop_record(slot.parameter)
        for undo in self._undo:
            undo()


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (there := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ValueError(
            f"precision='fp8': {label(device)} has compute capability {there[0]}.{there[1]}, "
            f"wanted {CAPABILITY[0]}.{CAPABILITY[1]} or above (Ada, Hopper, Blackwell); take precision='bf16'."
        )


def _eligible(model: nn.Module, layout: FlatLayout) -> list[FlatSlot]:
    """The trained weights of plain linear layers inside the blocks, whose sides fp8 products can take."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        raise ValueError(
            f"precision='fp8': {type(model).__name__} has no list of blocks of one class (nn.ModuleList, nn.Sequential), "
            f"whose linear layers are multiplied in fp8; take precision='bf16'."
        ) from None
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    inside = {id(m.weight) for block in blocks for m in block.modules() if type(m) is nn.Linear} - tables
    chosen = [slot for slot in layout.slots if id(slot.parameter) in inside]
    fitting = [slot for slot in chosen if not any(side % MULTIPLE for side in slot.parameter.shape)]
    for slot in chosen:
        if slot not in fitting:
            rows, columns = slot.parameter.shape
            fallback("fp8 product", f"{slot.name} is {rows} x {columns}, no multiples of {MULTIPLE}; it is computed in bf16")
    if not fitting:
        raise ValueError(
            f"precision='fp8': no trained linear layer in the blocks of {type(model).__name__} has sides that are multiples "
            f"of {MULTIPLE}; take precision='bf16'."
        )
    return fitting


def _multiply_by_records(model: nn.Module) -> list[Callable[[], Any]]:
    """Let linear layers that no layer of ours multiplies look at their record: F.linear, which they call, knows of none."""
    ours = {id(child) for module in model.modules() if hasattr(module, "stacked") for child in module.children()}
    changed = []
    for module in model.modules():
        there = type(module) is nn.Linear and id(module) not in ours and format_of(module.weight) is not AS_IT_IS
        if there and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            changed.append(module)
    return [partial(delattr, module, "forward") for module in changed]


def _forward(layer: Any, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
