"""The sensors: those that ask others who count, and those that see ops as they are dispatched.

Others who count are Kineto, Triton, the allocators, Python, torch.compile, this library. Ops are dispatched to a mode above
CUDA, and to the pretend device from below; and waits that no op shows.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import re
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .. import trace
from ..device import accelerator, interpreted
from . import ops, pretend
from .events import SCALARS, Place, here, site_in

if TYPE_CHECKING:
    from .ledger import Ledger


class Sensor:
    """Base class of sensors: what it counts, sees and does not see. The ledger prints it."""

    name: str
    counts: frozenset[str]  # the ledger's totals that this sensor counts
    sees: str
    blind = ""  # what it does not see, as far as known

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def absent(self) -> str | None:
        """Why it cannot run here, or None."""
        return None

    def start(self, ending: ExitStack) -> None:
        """Begin to count. Callbacks that undo or read at the ledger's end go into `ending`, which calls them in reverse."""
        raise NotImplementedError


LAUNCH_CALL = re.compile("(cuda|cu|hip)(Graph|Ext|Module|ExtModule)?Launch")


def launch_calls(events: Iterable) -> Counter[str]:
    """Return the number of calls of each launching driver function. A graph is one launch, however many kernels it holds."""
    return Counter(event.name() for event in events if LAUNCH_CALL.match(event.name()))


class Kernels(Sensor):
    name = "kernels"
    counts = frozenset({"launches"})
    sees = "every launch call to the CUDA driver, in any thread, without its line"

    def absent(self) -> str | None:
        if self.ledger.launches != "kernels":
            return 'not asked for: watch(launches="kernels")'
        if not torch.cuda.is_available():
            return "no CUDA GPU"
        return "another profiler is running" if torch.autograd._profiler_enabled() else None

    def start(self, ending: ExitStack) -> None:
        # There is one cycle, so nothing accumulates; without acc_events torch 2.11 warns that it drops those before.
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        ending.callback(self._read, profile)
        ending.enter_context(profile)

    def _read(self, profile: torch.profiler.profile) -> None:
        results = profile.profiler.kineto_results  # type: ignore[union-attr]
        for name, times in launch_calls(results.events()).items():  # type: ignore[union-attr]
            self.ledger.record("launch", name, count=times, place=Place())


class Triton(Sensor):
    name = "triton"
    counts = frozenset()  # adds to the launches that dispatch counts
    sees = "each Triton launch"
    blind = "Triton kernels, if Triton was first imported while the ledger was open"

    def absent(self) -> str | None:
        if self.ledger.launches == "kernels":
            return "the kernels sensor counts these too"
        return None if "triton" in sys.modules else "Triton is not imported"

    def start(self, ending: ExitStack) -> None:
        if interpreted():  # the interpreter runs kernels as Python and knows no launch hook
            from triton.runtime.interpreter import InterpretedFunction

            ending.enter_context(trace.hooked(InterpretedFunction, "run", self._counted_run))
        else:
            from triton import knobs

            hook = self._hook
            knobs.runtime.launch_enter_hook.add(hook)
            ending.callback(knobs.runtime.launch_enter_hook.remove, hook)

    def _hook(self, metadata) -> None:
        self._launched(getattr(metadata, "data", {}).get("name", "triton kernel"))

    def _counted_run(self, original: Callable, function, *args, grid, warmup, **kwargs):
        if not warmup:
            self._launched(function.fn.__name__)
        return original(function, *args, grid=grid, warmup=warmup, **kwargs)

    def _launched(self, name: str) -> None:
        self.ledger.now.triton += 1
        self.ledger.record("launch", name)


# The allocators' counters: the kind of event and the name of the call.
COUNTERS = {
    "alloc": ("num_device_alloc", "cudaMalloc"),
    "free": ("num_device_free", "cudaFree"),
    "retry": ("num_alloc_retries", "retry after a failed cudaMalloc"),
    "pin": ("num_host_alloc", "pinned allocation"),
}
ENTRIES = 100_000  # allocations recorded with their stacks; an older malloc loses its line


class Allocator(Sensor):
    name = "allocator"
    counts = frozenset({"allocations", "frees", "alloc_retries", "pinned_allocations"})
    sees = "cudaMalloc and its line, cudaFree, retries after a failed one, pinned allocations"
    blind = "the lines of frees and of pinned allocations"

    def absent(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA GPU"

    def start(self, ending: ExitStack) -> None:
        torch.cuda.init()  # before it torch has no allocators, and asking them ends the process
        self._recording = not torch._C._cuda_isHistoryEnabled()  # else the user records, and that history is read
        if self._recording:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES)
        self._began = time.time_ns() // 1000
        self._before = statistics()
        ending.callback(self._read)

    def _read(self) -> None:
        after = statistics()
        changed = {kind: after[kind] - self._before[kind] for kind in after}
        if changed["alloc"] > 0:  # reading the history builds it as Python objects: only when there is something to find
            changed["alloc"] -= self._locate(torch.cuda.memory._snapshot()["device_traces"])
        if self._recording:
            torch.cuda.memory._record_memory_history(None)
        for kind, (_, what) in COUNTERS.items():
            if changed[kind] > 0:
                self.ledger.record(kind, what, count=changed[kind], place=Place())

    def _locate(self, traces: list[list[dict]]) -> int:
        """Record the allocations since the start whose stacks are known; return their number."""
        events = [event for device in traces for event in device if event["action"] in ("segment_alloc", "segment_map")]
        ours = [event for event in events if event.get("time_us", self._began) >= self._began]
        for event in ours:
            self.ledger.record("alloc", "cudaMalloc", bytes=event["size"], place=Place(site_in(event.get("frames", []))))
        return len(ours)


def statistics() -> dict[str, int]:
    """Return the number of driver calls of the allocators so far, over all GPUs."""
    now = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())] + [torch.cuda.host_memory_stats()]
    return {kind: sum(counters.get(name, 0) for counters in now) for kind, (name, _) in COUNTERS.items()}


class Collector(Sensor):
    name = "gc"
    counts = frozenset({"gc_pauses", "gc_ms"})
    sees = "garbage collections, with the line that set them off"

    def start(self, ending: ExitStack) -> None:
        self._began: float | None = None
        gc.callbacks.append(self._phase)
        ending.callback(gc.callbacks.remove, self._phase)

    def _phase(self, phase: str, info: dict) -> None:
        now = time.perf_counter()
        began, self._began = self._began, now if phase == "start" else None
        if phase == "stop" and began is not None:
            self.ledger.record("gc", f"generation {info['generation']}", ms=(now - began) * 1e3)


class Compiles(Sensor):
    name = "compiles"
    counts = frozenset({"recompiles"})
    sees = "every compilation by torch.compile: first ones too, since a steady step has neither"
    blind = "a compilation, if torch.compile was first used while the ledger was open: then without its line"

    def start(self, ending: ExitStack) -> None:
        if (dynamo := sys.modules.get("torch._dynamo.callback")) is not None:
            dynamo.callback_handler.register_start_callback(self._compiling)
            ending.callback(dynamo.callback_handler.remove_start_callback, self._compiling)
        else:
            ending.callback(self._late)

    def _late(self) -> None:
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is not None and (graphs := utils.counters["stats"].get("unique_graphs", 0)):
            self.ledger.record("compile", "compile", count=graphs, place=Place())

    def _compiling(self, args) -> None:
        number = str(getattr(args, "compile_id", "") or "")
        again = "/" in number and not number.partition("/")[2].startswith("0")
        self.ledger.record("compile", f"{'recompile' if again else 'compile'} {number}".strip())


class Fallbacks(Sensor):
    name = "fallbacks"
    counts = frozenset({"fallbacks"})
    sees = "slow paths that gpubound took"
    blind = "slow paths of other libraries"

    def start(self, ending: ExitStack) -> None:
        self._before = Counter(trace.fallbacks)
        ending.enter_context(trace.listening(self._counted))

    def _counted(self, name: str, amount: int) -> None:
        if name != "fallback":
            return
        new = Counter(trace.fallbacks) - self._before
        self._before = Counter(trace.fallbacks)
        for (what, why), times in new.items():
            self.ledger.record("fallback", what, count=times, detail=why)


# torch calls Python at each synchronization, allocation, free and event once its "GPU trace" is on. It cannot be turned off,
# an allocation costs 4 µs more, and exceptions get lost: a free often happens while an exception propagates and Python drops a
# call's arguments. torch then calls Python with that exception pending, and the caller gets a SystemError.
#
# The trace is one flag and one pointer in libc10, to an object with a table of functions. So the table is replaced by one with
# torch's functions for synchronizations and no-ops for the rest. torch's header has the order of the functions.
HEARD = ("trace_gpu_device_synchronization", "trace_gpu_stream_synchronization", "trace_gpu_event_synchronization")

_WORD = ctypes.sizeof(ctypes.c_void_p)
_BEFORE = 2  # words before a C++ table: its offset and its type

_lock = threading.Lock()


def functions(header: str) -> list[str]:
    """Return the names in the table, in their order. A virtual destructor has two entries."""
    body = re.search(r"struct C10_API PyInterpreterVTable \{(.*?)\n\};", header, re.DOTALL)
    text = re.sub(r"//[^\n]*", "", body[1] if body else "")
    names = re.findall(r"\bvirtual\b[^;{]*?(~?\w+)\s*\(", text)
    return [slot for name in names for slot in ([name, name] if name.startswith("~") else [name])]


class Hook:
    """The flag, the pointer, and the table that replaces torch's. Never freed: another thread may be reading it."""

    listeners = 0

    def __init__(self) -> None:
        home = Path(torch.__file__).parent
        names = functions((home / "include/c10/core/impl/PyInterpreter.h").read_text())
        if not set(HEARD) <= set(names):
            raise ValueError("its header names no synchronizations")
        c10, python = (ctypes.CDLL(str(home / "lib" / name)) for name in ("libc10.so", "libtorch_python.so"))
        self.flag = ctypes.c_bool.in_dll(c10, "_ZN3c104impl8GPUTrace9haveStateE")
        self.pointer = ctypes.c_void_p.in_dll(c10, "_ZN3c104impl8GPUTrace13gpuTraceStateE")
        interpreter = python["_Z16getPyInterpreterv"]
        interpreter.restype = ctypes.c_void_p
        theirs = _at(_at(interpreter()))  # the interpreter holds its table's owner, and that one its table
        entries = (ctypes.c_void_p * (_BEFORE + len(names))).from_address(theirs - _BEFORE * _WORD)
        self.table = type(entries)(*entries)
        nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
        for slot, name in enumerate(names, _BEFORE):
            if name.startswith("trace_gpu_") and name not in HEARD:
                self.table[slot] = nothing
        self.names = names
        self._owner = ctypes.c_void_p(ctypes.addressof(self.table) + _BEFORE * _WORD)
        self._interpreter = ctypes.c_void_p(ctypes.addressof(self._owner))
        atexit.register(self.set, False)

    def set(self, on: bool) -> None:
        """Turn the trace on or off, unless other code, such as CUDA Sanitizer, has turned it on."""
        if not self.flag.value or self.pointer.value == ctypes.addressof(self._interpreter):
            self.pointer.value = ctypes.addressof(self._interpreter)
            self.flag.value = on

    def listen(self) -> None:
        """Let torch call the callbacks of torch.cuda._gpu_trace that concern synchronizations, until `leave`."""
        with _lock:
            Hook.listeners += 1
            self.set(True)

    def leave(self) -> None:
        with _lock:
            Hook.listeners -= 1
            self.set(Hook.listeners > 0)


def _at(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


@cache
def _make() -> Hook | str:
    """Return the hook of this process, or the reason why this torch allows none."""
    try:
        return Hook()
    except (OSError, AttributeError, ValueError) as error:
        return f"torch {torch.__version__} has no GPU trace that can be hooked here: {error}"


class GpuTrace(Sensor):
    name = "gputrace"
    sees = "every sync that torch makes on CUDA, in any thread"
    blind = "syncs inside other libraries' CUDA code (thrust, in unique(dim=)), and a cudaMalloc's own"

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"syncs"} if torch.cuda.is_available() and self.ledger.device_is_here else ())

    def absent(self) -> str | None:
        asked = self.ledger.asked_gputrace
        if asked is False:
            return "left out with gputrace=False"
        if asked is None and not Hook.listeners:
            return "not asked for: watch(gputrace=True)"
        hook = _make()
        return hook if isinstance(hook, str) else None

    def start(self, ending: ExitStack) -> None:
        import torch.cuda._gpu_trace as trace

        hook = _make()
        assert isinstance(hook, Hook), hook
        record, now = self.ledger.record, self.ledger.now
        callbacks: tuple[tuple[Any, Callable[..., None]], ...] = (
            (trace.StreamSynchronizationCallbacks, lambda stream: record("sync", now.op or "stream synchronize")),
            (trace.EventSynchronizationCallbacks, lambda event: record("sync", "event synchronize")),
            (trace.DeviceSynchronizationCallbacks, lambda: record("sync", "device synchronize")),
        )
        for registry, callback in callbacks:
            registry.add_callback(callback)
            ending.callback(registry.callback_list.remove, callback)
        hook.listen()
        ending.callback(hook.leave)


SAMPLE = 65_536  # bytes sampled to notice that a buffer was rewritten without a change of its version counter
_COPIES = {"h2d_bytes", "h2d_copies", "d2h_bytes", "d2h_copies", "pageable_copies", "repeated_uploads", "dead_clones"}


class Uploads:
    """Remembers uploads, to notice that the same storage is uploaded again without a change in this step or the next.

    A version counter does not see writes through NumPy, as into a pinned ring, so a sample of the bytes must agree, too.
    """

    def __init__(self):
        self._uploaded: dict[tuple, tuple[StorageWeakRef, tuple, int]] = {}

    def again(self, t: torch.Tensor, device: torch.device, step: int = 0) -> bool:
        reference = StorageWeakRef(t.untyped_storage())
        key = (reference.cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype, str(device))
        state = (None if t.is_inference() else t._version, _fingerprint(t))
        known = self._uploaded.get(key)
        if known is not None and known[1] == state and not known[0].expired():
            self._uploaded[key] = (*known[:2], step)
            return step <= known[2] + 1  # rows of a dataset come again in the next epoch
        if len(self._uploaded) > 4096:
            self._uploaded = {k: v for k, v in self._uploaded.items() if not v[0].expired()}
        self._uploaded[key] = (reference, state, step)
        return False


def _fingerprint(t: torch.Tensor) -> int | None:
    if not t.is_contiguous() or t.numel() == 0:
        return None
    raw = t.detach().as_strided((t.numel(),), (1,)).view(torch.uint8)  # a single value may have any stride
    return zlib.crc32(raw[:: max(1, raw.numel() // SAMPLE)].contiguous().numpy().tobytes())


@dataclass(slots=True)
class _Candidate:
    source: StorageWeakRef
    place: Place
    bytes: int


class Clones:
    """Notices clones whose source is never used again and dies: the source itself would have sufficed.

    Only clones that repeat a whole storage, stride for stride, are candidates: a clone that changes the layout, or keeps a
    slice so that the rest can be freed, is useful.
    """

    LIMIT = 256  # candidates tracked at a time; the oldest are dropped

    def __init__(self):
        self._candidates: list[_Candidate] = []

    def used(self, args, kwargs) -> None:
        """Drop the candidates whose source this op uses: their clone was needed."""
        if self._candidates:
            touched = {t.untyped_storage()._cdata for t in ops.tensors((*args, *kwargs.values()))}
            self._candidates = [c for c in self._candidates if c.source.expired() or c.source.cdata not in touched]

    def cloned(self, source: torch.Tensor, place: Place) -> None:
        storage = source.untyped_storage()
        size = source.numel() * source.element_size()
        if size and size == storage.nbytes():
            self._candidates = [*self._candidates[-self.LIMIT + 1 :], _Candidate(StorageWeakRef(storage), place, size)]

    def dead(self) -> list[_Candidate]:
        """Return the candidates whose source has died since the last call."""
        dead_clones = [c for c in self._candidates if c.source.expired()]
        if dead_clones:
            self._candidates = [c for c in self._candidates if not c.source.expired()]
        return dead_clones


def repeats_layout(func, args, kwargs) -> bool:
    """Return whether a clone (or .contiguous(), .to(copy=True)) has the source's strides."""
    if func._opname not in ("clone", "_to_copy") or not ops.dense(source := args[0]):
        return False
    device, wanted = kwargs.get("device"), kwargs.get("memory_format")
    if device is not None and torch.device(device).type != source.device.type:
        return False
    if kwargs.get("dtype") not in (None, source.dtype):
        return False
    return wanted in (None, torch.preserve_format) or source.is_contiguous(memory_format=wanted)


class OpSensor(Sensor):
    """Sensor that adds the ops that it sees to the rows of the ledger."""

    beneath = False  # ops come from the pretend device, below composite kernels
    syncs = True  # nothing else counts syncs here

    def __init__(self, ledger: Ledger):
        super().__init__(ledger)
        self._uploads, self._clones = Uploads(), Clones()

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(_COPIES | {"syncs"} | ({"launches"} if self.ledger.launches == "ops" else set()))

    def see(self, func, args, kwargs) -> str:
        """Record an op before it runs. Return its name."""
        ledger = self.ledger
        ledger.origins.note(func._opname)
        self._clones.used(args, kwargs)
        self.report_dead()
        device = ops.device_of(args, kwargs)
        moves = [move for move in ops.moves(func, args, kwargs, self.beneath) if ledger.wants(move.device)]
        for move in moves:
            self._moved(move)
        if device is not None and ops.on_host(device):
            # Work done on the CPU. Scalars are bookkeeping, such as an optimizer's step count.
            if not moves and not self.beneath and ops.launches(func) and any(t.numel() > 1 for t in ops.tensors(args)):
                ledger.record("cpu_op", func._opname, bytes=max(t.numel() * t.element_size() for t in ops.tensors(args)))
        elif device is not None and ledger.wants(device):
            if repeats_layout(func, args, kwargs):
                self._clones.cloned(args[0], here(ledger.origins))
            if func.namespace == "aten" and ledger.launches == "ops" and not moves and ops.launches(func):
                ledger.record("launch", func._opname)
        return moves[0].what if moves else func._opname

    def _moved(self, move: ops.Move) -> None:
        if move.kind != "sync":
            self.ledger.record(move.kind, move.what, bytes=move.bytes, detail=move.manner)
        if self.syncs and move.blocking:  # a wait for a value is blocking, too
            self.ledger.record("sync", move.what)
        if move.kind == "h2d" and move.source is not None and self._uploads.again(move.source, move.device, self.ledger.steps):
            self.ledger.record("repeat", move.what, bytes=move.bytes)

    def report_dead(self) -> None:
        for candidate in self._clones.dead():
            self.ledger.record("clone", "clone", bytes=candidate.bytes, place=candidate.place)


class SimGpu(OpSensor):
    name = "simgpu"
    sees = "every op, copy and sync on the pretend device, in any thread"
    beneath = True

    def absent(self) -> str | None:
        if not self.ledger.wants_type(pretend.NAME):
            return f"device={str(self.ledger.device)!r} was asked for"
        if not pretend.ready():
            return "simgpu() was not called"
        wanted = self.ledger.wants(torch.device(pretend.NAME, 0))
        return None if wanted else f"device={str(self.ledger.device)!r} is not here"

    def start(self, ending: ExitStack) -> None:
        ending.callback(self.report_dead)
        pretend.observers.append(self.see)
        ending.callback(pretend.observers.remove, self.see)


class Dispatch(OpSensor):
    name = "dispatch"
    sees = "ops, copies and clones, and syncs where gputrace does not run, in the ledger's thread and its backward"
    blind = "other threads, compiled code and graph replays; a sync inside an op that its table does not list"

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return (super().counts if self.ledger.device_is_here else frozenset()) | {"cpu_ops"}

    def absent(self) -> str | None:
        if self.ledger.device_is_here or pretend.ready():
            return None
        return "no GPU and no pretend device" if accelerator() is None else f"device={str(self.ledger.device)!r} is not here"

    def start(self, ending: ExitStack) -> None:
        self.syncs = not (torch.cuda.is_available() and self.ledger.runs("gputrace"))
        ending.callback(self.report_dead)
        mode = ops.OpMode(self._run)
        mode.__enter__()
        ending.callback(_leave, mode)

    def _run(self, func, args, kwargs):
        if pretend.ready() and _pretended(args, kwargs):
            return func(*args, **kwargs)  # the device itself reports it
        with self.seeing(func, args, kwargs):
            return func(*args, **kwargs)

    @contextmanager
    def seeing(self, func, args, kwargs):
        """Record an op as it runs. A custom op counts as a launch unless Triton launched inside it."""
        now = self.ledger.now
        outer, before = now.op, now.triton
        now.op = self.see(func, args, kwargs)
        try:
            yield
        finally:
            now.op = outer
        alone = func.namespace not in ("aten", "prims") and self.ledger.launches == "ops" and before == now.triton
        if alone and (device := ops.device_of(args, kwargs)) and not ops.on_host(device) and self.ledger.wants(device):
            self.ledger.record("launch", f"{func.namespace}::{func._opname}")


def _leave(mode: ops.OpMode) -> None:
    """End the mode, and remove ended modes from this thread's stack.

    A ledger may end on another thread than it began on, for example if each step of a script runs in a new thread, or before
    one that began later. Its mode cannot be removed then: it passes ops on and records nothing.
    """
    mode.run = _hand_on
    while (stack := _get_current_dispatch_mode_stack()) and getattr(stack[-1], "run", None) is _hand_on:
        stack[-1].__exit__(None, None, None)


def _hand_on(func, args, kwargs):
    return func(*args, **kwargs)


def _pretended(args, kwargs) -> bool:
    devices = [torch.device(where) for where in (ops.device_of(args, kwargs), kwargs.get("device")) if where is not None]
    return any(device.type == pretend.NAME for device in devices)


class Calls(Sensor):
    name = "calls"
    counts = frozenset()  # it adds to the counts of dispatch and simgpu
    sees = "synchronize() of torch.cuda, streams and events, print(tensor)"
    blind = "a synchronize() that was imported by name before the ledger opened"

    def absent(self) -> str | None:
        return None if self.ledger.device_is_here or pretend.ready() else "no GPU and no pretend device"

    def start(self, ending: ExitStack) -> None:
        ops.listen(self._on_call)
        ending.callback(ops.leave, self._on_call)

    def _on_call(self, what: str, device_type: str) -> None:
        if what is SCALARS and device_type == pretend.NAME:
            return  # the device sees each scalar being read
        if self.ledger.wants_type(device_type) and not (device_type == "cuda" and self.ledger.runs("gputrace")):
            self.ledger.record("sync", what)
