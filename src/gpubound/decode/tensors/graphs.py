"""k steps of devices that work on one token: a CUDA graph for each device, launched one behind the other.

A kernel that waits for words holds its own device alone, never the host: so every graph is launched whatever the others do, and
what it waits for is sent by kernels that are launched already, or will be. Kernels of a device run in order, and a step's
exchanges have the same order everywhere; of two that wait for each other neither sends behind its wait.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..steps import LaunchWay, StepGraphs, choose, into_body


class SliceGraphs(StepGraphs):
    """The captured launches of all devices. On a CPU they compute one after the other."""

    def _make(self, rows: int, steps: int, way: LaunchWay) -> Callable[[], None]:
        if self.slots.device.type != "cuda":
            return partial(self.run, rows, steps, way)
        runners = [self._runner_on(plan.device) for plan in self.body.plans]
        if (rows, way) not in self._warm:  # kernels compile and test themselves, and wait for nobody
            saved = self._state(rows)
            for number, (peer, runner) in enumerate(zip(self.body.peers, runners)):
                peer.wait(0)
                runner.run(partial(self._run_on, number, rows, 1, way))
                peer.wait()
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((rows, way))
        for number, runner in enumerate(runners):
            call = partial(self._run_on, number, rows, steps, way)
            runner.record(f"decode {rows} x {steps}, slice {number}", call, [], set())
        return partial(_replay, runners)

    def _run_on(self, number: int, rows: int, steps: int, way: LaunchWay) -> None:
        """`steps` steps of one device; the first chooses."""
        body, slots = self.body, self.slots
        state = slots.rows.first(rows)
        plain = way.greedy and not way.logprobs
        settings = None if plain else slots.choice(slice(rows), way.penalty)
        for step in range(steps):
            body.step_on(number, rows, state.position, ("best", "arg") if plain else ("logits",))
            if number == 0:
                logprob = slots.logprobs[step, :rows] if way.logprobs else None
                choose(body, body.logits[:rows], state, settings, into_body(body, slots.emitted[step, :rows]), logprob)


def _replay(runners: list[Any]) -> None:
    for runner in runners:
        runner.replay()
