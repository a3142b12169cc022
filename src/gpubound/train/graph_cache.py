"""CUDA graphs of a step: one for each shape of micro-batch, all in one memory pool; call by call where capture fails.

A step of several micro-batches is not one graph: recording and certifying one took as many times as long, and every length
and mixture of shapes was another graph. Its first micro-batch has no separate graph either, which could write gradients
instead of adding them to zeros, 0.8 ms of a step at 350m: capturing a second graph needs its activations in addition to those
that the first one keeps.

A step of one micro-batch is two graphs, too, for its certificate: attention's backward makes other bits at every call, so
replay and eager are compared in copies of all that they write. That is the gradient alone, while the update, which writes
weights, masters and moments, makes the same bits and is compared by fingerprints. One graph of both would have all of them
copied, 7.7 instead of 1.7 GB at 350m. A step that updates inside backward is such a graph, for want of another place to cut.

The update of offloaded state is never a graph: its certificate would copy all of the state in host memory, twice, and it takes
as long as its bytes take over the link, of which the launches are a hundredth. Nor is AdamW's of more than LONG bytes of state,
unless graph="require": it has a dozen launches, which the host makes while the micro-batch still runs, and its certificate
copies weights, masters and gradient to host memory. Capturing it took 1.5 s of a first step at 350m, and grows with the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device import host_bytes
from ..distributed import ALONE
from ..distributed.ranks import capture_on_all_ranks, first_refusal
from ..errors import GraphError
from ..formatting import readable
from ..graph import Captured, capture
from ..graph.certify import Lend, lend_nothing
from ..graph.memory import bytes_of
from ..graph.runner import LentMemory, open_gate
from ..trace import fallback
from .device_step import DeviceStep
from .objectives import Objective
from .step_inputs import MicroBatch

MODES = ("auto", "require", "off")
STEP, PART = "a step of one micro-batch and its sums over ranks", "a micro-batch"
UPDATE, APPLY = "the update", "the update after the sums over ranks"
READ = 1 << 24  # elements read at a time
MOST = 8  # shapes of micro-batch: each takes seconds to capture, and some memory besides the pool
# A replay may differ from eager by this fraction of the largest value: attention's backward adds in another order at every run,
# so that eager differs from itself. At 350m in bf16 the squares of gradients (AdamW's v) were 1.3e-2 apart. What a certificate
# must find, an input or a state that a graph has baked in, is off by the value's size.
NOISE = 5e-2
# In 8 bits a value that flips moves by an eighth or a quarter of itself: two eager steps of 350m were 1.2e-1 apart.
NOISE_FP8 = 3e-1
# Bytes of state and of frozen weights, which take an H200 1 ms or more: a step that long hides the 0.2 ms in which the host
# launches an update. To capture one takes as many walks through the model as the micro-batch's graph.
LONG = 4 << 30
HOST_SHARE = 0.8  # of the free host memory that a certificate's copies may take
MOST_NOISE = 5e-1  # at any rate: a limit of the value's size would let through what is baked in


class GraphCache:
    """Runs the device step on micro-batches: as graphs where the device has them and `mode` allows it.

    auto captures on a GPU only. require always calls capture(), which on a CPU makes the same checks, without a graph. A step
    is a graph that is replayed for every micro-batch, and one of the update. On several ranks a step of one micro-batch is one
    graph, in which the sums begin during backward.

    Of several ranks, sums over ranks are only inside of graphs that all capture together, at the first step
    (distributed/ranks.py). If one rank cannot, none does, and the sums run between graphs, which a rank then captures by
    itself, as it does for a shape that only it meets later. The sums come in the same order in each case, so ranks may differ.
    """

    def __init__(self, step: DeviceStep, mode: str):
        self.step = step
        self.captured: list[Captured] = []
        self.off = mode == "off" or (mode == "auto" and not has_graphs(step.device))
        self._required = mode == "require"
        self._launches_update = (
            not self._required
            and step.optimizer.fused_update
            and step.ranks.alone
            and sum(t.nbytes for t in (*step.state(), *(p for p in step.model.parameters() if not p.requires_grad))) > LONG
        )
        self.memory: LentMemory | None = None  # in whose pool the graphs are captured
        self._sharing = [self]  # the caches of one memory pool
        self._known: dict[Any, Captured] = {}  # by kind, and a micro-batch's key
        self._broken: dict[Any, Exception] = {}  # what cannot be captured
        self._reported: list[Exception | None] = []  # of these, as fallbacks
        self._full: GraphError | None = None  # there are MOST graphs already

    def run(self, batches: list[MicroBatch], first: bool) -> Tensor:
        """Return the step's report. first: all ranks take their first step"""
        step = self.step
        together = step.single and (step.early is not None or not step.ranks.alone)
        if together and (graph := self._step_graph(batches[0], first)) is not None:
            return graph(*batches[0].tensors)
        if step.early is not None:
            return self._give_up(partial(step.run, [batches[0].whole()]))
        keys = [(PART, batch.key) for batch in batches]
        if self._full is None and any(key not in self._known and key not in self._broken for key in keys):
            step.accumulators.zero()  # the last step's sums, which the first capture of another shape would copy
        if not self._capture_parts(batches, first):
            return step.run([batch.whole() for batch in batches])
        if not step.single:
            step.begin()
        for batch in batches:
            self._check_adding()
            self._known[PART, batch.key](*batch.tensors)
        return self._update(batches[0].model, first)

    def add(self, batch: MicroBatch) -> None:
        """Add a micro-batch to the sums of a step that has begun, on one rank."""
        if self.off or not self._capture_parts([batch], first=False):
            self.step.add(batch.whole())
        else:
            self._check_adding()
            self._known[PART, batch.key](*batch.tensors)

    def update(self, model: int) -> Tensor:
        """Update the weights after `add`; return the report. model: the model's signature"""
        return self.step.update() if self.off else self._update(model, first=False)

    def _step_graph(self, batch: MicroBatch, first: bool) -> Captured | None:
        """Return the graph of a whole step of this one micro-batch on several ranks, or None."""
        key, step = (STEP, batch.key), self.step

        def train_step(*leaves: Tensor) -> Tensor:
            with step.reduction.completed():
                return step.run([batch.whole(leaves)])

        if first or step.early is not None:
            self._try(key, lambda: self._capture_together(train_step, batch))
            self._all_captured([key], last=step.early is not None)
        return self._known.get(key)

    def _capture_parts(self, batches: list[MicroBatch], first: bool) -> bool:
        """Return whether each micro-batch has a graph, without sums over ranks."""
        step, keys = self.step, [(PART, batch.key) for batch in batches]
        for batch, key in zip(batches, keys):
            if key in self._known:
                continue

            def micro_batch(*leaves: Tensor, batch: MicroBatch = batch) -> None:
                if step.single:
                    step.begin()
                step.add(batch.whole(leaves))
                if step.single:
                    step.finish()

            self._check_adding()
            self._try(key, partial(self._graph, micro_batch, batch, state=step.sums(), lend=self._lend_state))
        return self._all_captured(keys, first)

    def _update(self, model: int, first: bool) -> Tensor:
        """Run the update as a graph, captured at its first time: only after real gradients does its certificate see weights
        move. It calls no module, but its references lead to the model, so another mode of the model needs another graph.
        """
        step, update_key, apply_key = self.step, (UPDATE, model), (APPLY, model)
        if step.optimizer.host is not None or self._launches_update:
            return step.update()

        def update() -> Tensor:
            with step.reduction.completed():
                return step.update()

        if step.ranks.alone or (first and not step.single):
            self._try(update_key, lambda: self._capture_together(update))
            if not self._all_captured([update_key], last=step.ranks.alone) and step.ranks.alone:
                return self._give_up(step.update)
        if update_key in self._known:
            return self._known[update_key]()
        step.finish()
        step.sum()
        self._try(apply_key, partial(self._graph, step.apply))
        return self._known[apply_key]() if self._all_captured([apply_key], first) else self._give_up(step.apply)

    def _give_up(self, calls: Callable[[], Tensor]) -> Tensor:
        """Drop all graphs: a step is either graphs or calls, so that times of one are never taken for those of the other."""
        self.off = True
        self.drop()
        return calls()

    def _check_adding(self) -> None:
        """Raise GraphError if the sums wait to be written: a micro-batch's graph would add to those of the last step."""
        if self.step.accumulators.opened and not self.step.single:
            raise GraphError(
                "train step: the gradient sums were opened to be written, but the graph of a micro-batch adds to them; "
                "begin the window with zero()."
            )

    def drop(self) -> None:
        self._known.clear()
        self.captured.clear()
        self._sharing.remove(self)
        self._sharing = [self]

    def share_pool(self, other: "GraphCache") -> None:
        """Capture in the memory pool of another step's graphs, with which this step's never run at the same time."""
        self._sharing = other._sharing
        self._sharing.append(self)

    @property
    def pool(self) -> Any:
        """The handle of the memory pool, once there is a graph in it, or memory is lent."""
        if self.memory is not None:
            return self.memory.pool
        return next((cache.captured[0].pool for cache in self._sharing if cache.captured), None)

    def _try(self, key: Any, capture_graph: Callable[[], Captured]) -> None:
        """Capture a graph unless that succeeded or failed before."""
        if key in self._known or key in self._broken:
            return
        try:
            self._known[key] = capture_graph()
            self.captured.append(self._known[key])
        except (GraphError, torch.OutOfMemoryError) as error:
            if error is not self._full:  # or an entry for every shape
                self._broken[key] = error if self._required else without_frames(error)

    def _all_captured(self, keys: Sequence[Any], first: bool = False, last: bool = True) -> bool:
        """Return whether all of `keys` have graphs, at the first step on all ranks. `last`: no other graph can serve."""
        error = next((self._broken.get(key, self._full) for key in keys if key not in self._known), None)
        reason = first_refusal(self.step.ranks if first else ALONE, None if error is None else str(error))
        if reason is None:
            return True
        if self._required and last:
            raise error or GraphError(reason)
        if error is None or error not in self._reported:
            fallback("train step as one graph", reason)
            self._reported.append(error)
        if first and not self.step.ranks.alone:
            self.off = True
            self.drop()
        return False

    def _capture_together(self, part: Callable, batch: MicroBatch | None = None) -> Captured:
        """Capture a graph with sums over ranks inside, on all ranks together."""
        captured = capture_on_all_ranks(self.step.ranks, lambda go: self._graph(part, batch, go))
        self.step.ranks.graphs.add(captured)
        return captured

    def _graph(
        self,
        part: Callable,
        batch: MicroBatch | None = None,
        gate: Callable[[], None] = open_gate,
        state: list[Tensor] | None = None,
        lend: Lend = lend_nothing,
    ) -> Captured:
        """Capture a part of the step, which writes `state`: by default all that a step writes, else no weights."""
        step = self.step
        if step.early is not None and step.optimizer.host is not None:
            raise GraphError(
                "train step: its state in host memory passes through the GPU within backward, and a certificate would copy all "
                "of it; leave update_in_backward or offload_optimizer out, or take graph='off'."
            )
        if step.early is not None and step.device.type == "cuda":
            need, free = 2 * sum(tensor.nbytes for tensor in step.state()), host_bytes()
            if free is not None and need > HOST_SHARE * free:
                raise GraphError(
                    f"train step: its certificate would copy {readable(need)} to host memory, of which {readable(free)} are "
                    f"free; leave update_in_backward out, or take AdamW8bit."
                )
        if batch is not None and sum(kind in (STEP, PART) for kind, _ in self._known) >= MOST:
            self._full = self._full or GraphError(
                f"{MOST} shapes of micro-batch are captured already, each mode of the model and each set of hooks and adapters "
                f"counted apart; pad the batches to fewer shapes."
            )
            raise self._full
        if batch is not None and isinstance(step.loss, Objective):
            step.loss.prepare(step.model, batch.whole())
        tensors = () if batch is None else batch.tensors
        written = [step.model, *(step.state() if state is None else state)]
        reads = () if state is None else step.optimizer.weights.flat
        warm = self.memory is not None and not self.captured
        return capture(
            part, *tensors,
            pool=self.pool, state=written, tolerance=self._tolerance(), clone=True, gate=gate, warm_in_pool=warm, lend=lend,
            reads=reads,
        )  # fmt: skip

    @contextmanager
    def _lend_state(self) -> Iterator[list[Tensor]]:
        """Lend state that only the update uses, where it is made again from nothing: moments that are zero, as before the first
        update, and masters that are their weights in fp32. Copies of a gradient in host memory took 0.9 s at 350m.
        """
        optimizer = self.step.optimizer
        if optimizer.host is not None:
            yield []
            return
        moments = [raw for raw in map(bytes_of, optimizer.moments) if not any(part.any() for part in raw.split(READ))]
        pairs = [] if optimizer.weights.split else [(flat, master) for _, flat, master in optimizer.weights.rounded]
        masters = [pair for pair in pairs if all(a.float().equal(b) for a, b in zip(*(t.split(READ) for t in pair)))]
        try:
            yield [*moments, *(master for _, master in masters)]
        finally:
            for raw in moments:
                raw.zero_()
            for flat, master in masters:
                master.copy_(flat)

    def _tolerance(self) -> float:
        """Adam's first updates are ± the rate whatever the gradient, so an element that is all noise may go either way."""
        if not has_graphs(self.step.device):
            return 0.0
        optimizer = self.step.optimizer
        # abs() would be a copy of all of a buffer
        bounds = (extreme for weight in optimizer.weights.flat for extreme in weight.aminmax())
        largest = max(abs(extreme.item()) for extreme in bounds)
        noise = NOISE_FP8 if self.step.precision.fp8 else NOISE
        return min(noise + 4 * optimizer.rates.abs().max().item() / max(largest, 1e-12), MOST_NOISE)


def without_frames(error: Exception) -> Exception:
    """Return an error without tracebacks: their frames keep a micro-batch, and activations that there was no room for."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__, at = None, at.__cause__ or at.__context__
    return error


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"
