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

from ..data import Feed
from ..data.leaves import Path, flatten, name
from ..distributed import ALONE
from ..distributed.collective_capture import capture_on_all_ranks, refusal
from ..errors import GraphError
from ..graph import Captured, capture
from ..graph.runner import open_gate
from ..trace import fallback
from .device_step import DeviceStep
from .objectives import Objective

MODES = ("auto", "require", "off")
WHOLE, PART = "a step of one micro-batch", "a micro-batch"
UPDATE, APPLY = "the update", "the update behind the sums over ranks"
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
    """One micro-batch, taken apart into its tensors and checked.

    signature  its shapes, dtypes and constants
    key        the signature, and that of the model (ModelGuard.signature): what one graph serves
    """

    def __init__(self, batch: Any, device: torch.device, model: int):
        self.tree, self.model = flatten(batch), model
        signature = list[tuple]()
        for at, (path, leaf) in enumerate(zip(self.tree.paths, self.tree.leaves)):
            _check(path, leaf, device)
            signature.append((path, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf))
            if isinstance(leaf, Tensor) and leaf.is_inference():  # a backward may not keep it
                self.tree.leaves[at] = leaf.clone()
        self.signature, self.tensors = tuple(signature), [leaf for leaf in self.tree.leaves if isinstance(leaf, Tensor)]
        self.key = model, self.signature

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


class GraphCache:
    """Runs the device step on micro-batches: as graphs where the device has them and `mode` allows it.

    auto captures on a GPU alone. require always goes through capture(), which on a CPU makes the same checks, without a graph.
    A step of one micro-batch is one graph; of more, a graph that every micro-batch is a replay of, and one for the update.

    Where ranks share the step, their sums are inside only of what all capture at once, at the first step (attempt.py). If one
    rank cannot have that, none has it, and the sums run between graphs, which a rank then captures by itself, as it does for a
    shape that only it meets later. The sums come in the same order in each of these ways, so ranks may differ in theirs.
    """

    def __init__(self, step: DeviceStep, mode: str):
        self.step = step
        self.captured: list[Captured] = []
        self._off = mode == "off" or (mode == "auto" and not has_graphs(step.device))
        self._required = mode == "require"
        self._first = True  # all ranks take their first step
        self._checked: set[Any] = set()  # signatures of micro-batches
        self._known: dict[Any, Captured] = {}  # by what it holds, and a micro-batch's key
        self._broken: dict[Any, Exception] = {}  # what cannot be captured
        self._reported: list[Exception | None] = []  # of these, in a row of fallbacks
        self._full: GraphError | None = None  # that there are MOST graphs already

    def run(self, window: list[MicroBatch]) -> Tensor | None:
        """Return the step's report. Without a micro-batch this rank takes part in the others' step; None if they have none."""
        step, first = self.step, self._first
        if not window:
            return step.take_part()
        if isinstance(step.loss, Objective):
            for number, batch in enumerate(window):
                if batch.signature not in self._checked:
                    check = partial(step.loss.check_batch, step.model, batch.whole())
                    # The first check runs the model, whose weights may be sharded: all ranks come to it.
                    step.sharding.with_weights(check) if first and not number else check()
                    self._checked.add(batch.signature)
        self._first = False
        if first:
            step.prepare(window[0].whole())
        if self._off:
            return step.run([batch.whole() for batch in window])
        if step.single and (whole := self._whole(window[0], first)) is not None:
            return whole(*window[0].tensors)
        if (step.single and step.ranks.alone) or not self._parts(window, first):
            return step.run([batch.whole() for batch in window])
        if not step.single:
            step.begin()
        for batch in window:
            self._check_adding()
            self._known[PART, batch.key](*batch.tensors)
        return self._update(window[0].model, first)

    def _whole(self, batch: MicroBatch, first: bool) -> Captured | None:
        """Return the graph of a whole step of this one micro-batch, or None."""
        key, step = (WHOLE, batch.key), self.step

        def train_step(*leaves: Tensor) -> Tensor:
            with step.reduction.completed():
                return step.run([batch.whole(leaves)])

        if step.ranks.alone or first:
            self._try(key, lambda: self._at_once(train_step, batch))
            self._have([key], last=step.ranks.alone)
        return self._known.get(key)

    def _parts(self, window: list[MicroBatch], first: bool) -> bool:
        """Return whether each micro-batch has a graph, without sums over ranks."""
        step, keys = self.step, [(PART, batch.key) for batch in window]
        for batch, key in zip(window, keys):
            if key in self._known:
                continue

            def micro_batch(*leaves: Tensor, batch: MicroBatch = batch) -> None:
                if step.single:
                    step.begin()
                step.add(batch.whole(leaves))
                if step.single:
                    step.finish()

            self._check_adding()
            self._try(key, partial(self._graph, micro_batch, batch))
        return self._have(keys, first)

    def _update(self, model: int, first: bool) -> Tensor:
        """Run the update as a graph, captured at its first time: only after real gradients does its certificate see weights
        move. It calls no module, but what it names leads to the model, so a model in another mode is another one to its graph.
        """
        step, whole, apart = self.step, (UPDATE, model), (APPLY, model)

        def update() -> Tensor:
            with step.reduction.completed():
                return step.update()

        if step.ranks.alone or (first and not step.single):
            self._try(whole, lambda: self._at_once(update))
            if not self._have([whole], last=step.ranks.alone) and step.ranks.alone:
                return self._give_up(step.update)
        if whole in self._known:
            return self._known[whole]()
        step.finish()
        step.sum()
        self._try(apart, partial(self._graph, step.apply))
        return self._known[apart]() if self._have([apart], first) else self._give_up(step.apply)

    def _give_up(self, calls: Callable[[], Tensor]) -> Tensor:
        """A step is graphs or calls, so that no reader takes the times of one for those of the other."""
        self._off = True
        self.drop()
        return calls()

    def _check_adding(self) -> None:
        """Of several, a micro-batch's graph adds: where a sum waits to be written, it would add to the last window's."""
        if self.step.accumulators.opened and not self.step.single:
            raise GraphError(
                "train step: the gradient sums were opened to be written, but the graph of a micro-batch adds to them; "
                "begin the window with zero()."
            )

    def drop(self) -> None:
        self._known.clear()
        self.captured.clear()

    def _try(self, key: Any, capturing: Callable[[], Captured]) -> None:
        """Capture it at its first time, if that can be."""
        if key in self._known or key in self._broken:
            return
        try:
            self._known[key] = capturing()
            self.captured.append(self._known[key])
        except (GraphError, torch.OutOfMemoryError) as error:
            if error is not self._full:  # or a row for every shape there is
                self._broken[key] = error if self._required else without_frames(error)

    def _have(self, keys: Sequence[Any], first: bool = False, last: bool = True) -> bool:
        """Return whether there are graphs for all of `keys`; at the first step, on all ranks. `last`: nothing else has any."""
        error = next((self._broken.get(key, self._full) for key in keys if key not in self._known), None)
        said = refusal(self.step.ranks if first else ALONE, None if error is None else str(error))
        if said is None:
            return True
        if self._required and last:
            raise error or GraphError(said)
        if error is None or error not in self._reported:
            fallback("train step as one graph", said)
            self._reported.append(error)
        if first and not self.step.ranks.alone:
            self._off = True
            self.drop()
        return False

    def _at_once(self, part: Callable, batch: MicroBatch | None = None) -> Captured:
        """Capture a graph with sums over ranks inside, which all ranks capture at once."""
        captured = capture_on_all_ranks(self.step.ranks, lambda go: self._graph(part, batch, go))
        self.step.ranks.graphs.add(captured)
        return captured

    def _graph(self, part: Callable, batch: MicroBatch | None = None, gate: Callable[[], None] = open_gate) -> Captured:
        step = self.step
        if batch is not None and sum(kind in (WHOLE, PART) for kind, _ in self._known) >= MOST:
            self._full = self._full or GraphError(
                f"{MOST} shapes of micro-batch are captured already, each mode of the model and each set of hooks and adapters "
                f"counted apart; pad the batches to fewer shapes."
            )
            raise self._full
        if batch is not None and isinstance(step.loss, Objective):
            step.loss.prepare(step.model, batch.whole())
        tensors = () if batch is None else batch.tensors
        pool = self.captured[0].pool if self.captured else None
        state = [step.model, *step.state()]
        return capture(part, *tensors, pool=pool, state=state, tolerance=self._tolerance(), clone=True, gate=gate)

    def _tolerance(self) -> float:
        """Adam's first updates are ± the rate whatever the gradient, so an element that is all noise may go either way."""
        if not has_graphs(self.step.device):
            return 0.0
        optimizer = self.step.optimizer
        largest = max(weight.abs().max().item() for weight in optimizer.weights.finest())
        noise = NOISE_FP8 if self.step.precision.fp8 else NOISE
        return min(noise + 4 * optimizer.rates.abs().max().item() / max(largest, 1e-12), MOST_NOISE)


def without_frames(error: Exception) -> Exception:
    """An error that is kept and never raised again must not keep the calls that it came through: they hold a micro-batch, and
    activations that there was no room for."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__, at = None, at.__cause__ or at.__context__
    return error


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"
