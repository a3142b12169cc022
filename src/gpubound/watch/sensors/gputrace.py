"""torch's own hook at every synchronization it makes: exact, in every thread, with the stack alive. See watch/gpuhook.py."""

import torch

from .. import gpuhook
from .base import Sensor


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
        if asked is None and not gpuhook.listening():
            return "not asked for: watch(gputrace=True)"
        return gpuhook.why_not()

    def start(self) -> None:
        for registry, callback in self._registries():
            registry.add_callback(callback)
        gpuhook.listen()

    def stop(self) -> None:
        gpuhook.leave()
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
