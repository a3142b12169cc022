"""The step as graphs: captured for each shape of micro-batch, all in one memory pool; call by call where that cannot be.

A window, the micro-batches of one step, is opened to its tensors and checked before anything runs. It is no graph of its own
where it has several: recording and certifying one took as many times as long, and every length and mixture of shapes was
another graph. Nor has its first micro-batch a graph of its own, which could write gradients instead of adding them to zeros,
0.8 ms of a window at 350m: capturing a second one wants its activations once more beside those that the first one's graph
holds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphError
from ..feed import Feed
from ..feed.leaves import Path, flatten, name
from ..graph import Captured, capture
from ..trace import fallback
from .device_step import DeviceStep
from .objectives import Objective

MODES = ("auto", "require", "off")
UPDATE = "update"
MOST = 8  # shapes of micro-batch: each takes seconds to capture, and some memory beside the pool
# A replay may differ from eager by this much of the largest value: attention's backward adds in another order at every run, so
# that eager differs from itself. At 350m in bf16 the squares of gradients (AdamW's v) were 1.3e-2 apart. What a certificate is
# to find, an input or a state that a graph has baked in, is off by the value's own size.
NOISE = 5e-2
# In 8 bits a value that flips moves by an eighth or a quarter of itself: two eager steps of 350m were 1.2e-1 apart.
NOISE_FP8 = 3e-1
MOST_NOISE = 5e-1  # whatever the rate: a limit of the value's own size would let through what is baked in


def gather(given: Any, accumulate: int) -> list[Any]:
    """The next step's micro-batches: a list, one batch, or `accumulate` from a feed or iterator, at whose end fewer or none."""
    if isinstance(given, list):
        if not 1 <= len(given) <= accumulate:
            raise ValueError(
                f"step: got a list of {len(given)} micro-batches, wanted 1 to accumulate={accumulate}; "
                f"a list always holds micro-batches, one batch goes in as a tensor, a tuple or a dict."
            )
        return given
    if isinstance(given, Tensor | tuple | Mapping):
        return [given]
    if isinstance(given, Feed):
        return [given.take() for _ in range(accumulate)]
    if isinstance(given, Iterator):
        return list(islice(given, accumulate))
    raise ValueError(
        f"step: got a {type(given).__name__}, wanted a list of micro-batches, one batch (a tensor, tuple or dict), a feed, "
        f"or an iterator over batches; pass gpubound.feed(source), or keep an iter(source)."
    )


class MicroBatch:
    """One micro-batch, opened to its tensors and checked. Those of equal shapes, dtypes and constants have equal keys."""

    def __init__(self, batch: Any, device: torch.device):
        self.tree = flatten(batch)
        key: list[tuple] = []
        for path, leaf in zip(self.tree.paths, self.tree.leaves):
            _check(path, leaf, device)
            key.append((path, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf))
        self.key, self.tensors = tuple(key), [leaf for _, leaf in self.tree.tensors()]

    def whole(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Put together again, with its own tensors or these."""
        rest = iter(self.tensors if tensors is None else tensors)
        return self.tree.rebuild([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.tree.leaves])


def _check(path: Path, leaf: Any, device: torch.device) -> None:
    if isinstance(leaf, Tensor):
        if leaf.device != device:
            raise ValueError(
                f"step: {name(path)} is on {leaf.device}, the model on {device}; a copy here would make the device wait: "
                f"draw the batches from gpubound.feed(source), which copies ahead."
            )
        return
    try:
        hash(leaf)
    except TypeError:
        raise ValueError(
            f"step: {name(path)} is a {type(leaf).__name__}, wanted tensors, numbers, strings and the like; "
            f"it could not be told whether it changed since the step was captured."
        ) from None


class WindowGraphs:
    """Runs the device step on given micro-batches: as graphs where the device has them and `mode` allows it.

    auto captures on a GPU alone. require always goes through capture(), which on a CPU makes the same checks, without a graph.
    A step of one micro-batch is one graph; of more, a graph that every micro-batch is a replay of, and one for the update.
    """

    def __init__(self, step: DeviceStep, mode: str):
        self.step = step
        self.captured: list[Captured] = []
        self._off = mode == "off" or (mode == "auto" and not has_graphs(step.device))
        self._required = mode == "require"
        self._known: dict[Any, Captured | None] = {}  # by a micro-batch's key, or UPDATE; None: it cannot be captured

    def run(self, window: list[MicroBatch]) -> Tensor:
        step = self.step
        if step.fp8 is not None and not step.fp8.calibrated:
            step.calibrate(window[0].whole())
        graphs = [self._graph_of(batch.key, partial(self._capture, batch)) for batch in window]
        if None in graphs:
            return step.run([batch.whole() for batch in window])
        if step.single:
            return graphs[0](*window[0].tensors)
        step.begin()
        for batch, graph in zip(window, graphs):
            self._check_adding()
            graph(*batch.tensors)
        # Captured at its first time here: only behind real gradients does its certificate see weights move.
        update = self._graph_of(UPDATE, partial(self._graph, step.update))
        if update is None:  # a step is graphs or calls, so that nobody takes the times of one for those of the other
            self._off = True
            self.drop()
            return step.update()
        return update()

    def _check_adding(self) -> None:
        """A micro-batch's graph adds, as it was recorded: where a sum waits to be written, it would add to the last one."""
        if self.step.accumulators.opened:
            raise GraphError(
                "train step: the gradient sums were opened to be written, but the graph of a micro-batch adds to them; "
                "begin the window with zero()."
            )

    def drop(self) -> None:
        self._known.clear()
        self.captured.clear()

    def _graph_of(self, key: Any, capturing: Callable[[], Captured]) -> Any:
        """The graph of a whole step, a micro-batch or the update, captured at its first time; None to run it call by call."""
        if self._off:
            return None
        if key not in self._known:
            try:
                self._known[key] = capturing()
            except (GraphError, torch.OutOfMemoryError) as error:
                if self._required:
                    raise
                fallback("train step as one graph", str(error))
                self._known[key] = None
        return self._known[key]

    def _capture(self, batch: MicroBatch) -> Captured:
        if len(self.captured) - (UPDATE in self._known) >= MOST:
            raise GraphError(f"{MOST} shapes of micro-batch are captured already; pad the batches to fewer shapes.")
        step = self.step
        if isinstance(step.loss, Objective):
            step.loss.prepare(step.model, batch.whole())

        def train_step(*leaves: Tensor) -> Tensor:
            return step.run([batch.whole(leaves)])

        def micro_batch(*leaves: Tensor) -> None:
            step.add(batch.whole(leaves))

        if step.single:
            return self._graph(train_step, *batch.tensors)
        self._check_adding()
        return self._graph(micro_batch, *batch.tensors)

    def _graph(self, part: Callable, *tensors: Tensor) -> Captured:
        pool = self.captured[0].pool if self.captured else None
        state = [self.step.model, *self.step.state()]
        self.captured.append(capture(part, *tensors, pool=pool, state=state, tolerance=self._tolerance(), clone=True))
        return self.captured[-1]

    def _tolerance(self) -> float:
        """Adam's first updates are ± the rate whatever the gradient, so an element that is all noise may go either way."""
        if not has_graphs(self.step.device):
            return 0.0
        optimizer = self.step.optimizer
        largest = max(weight.abs().max().item() for weight in optimizer.weights.finest())
        noise = NOISE_FP8 if self.step.precision.fp8 else NOISE
        return min(noise + 4 * optimizer.rates.abs().max().item() / max(largest, 1e-12), MOST_NOISE)


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"
