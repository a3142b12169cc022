"""The trained weights in flat buffers: the layout of the parameters, and the weights that are moved into them.

There is one buffer for the gradients, one for each moment, one for the weights: zeroing, the norm and the update are then one
launch each, for any model. Parameters are sorted by dtype and, within a dtype, by whether they decay. Parameters that are
adjacent in one storage, as q, k and v, stay adjacent in the same order: their gradients can then come from one product, too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels.adamw import join_fp32, split_fp32
from ..kernels.tensor_state import made_record
from ..layers.fused_weights import overlapping
from ..watch.pretend import PARAMETERS

VERSION = attrgetter("_version")
ADAMW, MUON = "adamw", "muon"  # the rules of update; AdamW's groups come first
ALIGN = 64  # elements: 128 bytes at 16 bits, what the widest loads and the tensor cores ask for
PART = 1 << 24  # elements that are joined or averaged at a time
SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
State = list[Tensor | None]  # moments and master, or None, of some elements


class StateMemory:
    """Memory of moments and masters, on the device that updates them."""

    offloads = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def reserve(self, parts: list[State]) -> None:
        """Make what the largest of these parts needs on its way."""

    def begin(self) -> None:
        """Begin an update of all parts."""

    def on_device(self, stored: State) -> AbstractContextManager[State]:
        """Return a context with the tensors of one part as they are updated."""
        return nullcontext(stored)

    def wait(self) -> None:
        """Wait until all that was launched can be read by the host, where it is in its memory."""


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
                f"parameters: {moved} no longer lies in the flat buffer it was moved to (a .to(), .data = or "
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

    def of_norm(self, gradient: Tensor) -> Tensor:
        """Return a tensor with the norm of the whole gradient: of replicas the flat gradient itself."""
        return gradient

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


def _joined_parts(flat: Tensor, raw: Tensor) -> Iterator[Tensor]:
    """Yield the masters of these remainders, perhaps a copy in host memory, in parts, for the comparison of two of them."""
    for weights, remainders in zip(flat.split(PART), raw.view(torch.int16).split(PART)):
        yield join_fp32(weights, remainders.to(weights.device))
