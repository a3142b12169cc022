"""The work of one step on the device, from zeroed accumulators to updated weights: straight-line code, run or captured.

Its parts are `begin`, `add` and `update`, so that graphs of the last two serve steps of any number and shapes of micro-batches;
and the update consists of `sum` over all ranks and `apply`, for a graph without collectives.
Each micro-batch's loss is a sum over its items, and backward runs on it undivided. The number of items of all micro-batches is
known after the last forward, and the one division by it is part of the update's factor (kernels/adamw.py). So micro-batches of
different fill are exact, nothing has to be counted in advance, and the division costs nothing.

The report is seven scalars on the device. Each step also copies them to pinned memory in stream order; reading them waits only
while that step is still running. Reading one step late keeps the device busy (docs/training.md).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..device import products
from ..distributed import ALONE
from ..distributed.failures import FOR_GPU
from ..kernels.compile_ahead import compile_ahead
from ..kernels.dispatch import hasten
from ..layers.invariant import BatchInvariant
from ..lora.model import calls_of_batch
from ..models.registry import put_back
from .accumulate import Accumulators
from .adamw import FlatAdamW
from .backward_update import BackwardUpdate
from .objectives import Objective
from .precision import Fp8Weights, Precision
from .sharding import Replicated, Sharded

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

    def hasten(self, batch: Any) -> None:
        """Start the self-tests of the products with adapters, which depend on the number of tokens."""
        hasten(calls_of_batch(self.model, batch), self.device, self.precision.dtype)

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
