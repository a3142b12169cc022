"""Gradients summed in fp32, in one flat buffer, over any number of backward passes, without a host sync.

In bf16, 256 + 1 is 256: a gradient that is summed in the weights' 16 bits loses small contributions. Here every parameter has a
`main_grad`, an fp32 view of one flat buffer. The products of gpubound's layers add into it as they compute
(kernels/accumulate.py); for all other parameters a hook takes the gradient that autograd computed. These are added to the
buffer together, once a backward pass: a copy a parameter was 0.11 of the 1.06 ms of a small model's step.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..distributed import Ranks
from ..distributed.all_reduce import Reduction, SymmetricSums
from ..kernels.accumulate import Side, Taker, close_sums, deliver_all, main_gradient, open_sums
from ..kernels.tensor_state import drop_record, made_record
from ..trace import notice
from .flat_layout import FlatLayout, FlatSlot, lay_out

TOGETHER_BYTES = 64 << 20  # of gradients that are added together; more would not be worth the memory


class Accumulators:
    """Exact fp32 gradients of `named` parameters (as from model.named_parameters()), summed over backwards.

    `gradient` is flat and holds them all; each parameter.main_grad is its part of it. A sum begins in one of two ways.
    After `zero`, every backward adds. After `begin`, the first one writes, and `finish` must follow the last one. `side` is
    a second stream for additions during a backward; `peers` has the flat buffer where all ranks see it.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> sums = Accumulators([("weight", weight)])
    >>> for _ in range(257):
    ...     (weight * 1).sum().backward()
    >>> weight.main_grad
    tensor([257., 257.])
    """

    def __init__(
        self, named: Iterable[tuple[str, Parameter]] | FlatLayout, side: Side | None = None, peers: SymmetricSums | None = None
    ):
        self.layout = named if isinstance(named, FlatLayout) else lay_out(named)
        for slot in self.layout.slots:
            if main_gradient(slot.parameter, hooks_ran=True) is not None:
                raise ValueError(
                    f"Accumulators: {slot.name} already has a main_grad, so its gradients would be counted for one owner only; "
                    f"call release() on the other Accumulators (close() on the other TrainStep) first."
                )
        _listen_to_optimizers()
        self.side, self.peers = side, peers
        self.gradient = self.allocate()
        self._parameters = [slot.parameter for slot in self.layout.slots]
        self.opened = False  # between `begin` and `finish`
        self._hooks = []
        self._pending: list[tuple[Any, Tensor]] = []
        self._bytes = 0
        self._lock = threading.RLock()  # `settle` may be asked for in another thread than autograd's of the device
        for slot in self.layout.slots:
            slot.parameter.grad = None
            slot.parameter.main_grad = self.view(slot)  # type: ignore[attr-defined]
            made_record(slot.parameter).side = side
            self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(_TakeGradient(self)))

    def allocate(self) -> Tensor:
        size, device = self.layout.size, self.layout.device
        return torch.zeros(size, device=device, dtype=torch.float32) if self.peers is None else self.peers.mine.zero_()

    def view(self, slot: FlatSlot) -> Tensor:
        """Return the parameter's main_grad."""
        return slot.view(self.gradient)

    def zero(self) -> None:
        """Begin a new sum with one memset."""
        self._move_hooks_last()
        self.gradient.zero_()
        self._pending, self._bytes = [], 0  # of a backward that raised
        if self.opened:
            for parameter in self._parameters:
                made_record(parameter).opening = None
        self.opened = False

    def begin(self) -> None:
        """Begin a new sum without a memset: the first delivery to each main_grad writes. `finish` must follow the last one."""
        self._move_hooks_last()
        self._pending, self._bytes = [], 0
        open_sums(self._parameters)
        self.opened = True

    def finish(self) -> None:
        """Set what got nothing since `begin` to zero. After this `gradient` is the whole sum."""
        if self.opened:
            close_sums(self._parameters)
        self.opened = False

    def reduction(self, ranks: Ranks, sums: Sequence[Tensor], largest: Sequence[Tensor]) -> Reduction:
        """Return the reduction over ranks of `gradient` and `sums` (sums) and `largest` (maxima)."""
        slots, side = self.layout.slots, self.side
        return Reduction(
            ranks,
            self.gradient,
            [slot.parameter for slot in slots],
            [slot.start for slot in slots],
            {at for group in self.layout.groups for at in (group.start, group.decay_stop)},
            settle=self.settle,
            launch=(lambda work: work()) if side is None else (lambda work: side.run(work, ())),
            sums=sums,
            largest=largest,
            peers=self.peers,
        )

    def release(self) -> None:
        """Remove the hooks and main_grad. From now on gradients go to parameter.grad."""
        for hook in self._hooks:
            hook.remove()
        for slot in self.layout.slots:
            if hasattr(slot.parameter, "main_grad"):
                del slot.parameter.main_grad
                record = made_record(slot.parameter)
                record.opening = record.side = None
                drop_record(slot.parameter)
        self._hooks = []

    def settle(self, parameters: Sequence[Any]) -> None:
        """Complete these parameters' gradients in `gradient` now, during a backward that has computed them."""
        with self._lock:
            self._settle()
        if self.opened:
            close_sums(parameters)

    def _move_hooks_last(self) -> None:
        """Move these hooks, which set parameter.grad to None, after hooks that were registered later."""
        for parameter, handle in zip(self._parameters, self._hooks):
            hooks: dict = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if len(hooks) > 1:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd ignores move_to_end

    def _settle(self) -> None:
        pending, self._pending, self._bytes = self._pending, [], 0
        deliver_all(pending)


class _TakeGradient(Taker):
    """Hook that takes a gradient from autograd; it is in main_grad at the end of this backward pass at the latest."""

    def __init__(self, sums: Accumulators):
        self._sums = sums

    def __call__(self, parameter: Any) -> None:
        gradient, sums = parameter.grad, self._sums
        if gradient is None:
            return
        with sums._lock:
            if not sums._pending:
                Variable._execution_engine.queue_callback(sums._settle)  # type: ignore[attr-defined]
            sums._pending.append((parameter, gradient))
            sums._bytes += gradient.nbytes
            parameter.grad = None
            if sums._bytes > TOGETHER_BYTES:
                sums._settle()


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_pre_hook(_warn_if_nothing_moves)


def _warn_if_nothing_moves(optimizer: Any, *_: Any) -> None:
    """Warn of a usual training loop over a model whose gradients go into main_grad: it would train nothing."""
    if torch.compiler.is_compiling():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters) and any(hasattr(p, "main_grad") for p in parameters):
        notice(
            f"{type(optimizer).__name__}.step() moves nothing: gradients of its parameters go to a TrainStep that has the "
            f"model (or to Accumulators), and .grad is None; call close() on it before a loop of your own.",
            logging.WARNING,
        )
