"""Contenders of whole training steps, each in a process of its own (train_worker.py, lora_worker.py), that step in turn."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gpubound.errors import MeasureError

from .harness import Bench
from .serving import MARK, Job

SAMPLE_S = 0.5  # steps timed together: enough that the wait at their end does not count


class Worker:
    """A contender's process. Use it in a `with`: it ends there, and gives its memory back. `kernels`: where they are kept.

    On a CPU the definitions run, never the kernels in Triton's interpreter, in which a step takes minutes.
    """

    def __init__(self, job: Job, module: str = "benchmarks.train_worker", kernels: str | None = None):
        self.who = job.who
        command = [sys.executable, "-m", module, json.dumps(asdict(job))]
        there = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        there |= {} if kernels is None else {"TRITON_CACHE_DIR": kernels}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=there)
        self.facts: dict[str, Any] = self._hear()

    def ask(self, **wish: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(wish), file=self.process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            print(line, end="", file=sys.stderr)
        self._end()
        raise MeasureError(f"{self.who}: its process ended with {self.process.returncode}; its own message is above.")

    def _end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def started(bench: Bench, name: str, worker: Callable[..., Worker], job: Job, **rest: Any) -> Worker | None:
    """The contender, or None, which is told, where its process ended at once."""
    try:
        return worker(job, **rest)
    except MeasureError as error:
        bench.unmeasured.append(f"{name}: {error}")
        return None


def take_turns(workers: dict[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each, round by round."""
    steps = {name: max(1, round(SAMPLE_S / worker.ask(steps=2))) for name, worker in workers.items()}
    order, found, shuffle = list(workers), {name: [] for name in workers}, random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            found[name].append(workers[name].ask(steps=steps[name]))
    return found
