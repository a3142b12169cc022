"""k steps of devices that work on one token: a CUDA graph for each device, launched one behind the other.

A kernel that waits for words holds its own device alone, never the host: so every graph is launched whatever the others do, and
what it waits for is sent by kernels that are launched already, or will be. Kernels of a device run in order, and a step's
exchanges have the same order everywhere; of two that wait for each other neither sends behind its wait.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..step_graphs import SamplingVariant, StepGraphs, choose, into_body
from .body import PROMPT_ROWS


class SliceGraphs(StepGraphs):
    """The captured launches of all devices. On a CPU they compute one after the other."""

    longest_prompt = PROMPT_ROWS

    def _make(self, rows: int, steps: int, way: SamplingVariant) -> Callable[[], None]:
        if self.slots.device.type != "cuda":
            return partial(self.run, rows, steps, way)
        if (rows, way) not in self._warm:
            saved = self._state(rows)
            self._try(lambda number: self._run_on(number, rows, 1, way))
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((rows, way))
        return self._record(f"decode {rows} x {steps}", lambda number: self._run_on(number, rows, steps, way))

    def _capture_prefill(self, ids: Tensor, lengths: Tensor) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
        self._try(lambda number: self.body.prompt_on(number, ids))
        replay = self._record(f"prefill {len(ids)} x {ids.shape[1]}", lambda number: self.body.prompt_on(number, ids))
        self._prompts[ids.shape] = found = (ids, lengths), replay
        return found

    def _try(self, call: Callable[[int], None]) -> None:
        """Let the kernels of each device compile and test themselves. They wait for nobody: what they compute is nothing."""
        for number, peer in enumerate(self.body.peers):
            peer.wait(0)
            self._runner_on(peer.device).run(partial(call, number))
            peer.wait()

    def _record(self, name: str, call: Callable[[int], None]) -> Callable[[], None]:
        runners = [self._runner_on(peer.device) for peer in self.body.peers]
        for number, runner in enumerate(runners):
            runner.record(f"{name}, slice {number}", partial(call, number), [], set())
        return partial(_replay, runners)

    def _run_on(self, number: int, rows: int, steps: int, way: SamplingVariant) -> None:
        """`steps` steps of one device; the first chooses."""
        body, slots = self.body, self.slots
        state = slots.rows.first(rows)
        plain = way.greedy and not way.logprobs and body.finds_best(rows)
        settings = None if plain else slots.choice(slice(rows), way.penalty)
        for step in range(steps):
            body.step_on(number, rows, state.token, state.position, ("best", "arg") if plain else ("logits",))
            if number == 0:
                logprob = slots.logprobs[step, :rows] if way.logprobs else None
                choose(body, body.logits[:rows], state, settings, into_body(body, slots.emitted[step, :rows]), logprob)


def _replay(runners: list[Any]) -> None:
    for runner in runners:
        runner.replay()
