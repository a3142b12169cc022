"""Where every parameter lies in the flat buffers, and the weights moved into them.

One buffer for the gradients, one for each moment, one for the weights: zeroing, the norm and the update are then one launch
each, whatever the model. The order is dtype by dtype and, within a dtype, first what decays, then what does not. Parameters
that lie side by side in one storage, as q, k and v, stay so in the same order: their gradients then come from one product, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from ..layers.weight_memory import overlapping

VERSION = attrgetter("_version")
ADAMW, MUON = "adamw", "muon"  # the rules of update; AdamW's groups come first
ALIGN = 64  # elements: 128 bytes at 16 bits, what the widest loads and the tensor cores ask for
SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlatSlot:
    """One parameter's place: `start` counts elements from the beginning of the flat buffers."""

    name: str
    parameter: Parameter
    start: int

    def view(self, buffer: Tensor, base: int = 0) -> Tensor:
        """This parameter's elements of `buffer` (which begins at element `base`), in the parameter's own shape and strides."""
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
    """The whole plan. Nothing is allocated by it."""

    slots: tuple[FlatSlot, ...]
    groups: tuple[Group, ...]
    device: torch.device

    @property
    def size(self) -> int:
        return self.groups[-1].stop

    @property
    def adamw_size(self) -> int:
        return max((group.stop for group in self.groups if group.rule == ADAMW), default=0)

    def bytes(self, masters: bool) -> dict[str, int]:
        """What training takes besides moments and activations, before any of it is allocated. `masters`: behind 16 bits."""
        counts = [(group.dtype, group.stop - group.start) for group in self.groups]
        return {
            "weights": sum(n * dtype.itemsize for dtype, n in counts),
            "masters": sum(4 * n for dtype, n in counts if masters and dtype != torch.float32),
            "gradient": 4 * self.size,
        }

    def slots_of(self, group: Group) -> list[FlatSlot]:
        return [slot for slot in self.slots if group.start <= slot.start < group.stop]


def matrices(name: str, parameter: Parameter) -> bool:
    """The usual rule of weight decay: matrices and embeddings decay, gains and biases do not."""
    return parameter.dim() > 1


def lay_out(
    named: Iterable[tuple[str, Parameter]],
    dtype: torch.dtype | None = None,
    decays: Callable[[str, Parameter], bool] = matrices,
    muon: Callable[[str, Parameter], bool] = lambda name, parameter: False,
    others: Iterable[tuple[str, Tensor]] = (),
) -> FlatLayout:
    """A place for every parameter that is trained, a tied one once, under its first name. `dtype` None keeps each its own.

    `others` are tensors that stay where they are, as a model's buffers: none of them may lie over a trained parameter's memory.
    """
    named = list(named)
    chosen = _trained(named)
    _check_apart(chosen, [*((name, p) for name, p in named if not p.requires_grad), *others])
    kinds = {id(p): (MUON if muon(name, p) else ADAMW, dtype or p.dtype, decays(name, p)) for name, p in chosen}
    names = {id(p): name for name, p in chosen}
    slots, groups, at = [], [], 0
    for rule, wanted in sorted(dict.fromkeys(kind[:2] for kind in kinds.values()), key=lambda kind: kind[0] == MUON):
        start = at
        for decaying in (True, False):
            for run in _runs([p for _, p in chosen if kinds[id(p)] == (rule, wanted, decaying)]):
                for parameter in run:
                    slots.append(FlatSlot(names[id(parameter)], parameter, at))
                    at += parameter.numel()
                at = -(-at // ALIGN) * ALIGN
            if decaying:
                decay_stop = at
        groups.append(Group(wanted, rule, start, decay_stop, at))
    return FlatLayout(tuple(slots), tuple(groups), chosen[0][1].device)


def counted(dtype: torch.dtype, of_adamw: int, of_muon: int = 0) -> FlatLayout:
    """The layout of so many numbers, but for the gaps that align parameters: its size, before there are weights."""
    groups = [Group(dtype, ADAMW, 0, of_adamw, of_adamw)]
    groups += [Group(dtype, MUON, of_adamw, of_adamw + of_muon, of_adamw + of_muon)] if of_muon else []
    return FlatLayout((), tuple(groups), torch.device("meta"))


def _trained(named: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    first: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if type(parameter) is not Parameter:
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
    """Two tensors over the same memory are one weight to the user, but would be two after the move."""
    trained = {name for name, _ in chosen}
    for pair in overlapping([*chosen, *others]):
        if moved := [name for name in pair if name in trained]:
            raise ValueError(
                f"parameters: {pair[0]} and {pair[1]} are two tensors over the same memory, and {moved[0]} is to move into a "
                f"flat buffer; tie them by giving both modules the one Parameter object."
            )


def _runs(parameters: list[Parameter]) -> list[list[Parameter]]:
    """The parameters in their order, those that lie one behind the other in one storage together and in the storage's order."""
    order = {id(p): i for i, p in enumerate(parameters)}
    whole = [p for p in parameters if _whole(p)]
    begins, ends = {_begin(p): p for p in whole}, {_end(p) for p in whole}
    runs = [[p] for p in parameters if not _whole(p) or _begin(p) not in ends]
    for run in runs:
        while _whole(run[-1]) and (behind := begins.get(_end(run[-1]))) is not None:
            run.append(behind)
    return sorted(runs, key=lambda run: min(order[id(p)] for p in run))


def _whole(p: Tensor) -> bool:
    """Without gaps: by its rows, or by its columns, as the b of adapters that are one matrix side by side."""
    return p.is_contiguous() or (p.dim() == 2 and p.t().is_contiguous())


def _begin(p: Tensor) -> tuple[int, int]:
    return p.untyped_storage().data_ptr(), p.data_ptr()


def _end(p: Tensor) -> tuple[int, int]:
    return p.untyped_storage().data_ptr(), p.data_ptr() + p.nbytes


class Weights:
    """The parameters moved into flat buffers, one a group, perhaps with fp32 masters. The Parameter objects stay the same."""

    part = 0  # which of the ranks' parts of every parameter's rows these are

    def __init__(self, layout: FlatLayout, masters: bool):
        self.layout = layout
        self.flat: list[Tensor] = []
        self.masters: list[Tensor | None] = []
        for group in layout.groups:
            flat = torch.zeros(group.stop - group.start, dtype=group.dtype, device=layout.device)
            master = torch.zeros_like(flat, dtype=torch.float32) if masters and group.dtype != torch.float32 else None
            for slot in layout.slots_of(group):
                home, parameter = slot.view(flat, group.start), slot.parameter
                home.copy_(parameter.detach())
                if master is not None:
                    slot.view(master, group.start).copy_(parameter.detach())  # from the original: an fp32 one is kept whole
                parameter.grad = None  # of another dtype it could not stay
                parameter.data = home
            self.flat.append(flat)
            self.masters.append(master)

        kept = zip(layout.groups, self.flat, self.masters)
        self.rounded = [(group, flat, master) for group, flat, master in kept if master is not None]
        self._parameters = [slot.parameter for slot in layout.slots]
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._versions = list(map(VERSION, self._parameters))

    def stepped(self) -> None:
        """Tell who watches versions that an update has written them: to torch, a kernel's or a graph's writes are none."""
        torch.autograd.graph.increment_version(self._parameters)
        # Or the next step would take them for somebody else's writes and read all of them back.
        self._versions = list(map(VERSION, self._parameters))

    def check(self) -> None:
        """That every parameter still lies where it was put, or the update would miss it (a cast, a move, an assigning load).

        New values copied into the weights since, as by load_state_dict, become their masters' too.
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
        """Where a 16-bit weight is not its master rounded, somebody wrote it and the master follows; elsewhere it stays."""
        for _, flat, master in self.rounded:
            master.copy_(torch.where(flat == master.to(flat.dtype), master, flat.to(torch.float32)))

    def of_norm(self, gradient: Tensor) -> Tensor:
        """What has the norm of the whole gradient: the flat gradient itself, where that is all of it."""
        return gradient

    def finest(self) -> list[Tensor]:
        """The flat buffers that the update is kept in: the masters where there are any."""
        return [flat if master is None else master for flat, master in zip(self.flat, self.masters)]

    def by_name(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(a weight, the same where the update is kept: its master if it has one), by the parameter's name."""
        groups = zip(self.layout.groups, self.finest())
        return {
            slot.name: (slot.parameter.detach(), slot.view(finest, group.start))
            for group, finest in groups
            for slot in self.layout.slots_of(group)
        }

    def round_masters(self) -> None:
        """The 16-bit weights from their masters, as after an update."""
        for _, flat, master in self.rounded:
            flat.copy_(master)
