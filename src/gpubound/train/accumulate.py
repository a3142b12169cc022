"""Gradients summed in fp32, in one flat buffer, over any number of backward passes, without a host sync.

In bf16, 256 + 1 is 256: a gradient that is summed in the weights' 16 bits loses small contributions. Here every parameter has a
`main_grad`, an fp32 view of one flat buffer. The products of gpubound's layers add into it as they compute
(kernels/accumulate.py); for all other parameters a hook takes the gradient that autograd computed. These are added to the
buffer together, once a backward pass: a copy a parameter was 0.11 of the 1.06 ms of a small model's step.

`FlatLayout` is the layout of the flat buffers that hold the trained weights, their gradients and moments. There is one buffer
for the gradients, one for each moment, one for the weights: zeroing, the norm and the update are then one launch each, for any
model. Parameters are sorted by dtype and, within a dtype, by whether they decay. Parameters that are adjacent in one storage,
as q, k and v, stay adjacent in the same order: their gradients can then come from one product, too.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..distributed import Ranks
from ..distributed.all_reduce import Reduction, SymmetricSums
from ..kernels.accumulate import Side, Taker, close_sums, deliver_all, drop_record, ensure_record, main_gradient, open_sums
from ..layers.fused_weights import overlapping
from ..trace import notice
from ..watch.pretend import PARAMETERS

ADAMW, MUON = "adamw", "muon"  # the rules of update; AdamW's groups come first
ALIGN = 64  # elements: 128 bytes at 16 bits, what the widest loads and the tensor cores ask for
SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlatSlot:
    """The position of a parameter: `start` counts elements from the beginning of the flat buffers."""

    name: str
    parameter: Parameter
    start: int

    def view(self, buffer: Tensor, base: int = 0) -> Tensor:
        """Return this parameter's elements of `buffer` (beginning at element `base`), in the parameter's shape and strides."""
        strides = torch.empty_like(self.parameter, device="meta").stride()  # contiguous where the parameter's have gaps
        return buffer.as_strided(self.parameter.shape, strides, buffer.storage_offset() + self.start - base)


@dataclass(frozen=True)
class Group:
    """The parameters of one dtype and rule: elements start to stop of the flat buffers; those before decay_stop decay."""

    dtype: torch.dtype
    rule: str
    start: int
    decay_stop: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """The layout of all flat buffers. It allocates nothing."""

    slots: tuple[FlatSlot, ...]
    groups: tuple[Group, ...]
    device: torch.device

    @property
    def size(self) -> int:
        return self.groups[-1].stop

    @property
    def adamw_size(self) -> int:
        return max((group.stop for group in self.groups if group.rule == ADAMW), default=0)

    def bytes(self, masters: torch.dtype | None) -> dict[str, int]:
        """Return the bytes of training besides moments and activations. `masters`: dtype of those of 16-bit weights."""
        counts = [(group.dtype, group.stop - group.start) for group in self.groups]
        return {
            "weights": sum(n * dtype.itemsize for dtype, n in counts),
            "masters": sum(masters.itemsize * n for dtype, n in counts if masters and dtype != torch.float32),
            "gradient": 4 * self.size,
        }

    def slots_of(self, group: Group) -> list[FlatSlot]:
        return [slot for slot in self.slots if group.start <= slot.start < group.stop]


def matrices(name: str, parameter: Parameter) -> bool:
    """Return True for what weight decay usually applies to: matrices and embeddings, not gains and biases."""
    return parameter.dim() > 1


def lay_out(
    named: Iterable[tuple[str, Parameter]],
    dtype: torch.dtype | None = None,
    decays: Callable[[str, Parameter], bool] = matrices,
    muon: Callable[[str, Parameter], bool] = lambda name, parameter: False,
    others: Iterable[tuple[str, Tensor]] = (),
) -> FlatLayout:
    """Return the layout of the trained parameters, a tied one once, under its first name. `dtype` None keeps their dtypes.

    `others` are tensors that are not moved, as a model's buffers: none may share memory with a trained parameter.
    """
    named = list(named)
    chosen = _trained(named)
    _check_apart(chosen, [*((name, p) for name, p in named if not p.requires_grad), *others])
    rules = {id(p): (MUON if muon(name, p) else ADAMW, dtype or p.dtype, decays(name, p)) for name, p in chosen}
    names = {id(p): name for name, p in chosen}
    slots, groups, at = [], [], 0
    for rule, wanted in sorted(dict.fromkeys(key[:2] for key in rules.values()), key=lambda key: key[0] == MUON):
        start = at
        for decaying in (True, False):
            for run in _runs([p for _, p in chosen if rules[id(p)] == (rule, wanted, decaying)]):
                for parameter in run:
                    slots.append(FlatSlot(names[id(parameter)], parameter, at))
                    at += parameter.numel()
                at = -(-at // ALIGN) * ALIGN
            if decaying:
                decay_stop = at
        groups.append(Group(wanted, rule, start, decay_stop, at))
    return FlatLayout(tuple(slots), tuple(groups), chosen[0][1].device)


def counted(dtype: torch.dtype, of_adamw: int, of_muon: int = 0) -> FlatLayout:
    """Return the layout of this many elements, without the gaps that align parameters: its size, before there are weights."""
    groups = [Group(dtype, ADAMW, 0, of_adamw, of_adamw)]
    groups += [Group(dtype, MUON, of_adamw, of_adamw + of_muon, of_adamw + of_muon)] if of_muon else []
    return FlatLayout((), tuple(groups), torch.device("meta"))


def _trained(named: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    first: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if type(parameter) not in PARAMETERS:
            raise ValueError(
                f"parameters: {name} is a {type(parameter).__name__}, wanted a plain torch.nn.Parameter; "
                f"run a lazy module once before, and do not shard or quantise what is trained."
            )
        if parameter.numel():
            first.setdefault(id(parameter), (name, parameter))
    if not first:
        raise ValueError(
            "parameters: none of them has requires_grad=True, wanted at least one; unfreeze what is to be trained."
        )
    chosen = list(first.values())
    for name, parameter in chosen:
        if parameter.dtype not in SUPPORTED:
            raise ValueError(
                f"parameters: {name} is {parameter.dtype}, wanted torch.float32, torch.bfloat16 or torch.float16; "
                f"cast it, or freeze it with requires_grad_(False)."
            )
        if parameter.device != chosen[0][1].device:
            raise ValueError(
                f"parameters: {name} is on {parameter.device}, {chosen[0][0]} on {chosen[0][1].device}; "
                f"move the model to one device before it is trained."
            )
        if parameter.is_inference():
            raise ValueError(
                f"parameters: {name} was made inside torch.inference_mode(), and torch lets no such tensor train; "
                f"make or load the model outside of it."
            )
        if parameter.is_meta:
            raise ValueError(f"parameters: {name} is on the meta device and has no values yet; load the weights first.")
    return chosen


def _check_apart(chosen: list[tuple[str, Parameter]], others: list[tuple[str, Tensor]]) -> None:
    """Raise ValueError if a parameter shares memory with another tensor: they would be separate after the move."""
    trained = {name for name, _ in chosen}
    for pair in overlapping([*chosen, *others]):
        if moved := [name for name in pair if name in trained]:
            raise ValueError(
                f"parameters: {pair[0]} and {pair[1]} are two tensors over the same memory, and {moved[0]} is to move into a "
                f"flat buffer; tie them by giving both modules the one Parameter object."
            )


def _runs(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Group the parameters that are adjacent in one storage, in the storage's order."""
    order = {id(p): i for i, p in enumerate(parameters)}
    dense = [p for p in parameters if _dense(p)]
    begins, ends = {_begin(p): p for p in dense}, {_end(p) for p in dense}
    runs = [[p] for p in parameters if not _dense(p) or _begin(p) not in ends]
    for run in runs:
        while _dense(run[-1]) and (following := begins.get(_end(run[-1]))) is not None:
            run.append(following)
    return sorted(runs, key=lambda run: min(order[id(p)] for p in run))


def _dense(p: Tensor) -> bool:
    """Return whether a tensor has no gaps: by rows, or by columns, as the b of adapters that form one matrix by columns."""
    return p.is_contiguous() or (p.dim() == 2 and p.t().is_contiguous())


def _begin(p: Tensor) -> tuple[int, int]:
    return p.untyped_storage().data_ptr(), p.data_ptr()


def _end(p: Tensor) -> tuple[int, int]:
    return p.untyped_storage().data_ptr(), p.data_ptr() + p.nbytes


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
            ensure_record(slot.parameter).side = side
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
                ensure_record(parameter).opening = None
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
                record = ensure_record(slot.parameter)
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
        if gradient.is_sparse:  # of nn.Embedding(sparse=True): a buffer of sums is dense
            gradient = gradient.to_dense()
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
