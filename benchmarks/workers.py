"""Contenders of whole training steps, each in a process of its own (train_worker.py, lora_worker.py), that step in turn."""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypeVar

from torch.distributed import TCPStore

from gpubound.device import share_of_cores
from gpubound.errors import MeasureError

from .harness import Bench, compile_sources
from .serving import MARK, Job

TRAIN = "benchmarks.train_worker"
ENDING_S = 30  # a process with nothing left to do
SAMPLE_S = 0.5  # steps timed together: enough that the wait at their end does not count


W = TypeVar("W")


class Worker:
    """A contender's process. Use it in a `with`: it ends there, and gives its memory back.

    `kernels`: where they are kept. `variables`: of its environment, beside our own. `wait`: until it is ready, for its facts;
    where that takes longer than `limit` seconds, it is killed.

    On a CPU the definitions run, never the kernels in Triton's interpreter, in which a step takes minutes.
    """

    facts: Any = None

    def __init__(
        self,
        job: Job,
        module: str = TRAIN,
        kernels: str | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        wait: bool = True,
        limit: float | None = None,
    ):
        self.who, self.limit, self.late = job.who, limit, False
        if kernels is not None and job.device == "cuda":  # whose first step is timed
            compile_sources()
        command = [sys.executable, "-m", module, json.dumps(asdict(job))]
        there = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        there |= ({} if kernels is None else {"TRITON_CACHE_DIR": kernels}) | variables
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=there)
        if wait:
            self.hear_facts()

    def hear_facts(self) -> None:
        if self.facts is not None:
            return
        timer = threading.Timer(self.limit or 0, self._stop_late)
        if self.limit is not None:
            timer.start()
        try:
            self.facts = self._hear()
        finally:
            timer.cancel()

    def _stop_late(self) -> None:
        self.late = True
        self.process.kill()

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
        if self.late:
            raise MeasureError(f"{self.who}: no step has ended within {self.limit:.0f} s; give a longer --limit.")
        raise MeasureError(f"{self.who}: its process ended with {self.process.returncode}; its own message is above.")

    def _end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            print(f"{self.who}: its process has not ended within {ENDING_S} s and is killed.", file=sys.stderr)
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


class Team:
    """The processes of one contender on several GPUs, each a Worker, asked all at once. What they say is said as one:

    the slowest one's seconds, the most memory and host syncs, and the mean loss.
    """

    def __init__(self, job: Job, world: int, module: str = TRAIN, kernels: str | None = None):
        self.who, self._many = job.who, ThreadPoolExecutor(world)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
        common = {
            "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": share_of_cores(world),
        }  # fmt: skip
        ranks = [{name: str(value) for name, value in {**common, "RANK": i, "LOCAL_RANK": i}.items()} for i in range(world)]
        beginning = [self._many.submit(Worker, job, module, kernels, variables) for variables in ranks]
        wait(beginning)
        self._workers = [one.result() for one in beginning if one.exception() is None]
        if failed := [error for one in beginning if (error := one.exception()) is not None]:
            self._end()
            raise failed[0]
        self.facts = joint([worker.facts for worker in self._workers])

    def ask(self, **wish: Any) -> Any:
        return joint(list(self._many.map(lambda worker: worker.ask(**wish), self._workers)))

    def _end(self) -> None:
        list(self._many.map(lambda worker: worker.__exit__(), self._workers))  # at once: a rank ends when all others do
        self._many.shutdown()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def joint(said: list[Any]) -> Any:
    """What all ranks say, as one."""
    first = said[0]
    if isinstance(first, dict):
        mean = {"loss": sum(one["loss"] for one in said) / len(said)} if "loss" in first else {}
        return {name: joint([one[name] for one in said]) for name in first} | mean
    if isinstance(first, bool):
        return all(said)
    return max(said) if isinstance(first, int | float) else first


def started(bench: Bench, name: str, worker: Callable[..., W], job: Job, **rest: Any) -> W | None:
    """The contender, or None, which is told, where its process ended at once."""
    try:
        return worker(job, **rest)
    except MeasureError as error:
        bench.unmeasured.append(f"{name}: {error}")
        return None


def take_turns(workers: Mapping[str, Worker | Team], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each, round by round."""
    steps = {name: max(1, round(SAMPLE_S / worker.ask(steps=2))) for name, worker in workers.items()}
    order, found, shuffle = list(workers), {name: [] for name in workers}, random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            found[name].append(workers[name].ask(steps=steps[name]))
    return found
