"""The interpreter and the library about themselves: collector pauses, compilations, fallbacks."""

import gc
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager

from ... import trace
from .base import Sensor


class Collector(Sensor):
    name = "gc"
    counts = frozenset({"gc_pauses", "gc_ms"})
    sees = "garbage collections, with the line that set them off"
    blind = ""

    def start(self) -> None:
        self._began: float | None = None
        gc.callbacks.append(self._phase)

    def stop(self) -> None:
        gc.callbacks.remove(self._phase)

    def _phase(self, phase: str, info: dict) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began is not None:
            ms = (time.perf_counter() - self._began) * 1e3
            self._began = None
            self.ledger.record("gc", f"generation {info['generation']}", ms=ms)


class Compiles(Sensor):
    name = "compiles"
    counts = frozenset({"recompiles"})
    sees = "every compilation by torch.compile: first ones too, since a steady step has neither"
    blind = "a compilation, if torch.compile was first used while the ledger was open: then without its line"

    def start(self) -> None:
        self._dynamo = sys.modules.get("torch._dynamo.callback")
        if self._dynamo is not None:
            self._dynamo.callback_handler.register_start_callback(self._compiling)

    def stop(self) -> None:
        if self._dynamo is not None:
            self._dynamo.callback_handler.remove_start_callback(self._compiling)
        elif (utils := sys.modules.get("torch._dynamo.utils")) is not None:
            late = utils.counters["stats"].get("unique_graphs", 0)
            if late:
                self.ledger.record("compile", "compile", count=late, lost=True)

    def _compiling(self, args) -> None:
        number = str(getattr(args, "compile_id", "") or "")
        again = "/" in number and not number.partition("/")[2].startswith("0")
        self.ledger.record("compile", f"{'recompile' if again else 'compile'} {number}".strip())


class Fallbacks(Sensor):
    name = "fallbacks"
    counts = frozenset({"fallbacks"})
    sees = "slow paths that gpubound took"
    blind = "slow paths of other libraries"

    def start(self) -> None:
        self._seen = Counter(trace.fallbacks)
        self._recording = trace.recording(self)
        self._recording.__enter__()

    def stop(self) -> None:
        self._recording.__exit__(None, None, None)

    def count(self, name: str, amount: int) -> None:
        if name != "fallback":
            return
        new = Counter(trace.fallbacks) - self._seen
        self._seen = Counter(trace.fallbacks)
        for (what, why), times in new.items():
            self.ledger.record("fallback", what, count=times, detail=why)

    def span(self, name: str) -> AbstractContextManager:
        """A ledger does not time; the recorder that was listening before it does."""
        below = trace._recorders[: trace._recorders.index(self)]
        return below[-1].span(name) if below else trace._NOTHING
