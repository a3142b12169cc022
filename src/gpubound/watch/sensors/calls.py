"""Waits that no op shows: see watch/calls.py."""

from .. import calls, pretend
from .base import Sensor


class Calls(Sensor):
    name = "calls"
    counts = frozenset()  # it adds to what dispatch and simgpu count, and vouches for nothing alone
    sees = "synchronize() of torch.cuda, streams and events, print(tensor)"
    blind = "a synchronize() that was imported by name before the ledger opened"

    def absent(self) -> str | None:
        return None if self.ledger.device_is_here or pretend.ready() else "no GPU and no pretend device"

    def start(self) -> None:
        calls.listen(self._heard)

    def stop(self) -> None:
        calls.leave(self._heard)

    def _heard(self, what: str, device_type: str) -> None:
        if what is calls.SCALARS and device_type == pretend.NAME:
            return  # the device sees each scalar being read
        if self.ledger.wants_type(device_type) and not (device_type == "cuda" and self.ledger.runs("gputrace")):
            self.ledger.record("sync", what)
