"""What an aten op makes the host do: wait, or move bytes between host and device.

One table serves every sensor that sees ops: the ledger's and the guard's dispatch modes, and the pretend device. A mode
stands above composite kernels, so a kernel that reads from the device inside (a boolean mask calls nonzero) shows as one op
and needs a line here. `tests/watch/test_gpu.py` holds this table against what CUDA really does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

# Ops that read a size or a value back from the device before they can return. The words are what the user wrote, more or less.
SYNCS = {
    "aten._local_scalar_dense.default": "item",
    "aten.nonzero.default": "nonzero",
    "aten.masked_select.default": "masked_select",
    "aten._unique2.default": "unique",
    "aten.unique_dim.default": "unique",
    "aten.unique_consecutive.default": "unique_consecutive",
    "aten.unique_dim_consecutive.default": "unique_consecutive",
    "aten.equal.default": "torch.equal",
    "aten.allclose.default": "allclose",
    "aten.bincount.default": "bincount",
    "aten._linalg_check_errors.default": "linalg error check",
}

UP, DOWN = "copy to device", "copy to host"

# Ops that start nothing on the device. Views are recognised by their schema.
LAUNCHLESS = {
    "_local_scalar_dense",
    "_pin_memory",
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "detach_",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
}


@dataclass(slots=True)
class Move:
    """One thing that an op makes the host do. kind: 'sync' (wait for a value), 'h2d' or 'd2h' (a copy)."""

    kind: str
    what: str
    device: torch.device
    bytes: int = 0
    pinned: bool = False
    blocking: bool = True
    source: torch.Tensor | None = None  # an upload's host tensor

    @property
    def stalls(self) -> bool:
        """A pageable copy stalls even when it is said to be non_blocking: the driver stages it through its own pinned
        buffer.
        """
        return self.blocking or not self.pinned

    @property
    def manner(self) -> str:
        return f"{'pinned' if self.pinned else 'pageable'}, {'blocking' if self.blocking else 'non_blocking'}"


def on_host(where: torch.Tensor | torch.device) -> bool:
    device = where.device if isinstance(where, torch.Tensor) else where
    return device.type in ("cpu", "meta")


def tensors(values) -> Iterator[torch.Tensor]:
    """Every tensor among an op's arguments; aten nests them one list deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for inner in value:
                if isinstance(inner, torch.Tensor):
                    yield inner


def device_of(args, kwargs) -> torch.device | None:
    """Where an op runs: the first device among its tensors that is not the host's, else its device argument, else the host."""
    found = None
    for t in tensors(args):
        found = t.device
        if not on_host(t):
            return found
    for t in tensors(kwargs.values()):
        found = t.device
        if not on_host(t):
            return found
    if found is None and kwargs.get("device") is not None:
        found = torch.device(kwargs["device"])
    return found


@cache
def composite(func) -> bool:
    """True when `func` is made of other ops. In inference mode such ops arrive whole, with their copies and syncs still
    inside.
    """
    return func._can_decompose()


@cache
def launches(func) -> bool:
    """True when dispatching `func` starts work on the device."""
    return not func.is_view and func._opname not in LAUNCHLESS


def moves(func, args, kwargs, beneath: bool = False) -> tuple[Move, ...]:
    """What `func` makes the host do. `beneath`: seen by the device itself, below composite kernels, rather than by a
    mode above them.
    """
    look = _LOOKS.get(str(func))
    if look is None or (beneath and look is _lifted):
        return ()
    return look(str(func), args, kwargs)


def _waits(name, args, kwargs) -> tuple[Move, ...]:
    device = device_of(args, kwargs)
    return () if device is None or on_host(device) else (Move("sync", SYNCS[name], device),)


def _repeats(name, args, kwargs) -> tuple[Move, ...]:
    """repeat_interleave sums its counts on the device, unless the caller says what they sum to."""
    size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
    if size is not None or on_host(args[0]):
        return ()
    return (Move("sync", "repeat_interleave", args[0].device),)


def _indexes(name, args, kwargs) -> tuple[Move, ...]:
    """A boolean mask waits for nonzero; an index that lies on the host is uploaded."""
    target, indices = args[0], args[1]
    if on_host(target):
        return ()
    value = args[2] if len(args) > 2 else None
    given = [i for i in indices if isinstance(i, torch.Tensor)]
    masks = [i for i in given if i.dtype in (torch.bool, torch.uint8)]
    if isinstance(value, torch.Tensor) and on_host(value) and value.numel() == 1 and len(given) == len(masks) == 1:
        return ()  # x[mask] = number: torch turns it into masked_fill
    found = [Move("h2d", UP, target.device, i.nbytes, source=i) for i in given if on_host(i) and i.numel()]
    return (*found, *(Move("sync", "boolean mask", target.device) for _ in masks[:1]))


def _converted(name, args, kwargs) -> tuple[Move, ...]:
    source, device = args[0], kwargs.get("device")
    if (
        device is None
        or (device := torch.device(device)).type == source.device.type
        or "meta" in (device.type, source.device.type)
    ):
        return ()
    later = bool(kwargs.get("non_blocking"))
    dtype = kwargs.get("dtype") or source.dtype
    size = source.numel() * dtype.itemsize
    if not on_host(source):  # .to("cpu", non_blocking=True) lands in pinned memory that torch allocates for it
        return (Move("d2h", DOWN, source.device, size, pinned=later, blocking=not later),)
    return (Move("h2d", UP, device, size, pinned(source, dtype), not later, source),)


def _copied(name, args, kwargs) -> tuple[Move, ...]:
    later = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    pairs = zip(args[0], args[1]) if isinstance(args[0], (list, tuple)) else ((args[0], args[1]),)
    return tuple(move for to, source in pairs if (move := _copy(to, source, later)) is not None)


def _copy(to: torch.Tensor, source: torch.Tensor, later: bool) -> Move | None:
    if on_host(to) == on_host(source) or "meta" in (to.device.type, source.device.type):
        return None
    size = to.numel() * to.element_size()
    if on_host(source):
        return Move("h2d", UP, to.device, size, pinned(source, to.dtype), not later, source)
    return Move("d2h", DOWN, source.device, size, pinned(to, source.dtype), not later)


def _lifted(name, args, kwargs) -> tuple[Move, ...]:
    """torch.tensor(value, device=...) hides its upload from modes; what shows is the finished tensor being lifted."""
    made = args[0]
    return () if on_host(made) else (Move("h2d", UP, made.device, made.numel() * made.element_size()),)


def pinned(t: torch.Tensor, dtype: torch.dtype) -> bool:
    """True when the copy engine can read `t` where it lies: a gap or a change of dtype makes torch stage it through
    pageable memory.
    """
    return t.dtype == dtype and t.is_pinned() and dense(t)


def dense(t: torch.Tensor) -> bool:
    """True when the elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


_LOOKS: dict[str, Callable[..., tuple[Move, ...]]] = {
    **dict.fromkeys(SYNCS, _waits),
    "aten.repeat_interleave.Tensor": _repeats,
    "aten.index.Tensor": _indexes,
    "aten._unsafe_index.Tensor": _indexes,
    "aten.index_put.default": _indexes,
    "aten.index_put_.default": _indexes,
    "aten._index_put_impl_.default": _indexes,
    "aten._unsafe_index_put.default": _indexes,
    "aten._to_copy.default": _converted,
    "aten.copy_.default": _copied,
    "aten._foreach_copy_.default": _copied,
    "aten.lift_fresh.default": _lifted,
}
