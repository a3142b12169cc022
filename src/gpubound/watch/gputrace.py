"""torch's own hook at every synchronization: exact, in every thread, with the stack alive. Here without its faults.

torch calls Python at each synchronization, allocation, free and event once its "GPU trace" is on. Nothing turns it off again,
an allocation costs 4 µs more, and exceptions get lost: a free often happens while one is on its way up, as Python drops a
call's arguments. torch then calls Python with that exception pending, and the caller is left with a SystemError.

The trace is one flag and one pointer in libc10, to an object with a table of functions. So we make the table ourselves: torch's
functions for the synchronizations, one that does nothing for the rest. torch's header says where each function stands in it.
"""

import atexit
import ctypes
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .sensors import Sensor

HEARD = ("trace_gpu_device_synchronization", "trace_gpu_stream_synchronization", "trace_gpu_event_synchronization")

_WORD = ctypes.sizeof(ctypes.c_void_p)
_BEFORE = 2  # words in front of a C++ table: its offset and its type

_lock = threading.Lock()


def functions(header: str) -> list[str]:
    """The names in the table, in their order. A virtual destructor stands there twice."""
    body = re.search(r"struct C10_API PyInterpreterVTable \{(.*?)\n\};", header, re.DOTALL)
    text = re.sub(r"//[^\n]*", "", body[1] if body else "")
    names = re.findall(r"\bvirtual\b[^;{]*?(~?\w+)\s*\(", text)
    return [name for found in names for name in ([found, found] if found.startswith("~") else [found])]


class Hook:
    """The flag, the pointer, and the table that we let it point to. Never freed: another thread may be reading it."""

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
        """Turn the trace on or off, unless somebody else, such as CUDA Sanitizer, has turned it on: then it is theirs."""
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
    """The one hook of this process, or why there is none with this torch."""
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
        made = _make()
        return made if isinstance(made, str) else None

    def start(self, ending: ExitStack) -> None:
        import torch.cuda._gpu_trace as trace

        made = _make()
        assert isinstance(made, Hook), made
        record, now = self.ledger.record, self.ledger.now
        callbacks: tuple[tuple[Any, Callable[..., None]], ...] = (
            (trace.StreamSynchronizationCallbacks, lambda stream: record("sync", now.op or "stream synchronize")),
            (trace.EventSynchronizationCallbacks, lambda event: record("sync", "event synchronize")),
            (trace.DeviceSynchronizationCallbacks, lambda: record("sync", "device synchronize")),
        )
        for registry, callback in callbacks:
            registry.add_callback(callback)
            ending.callback(registry.callback_list.remove, callback)
        made.listen()
        ending.callback(made.leave)
