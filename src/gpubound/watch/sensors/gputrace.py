"""torch's own hook at every synchronization it makes: exact, in every thread, with the stack alive.

CUDA Sanitizer is its only other user. Once on it cannot be turned off in this process and costs every allocation 4 µs, so it is
turned on only when asked. While no ledger listens its registries are empty.
"""

import torch

from .base import Sensor

_activated = False


def activated() -> bool:
    return _activated


class GpuTrace(Sensor):
    name = "gputrace"
    sees = "every sync that torch makes on CUDA, in any thread; it stays on in this process and costs 4 µs an allocation"
    blind = "syncs inside other libraries' CUDA code (thrust, in unique(dim=)), and a cudaMalloc's own"

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"syncs"} if torch.cuda.is_available() else ())

    def absent(self) -> str | None:
        if self.ledger.asked_gputrace is False:
            return "left out with gputrace=False"
        if self.ledger.asked_gputrace is None and not _activated:
            return "not asked for: watch(gputrace=True)"
        try:
            import torch.cuda._gpu_trace
        except ImportError:
            return f"torch {torch.__version__} has no GPU trace"
        return None

    def start(self) -> None:
        global _activated
        if torch.cuda.is_available() and not _activated:
            torch._C._activate_gpu_trace()
            _activated = True
        for registry, callback in self._registries():
            registry.add_callback(callback)

    def stop(self) -> None:
        for registry, callback in self._registries():
            registry.callback_list.remove(callback)

    def _registries(self):
        import torch.cuda._gpu_trace as trace

        return (
            (trace.StreamSynchronizationCallbacks, self._stream),
            (trace.EventSynchronizationCallbacks, self._event),
            (trace.DeviceSynchronizationCallbacks, self._device),
        )

    def _stream(self, stream: int) -> None:
        self.ledger.record("sync", self.ledger.current_op() or "stream synchronize")

    def _event(self, event: int) -> None:
        self.ledger.record("sync", "event synchronize")

    def _device(self) -> None:
        self.ledger.record("sync", "device synchronize")
