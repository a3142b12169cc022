"""k steps in one launch: a CUDA graph a bucket of rows, a number of steps and a way of choosing; plain calls on a CPU.

Prompts too: a prefill that comes a second time in one size is captured, if it is small enough to be bound by its launches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..graph.runner import GraphRunner
from ..kernels import pick, sample
from .slots import Slots


class LaunchWay(NamedTuple):
    """How tokens are chosen, as far as it changes what is launched."""

    greedy: bool = True
    penalty: bool = False
    logprobs: bool = False


def run_steps(body: Any, slots: Slots, rows: int, steps: int, way: LaunchWay) -> None:
    """`steps` tokens for each of the first `rows` rows, all on the device. The one definition of the loop: graphs record it."""
    state, settings = slots.first(rows), slots.choice(rows, way.penalty)
    embed = body.embed
    x = body.x[:rows] if embed is not None else None
    chained = body.chained(rows)
    found_by_parts = way.greedy and not way.logprobs and body.finds_best(rows)
    for step in range(steps):
        logits = body.step(state.token, state.position)
        emitted = slots.emitted(step, rows)
        if found_by_parts:
            pick(body.best[:rows], body.arg[:rows], state, emitted, None, embed, x, chained)
        else:
            sample(logits, state, settings, emitted, slots.logprob(step, rows) if way.logprobs else None, embed, x, chained)


PROMPT_TOKENS = 4096  # in a prefill, padding counted: more keep the GPU busy for longer than their launches take


class StepGraphs:
    """The captured launches of a body, made when first wanted; all share one pool of memory."""

    def __init__(self, body: Any, slots: Slots, run: Callable[[int, int, LaunchWay], None] | None = None) -> None:
        self.body, self.slots = body, slots
        self.run = run or partial(run_steps, body, slots)
        self.clear()

    def clear(self) -> None:
        """Forget every graph, after the weights have moved."""
        self._launches: dict[tuple[int, int, LaunchWay], Callable[[], None]] = {}
        self._warm: set[tuple[int, LaunchWay]] = set()
        self._prompts: dict[tuple[int, int], Callable[[], None] | None] = {}
        self._given: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._launches)

    def launch(self, rows: int, steps: int, way: LaunchWay) -> None:
        key = (rows, steps, way)
        if key not in self._launches:
            self._launches[key] = self._make(*key)
        self._launches[key]()

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """body.prefill(ids (B, T), lengths (B,))."""
        size = (ids.shape[0], ids.shape[1])
        if not self.body.captures_prefill or ids.device.type != "cuda" or not 0 < ids.numel() <= PROMPT_TOKENS:
            self.body.prefill(ids, lengths)
        elif size not in self._prompts:  # its kernels compile and test themselves now
            self.body.prefill(ids, lengths)
            self._prompts[size] = None
        else:
            replay = self._prompts[size] or self._capture_prefill(size, ids, lengths)
            for kept, new in zip(self._given[size], (ids, lengths)):
                kept.copy_(new)
            replay()

    def _capture_prefill(self, size: tuple[int, int], ids: Tensor, lengths: Tensor) -> Callable[[], None]:
        given = self._given[size] = (ids.clone(), lengths.clone())
        runner = GraphRunner(ids.device, self._pool)
        self._pool = runner.pool
        runner.record(f"prefill {size[0]} x {size[1]}", lambda: self.body.prefill(*given), [], set())
        self._prompts[size] = runner.replay
        return runner.replay

    def _make(self, rows: int, steps: int, way: LaunchWay) -> Callable[[], None]:
        def call() -> None:
            self.run(rows, steps, way)

        device = self.slots.device
        if device.type != "cuda":
            return call
        runner = GraphRunner(device, self._pool)
        self._pool = runner.pool
        if (rows, way) not in self._warm:  # kernels compile and test themselves at their first call, which no graph may hold
            saved = self._state(rows)
            runner.run(lambda: self.run(rows, 1, way))
            self._restore(saved)
            self._warm.add((rows, way))
        runner.record(f"decode {rows} x {steps}", call, [], set())
        return runner.replay

    def _state(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """What a step changes besides the place it writes in the cache, which the next step at that position writes again."""
        tensors = [self.slots.block, self.slots.rows.token, self.slots.rows.position]
        tensors += [t for t in (self.body.x, self.slots.seen) if t is not None]
        return [(t, t.clone()) for t in tensors]

    @staticmethod
    def _restore(saved: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, before in saved:
            tensor.copy_(before)
