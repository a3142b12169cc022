"""What a certificate varies between its rounds: the inputs, and what a function takes from the host besides them.

Inputs keep their shapes and dtypes. Floating tensors are drawn anew from the example's mean and spread. Integers and booleans
are shuffled, so that ids stay in range and a mask keeps its count; where a shuffle changes nothing (one position, a constant)
an integer counts down and a boolean flips. What cannot be varied so is named in the certificate.

From the host come the time, and random numbers of Python and NumPy, which a graph bakes in. Mostly that shows, because eager
reads something else at its next call; but the time as an fp32 number is the same for two minutes, and a choice among few may be
the same by chance. So each eager call of the certificate reads clocks that are decades off, and draws from other seeds.

Last the poison: NaN where nothing should be read. A graph that looks at what it was not given then shows it.
"""

import datetime
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .memory import difference
from .reach import Reach, storage_key

DECADE = 315_576_000  # seconds
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_ASIDE = frozenset(sys.stdlib_module_names - {"time", "datetime"}) | {"torch", "triton", "numpy", "_pytest", "pytest"}

SOURCES = "the time (time, datetime) or random numbers (random, numpy.random)"


def vary(examples: Sequence[Tensor], round_: int) -> tuple[list[Tensor], list[int]]:
    """(new tensors, which of them still equal the example). It draws from its own generator: the user's stand still."""
    generator = torch.Generator().manual_seed(0x5EED + round_)
    made = [_other(example, generator) for example in examples]
    unvaried = [index for index, (new, old) in enumerate(zip(made, examples)) if _equal(new, old) and old.numel()]
    return made, unvaried


def _other(example: Tensor, generator: torch.Generator) -> Tensor:
    old = example.detach()
    if old.numel() == 0:
        return old.clone()
    drawable = old.is_floating_point() or old.is_complex()
    if drawable and bool(_wide(old).isfinite().all()):
        return _drawn(old, generator)
    order = torch.randperm(old.numel(), generator=generator, device="cpu").to(old.device)
    new = torch.empty_like(old).copy_(old.reshape(-1)[order].reshape(old.shape))
    if not _equal(new, old) or drawable:
        return new
    return ~old if old.dtype == torch.bool else torch.where(old > 0, old - 1, old)


def _drawn(old: Tensor, generator: torch.Generator) -> Tensor:
    wide, fits = _wide(old), torch.finfo(old.dtype)
    spread = wide.std(correction=0)
    if spread == 0:  # one number, or a constant, has no spread of its own
        spread = wide.abs().mean().clamp(min=1.0)
    new = torch.randn(wide.shape, generator=generator, dtype=torch.float64, device="cpu").to(wide.device) * spread + wide.mean()
    new = torch.where(wide >= 0, new.abs(), new) if bool((wide >= 0).all()) else new  # a probability or a variance has no sign
    made = torch.view_as_complex(new) if old.is_complex() else new.clamp(fits.min, fits.max)
    return torch.empty_like(old).copy_(made)


def _wide(tensor: Tensor) -> Tensor:
    """In fp64, which can all that fp8 cannot. A complex number is two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _equal(new: Tensor, old: Tensor) -> bool:
    """The same bits: torch.equal knows no fp8, and takes a NaN for another one."""
    return difference(new, old).bitwise


@contextmanager
def varied(turn: int, reach: Reach | None = None) -> Iterator[None]:
    """Inside, this thread's clocks are `turn` + 1 decades ahead, and the random numbers are others. All is put back.

    Clocks are found in every module's globals, and in what a function reaches: closures, defaults, attributes. A constant
    stands between two readings as it did before, so what is only timed or logged stays right.
    """
    replacements = _replacements(DECADE * (turn + 1))
    changed = [*_globals(replacements), *(_bound(reach, replacements) if reach is not None else ())]
    states = _random_states()
    try:
        for put, value in changed:
            put(replacements[id(value)])
        for _, _, seed in states:
            seed(0x5EED + turn)
        yield
    finally:
        for put, value in changed:
            put(value)
        for state, restore, _ in states:
            restore(state)


def _replacements(seconds: int) -> dict[int, Any]:
    """What stands for each clock, by the clock's id."""
    home = threading.get_ident()

    def ahead(clock: Callable[[], Any], by: int) -> Callable[[], Any]:
        return lambda: clock() + by if threading.get_ident() == home else clock()

    clocks = [(getattr(time, name), seconds) for name in _CLOCKS]
    clocks += [(getattr(time, f"{name}_ns"), seconds * 10**9) for name in _CLOCKS]
    calendar = _calendar(home, datetime.timedelta(seconds=seconds))
    return {id(clock): ahead(clock, by) for clock, by in clocks} | {id(datetime.datetime): calendar}


class _Kind(type(datetime.datetime)):  # type: ignore[misc]
    """Whatever is a datetime is one of ours too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__mro__[1])


def _calendar(home: int, by: datetime.timedelta) -> type:
    """A stand-in for datetime.datetime, whose results are plain ones."""
    real = datetime.datetime

    def ahead(now: datetime.datetime) -> datetime.datetime:
        return now + by if threading.get_ident() == home else now

    class Ahead(real, metaclass=_Kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> datetime.datetime:  # type: ignore[misc]
            return real(*args, **kwargs)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return ahead(real.now(tz))

        @classmethod
        def today(cls) -> datetime.datetime:
            return ahead(real.today())

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return ahead(real.now(datetime.UTC).replace(tzinfo=None))

    return Ahead


Bound = tuple[Callable[[Any], None], Any]  # how to put something else in a clock's place, and the clock


def _bound(reach: Reach, replacements: dict[int, Any]) -> Iterator[Bound]:
    """Every clock that a function holds by another way than a global."""
    for function in reach.functions:
        for cell in function.__closure__ or ():
            if id(value := _contents(cell)) in replacements:
                yield partial(setattr, cell, "cell_contents"), value
        for index, value in enumerate(function.__defaults__ or ()):
            if id(value) in replacements:
                yield partial(_put_default, function, index), value
        yield from _items(function.__kwdefaults__ or {}, replacements)
    for way in reach.builtins:
        if id(value := way.find()) in replacements and (slot := way.slot()) and isinstance(slot[0], (dict, list)):
            yield partial(slot[0].__setitem__, slot[1]), value


def _items(space: dict[str, Any], replacements: dict[int, Any]) -> Iterator[Bound]:
    for name, value in list(space.items()):
        if id(value) in replacements:
            yield partial(space.__setitem__, name), value


def _contents(cell: CellType) -> Any:
    with suppress(ValueError):  # nothing is in it yet
        return cell.cell_contents


def _put_default(function: FunctionType, index: int, value: Any) -> None:
    old = function.__defaults__ or ()
    function.__defaults__ = (*old[:index], value, *old[index + 1 :])


def _globals(replacements: dict[int, Any]) -> Iterator[Bound]:
    """Every module's global that is one of the clocks. Modules that only keep time are left out."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _ASIDE:
            yield from _items(getattr(module, "__dict__", {}), replacements)


def _random_states() -> list[tuple[Any, Callable[[Any], None], Callable[[int], None]]]:
    """(state, how to restore it, how to seed) of each generator that a process shares."""
    states: list[tuple[Any, Callable[[Any], None], Callable[[int], None]]] = [(random.getstate(), random.setstate, random.seed)]
    shared = sys.modules["numpy"].random if "numpy" in sys.modules else None
    if shared is not None and shared.get_state(legacy=False)["bit_generator"] == "MT19937":  # another has no seed() of its own
        states.append((shared.get_state(), shared.set_state, shared.seed))
    return states


def spoil(tensor: Tensor) -> None:
    """NaN into a floating tensor. Others, which may be addresses, get their own first value everywhere: it is in range."""
    tensor = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.numel():
        tensor.copy_(tensor.reshape(-1)[0].clone().expand(tensor.shape))


def fill_results(results: Any, foreign: set[int]) -> None:
    """Spoil the outputs and gradients that lie in the graph's own memory, not those that are views of inputs or state."""
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and storage_key(leaf) not in foreign:
            floating = leaf.is_floating_point() or leaf.is_complex()
            leaf.detach().fill_(float("nan") if floating else 119)  # 119 fits every integer, and is True


def scribble(pool: Any, device: torch.device) -> int:
    """0xFF into every free block of a graph's pool, which is NaN in every floating dtype. Returns the number of bytes.

    A block is free between replays: whatever a replay reads from it, it must have written there before.
    """
    if pool is None or device.type != "cuda":
        return 0
    segments = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)]
    blocks = [block for segment in segments if segment["device"] == device.index for block in segment["blocks"]]
    free = [block for block in blocks if block["state"] == "inactive"]
    for block in free:
        memory = {"shape": (block["size"],), "typestr": "|u1", "data": (block["address"], False), "version": 2}
        torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=device).fill_(255)  # it makes no copy
    return sum(block["size"] for block in free)
