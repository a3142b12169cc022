"""The step as a graph: one capture for each shape of window, all in one memory pool; call by call where that cannot be."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import GraphError
from ..graph import Captured, capture
from ..trace import fallback
from .batches import Form
from .core import Core

MODES = ("auto", "require", "off")
MOST = 8  # shapes of window: each takes seconds to capture, and some memory beside the pool
REHEARSED = 2  # micro-batches of a watched call: the first writes its gradients, the second adds, and the rest do the same
# A replay may differ from eager by this much of the largest value: attention's backward adds in another order at every run, so
# that eager differs from itself. At 350m in bf16 the squares of gradients (AdamW's v) were 1.3e-2 apart. What a certificate is
# to find, an input or a state that a graph has baked in, is off by the value's own size.
NOISE = 5e-2
# In 8 bits a value that flips moves by an eighth or a quarter of itself: two eager steps of 350m were 1.2e-1 apart.
NOISE_FP8 = 3e-1


class Graphs:
    """Runs the core on given tensors: as a graph where the device has graphs and `mode` allows it.

    auto captures on a GPU and runs call by call elsewhere. require always goes through capture(), which on a CPU keeps to the
    same static buffers and makes the same checks, without a graph.
    """

    def __init__(self, core: Core, mode: str):
        self.core, self.mode = core, mode
        self.captured: list[Captured] = []
        self._ways: dict[tuple, Callable[..., Tensor]] = {}

    def run(self, tensors: list[Tensor], key: tuple, form: Form) -> Tensor:
        way = self._ways.get(key)
        if way is None:
            self.core.calibrate(form.fill(tensors)[0])
            way = self._ways[key] = self._find_way(tensors, form)
        return way(*tensors)

    def drop(self) -> None:
        self._ways.clear()
        self.captured.clear()

    def _find_way(self, tensors: list[Tensor], form: Form) -> Callable[..., Tensor]:
        core = self.core

        def train_step(*leaves: Tensor) -> Tensor:
            return core.run(form.fill(list(leaves)))

        if self.mode == "off" or (self.mode == "auto" and not has_graphs(core.device)):
            return train_step
        try:
            return self._capture(train_step, tensors, form)
        except (GraphError, torch.OutOfMemoryError) as error:
            if self.mode == "require":
                raise
            fallback("train step as one graph", str(error))
            return train_step

    def _capture(self, train_step: Callable[..., Tensor], tensors: list[Tensor], form: Form) -> Captured:
        if len(self.captured) >= MOST:
            raise GraphError(f"{MOST} shapes of window are captured already; pad the batches to fewer shapes.")
        if hasattr(self.core.loss, "prepare"):
            self.core.loss.prepare(self.core.model, form.fill(tensors)[0])
        pool = self.captured[0].pool if self.captured else None

        def rehearsal(*leaves: Tensor) -> Tensor:
            return self.core.run(form.fill(list(leaves))[:REHEARSED])

        state = [self.core.model, *self.core.state()]
        graph = capture(
            train_step, *tensors, pool=pool, state=state, tolerance=self._tolerance(), clone=True,
            rehearsal=rehearsal if form.uniform else None,
        )  # fmt: skip
        self.captured.append(graph)
        return graph

    def _tolerance(self) -> float:
        """Adam's first updates are ± the rate whatever the gradient, so an element that is all noise may go either way."""
        if not has_graphs(self.core.device):
            return 0.0
        optimizer = self.core.optimizer
        largest = max(weight.abs().max().item() for weight in optimizer.weights.finest())
        noise = NOISE_FP8 if self.core.precision.fp8 else NOISE
        return noise + 4 * optimizer.rates.abs().max().item() / max(largest, 1e-12)


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"
