"""The step as graphs: captured for each shape of micro-batch, all in one memory pool; call by call where that cannot be.

A window of many micro-batches is no graph of its own: recording and certifying it took as many times as long as it has
micro-batches (13.4 s for eight at 1b), and every length and mixture of shapes was another graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphError
from ..graph import Captured, capture
from ..trace import fallback
from .batches import MicroBatch
from .core import Core

MODES = ("auto", "require", "off")
MOST = 8  # shapes of micro-batch: each takes seconds to capture, and some memory beside the pool
# A replay may differ from eager by this much of the largest value: attention's backward adds in another order at every run, so
# that eager differs from itself. At 350m in bf16 the squares of gradients (AdamW's v) were 1.3e-2 apart. What a certificate is
# to find, an input or a state that a graph has baked in, is off by the value's own size.
NOISE = 5e-2
# In 8 bits a value that flips moves by an eighth or a quarter of itself: two eager steps of 350m were 1.2e-1 apart.
NOISE_FP8 = 3e-1


class Graphs:
    """Runs the core on given micro-batches: as graphs where the device has them and `mode` allows it.

    auto captures on a GPU and runs call by call elsewhere. require always goes through capture(), which on a CPU keeps to the
    same static buffers and makes the same checks, without a graph. A step of `one` micro-batch is one graph; of more, a graph
    for the first (it writes the gradients), one for all others (it adds) and one for the update.
    """

    def __init__(self, core: Core, mode: str, one: bool):
        self.core, self.one = core, one
        self.captured: list[Captured] = []
        self._off = mode == "off" or (mode == "auto" and not has_graphs(core.device))
        self._required = mode == "require"
        self._known: dict[tuple, list[Captured] | None] = {}  # by a micro-batch's key; None: it cannot be captured
        self._update: Captured | None = None

    def run(self, window: list[MicroBatch]) -> Tensor:
        if not self.core.calibrated:
            self.core.calibrate(window[0].fill(window[0].tensors))
        graphs = [known for batch in window if (known := self._graphs_of(batch)) is not None]
        if len(graphs) < len(window):
            return self.core.run([batch.fill(batch.tensors) for batch in window])
        for index, (batch, known) in enumerate(zip(window, graphs)):
            result = known[index > 0](*batch.tensors)
        return result if self.one else self._updated()

    def drop(self) -> None:
        self._known.clear()
        self.captured.clear()
        self._update = None

    def _graphs_of(self, batch: MicroBatch) -> list[Captured] | None:
        """The graph of a whole step, or those of a first and of a further micro-batch; None to run it call by call."""
        if self._off:
            return None
        if batch.key not in self._known:
            self._known[batch.key] = self._tried(lambda: self._capture(batch))
        return self._known[batch.key]

    def _updated(self) -> Tensor:
        """The update, captured at its first time: only behind real gradients does its certificate see weights move."""
        if self._update is None:
            self._update = self._tried(lambda: self._graph(self.core.update))
        if self._update is None:  # a step is graphs or calls, so that nobody takes the times of one for those of the other
            self._off = True
            self.drop()
            return self.core.update()
        return self._update()

    def _tried(self, capturing: Callable[[], Any]) -> Any:
        before = len(self.captured)
        try:
            return capturing()
        except (GraphError, torch.OutOfMemoryError) as error:
            del self.captured[before:]
            if self._required:
                raise
            fallback("train step as one graph", str(error))
            return None

    def _capture(self, batch: MicroBatch) -> list[Captured]:
        if sum(known is not None for known in self._known.values()) >= MOST:
            raise GraphError(f"{MOST} shapes of micro-batch are captured already; pad the batches to fewer shapes.")
        core = self.core
        if hasattr(core.loss, "prepare"):
            core.loss.prepare(core.model, batch.fill(batch.tensors))

        def train_step(*leaves: Tensor) -> Tensor:
            return core.run([batch.fill(leaves)])

        def first_micro_batch(*leaves: Tensor) -> None:
            core.begin(batch.fill(leaves))

        def micro_batch(*leaves: Tensor) -> None:
            core.add(batch.fill(leaves))

        parts = [train_step] if self.one else [first_micro_batch, micro_batch]
        return [self._graph(part, *batch.tensors) for part in parts]

    def _graph(self, part: Callable, *tensors: Tensor) -> Captured:
        pool = self.captured[0].pool if self.captured else None
        state = [self.core.model, *self.core.state()]
        graph = capture(part, *tensors, pool=pool, state=state, tolerance=self._tolerance(), clone=True)
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
