"""The sensors that ask others who count: Kineto, Triton, the allocators, Python, torch.compile, this library."""

from __future__ import annotations

import atexit
import ctypes
import gc
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import trace
from ..device import interpreted
from .events import Place, site_in

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
