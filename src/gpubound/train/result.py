"""What a step says about itself, without making the host wait for it.

The report is seven numbers on the device. Each step also sends them to a pinned slot on the host, behind its own work; reading
them costs a wait only when that step is still running. Read one step late, as in

    previous = None
    for batches in data:
        result = step(batches)
        if previous is not None:
            print(previous.read().loss)
        previous = result

and the device always has the next step queued while the host looks at the last one.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 8  # steps in flight to the host; an unread result is taken off its slot before the slot is used again


@dataclass(frozen=True)
class StepValues:
    """A step's report on the host. `skipped` counts all steps skipped so far, `updates` all that were not."""

    loss: float
    grad_norm: float
    tokens: float
    skipped: int
    lr: float
    updates: int
    loss_scale: float


class StepResult:
    """One step's report: device scalars (loss, grad_norm, tokens, skipped, lr, updates, loss_scale) and `read()` for the host.

    The scalars are this step's own: later steps do not write into them.
    """

    def __init__(self, report: Tensor, landing: "Landing | None" = None):
        self._report, self._landing = report, landing
        self._values: StepValues | None = None

    loss = property(lambda self: self._report[0], doc="mean loss over the step's valid items")
    grad_norm = property(lambda self: self._report[1], doc="global norm of the gradient of that mean, before clipping")
    tokens = property(lambda self: self._report[2], doc="valid items of all micro-batches")
    skipped = property(lambda self: self._report[3], doc="steps skipped so far because they were not finite")
    lr = property(lambda self: self._report[4], doc="the learning rate of this update")
    updates = property(lambda self: self._report[5], doc="updates applied so far")
    loss_scale = property(lambda self: self._report[6], doc="fp16's loss scale after this step; 1 elsewhere")

    def read(self) -> StepValues:
        """The numbers on the host. Waits for this step alone, and not at all once it is done."""
        if self._values is None:
            loss, norm, tokens, skipped, lr, updates, scale = self._landing.wait() if self._landing else self._report.tolist()
            self._values = StepValues(loss, norm, tokens, int(skipped), lr, int(updates), scale)
            self._landing = None
        return self._values

    def __repr__(self) -> str:
        return f"StepResult({self._values if self._values else 'not read'})"


class Landing:
    """A pinned slot on its way to being filled."""

    def __init__(self, slot: Tensor):
        self.slot, self.event = slot, torch.cuda.Event()

    def send(self, report: Tensor) -> None:
        self.slot.copy_(report, non_blocking=True)
        self.event.record()

    def wait(self) -> list[float]:
        if not self.event.query():
            self.event.synchronize()
        return self.slot.tolist()


class Mail:
    """Sends each step's report to the host, on a GPU through a ring of pinned slots."""

    def __init__(self, device: torch.device):
        self._ring = torch.zeros(SLOTS, 7, dtype=torch.float64, pin_memory=True) if device.type == "cuda" else None
        self._owners: list[weakref.ref | None] = [None] * SLOTS
        self._sent = 0

    def post(self, report: Tensor) -> StepResult:
        if self._ring is None:
            return StepResult(report)
        at = self._sent % SLOTS
        owner = self._owners[at]
        if owner is not None and (late := owner()) is not None:
            late.read()  # SLOTS steps old: nothing to wait for
        landing = Landing(self._ring[at])
        landing.send(report)
        result = StepResult(report, landing)
        self._owners[at] = weakref.ref(result)
        self._sent += 1
        return result
