"""The host's part of the decoding benchmark: its time a token, and the speed beside two busy Python threads."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

import gpubound
from gpubound import measure
from gpubound.trace import strict

from .decode_peers import LENGTH, NEW, PROMPT, prompts
from .harness import Bench

HOST_US = 5.0  # of the host's time, a token
HOST_K = 32  # tokens a launch there
BUSY = 0.97  # of the speed stays beside two busy threads


def measure_host(bench: Bench, name: str, model: Any) -> None:
    """At batch 1: what the host does for a token, and whether it matters that it has other things to do."""
    ids = prompts(name, 1, bench.device).tolist()
    with strict():
        decoder = gpubound.decoder(model, 1, LENGTH)
        for _ in range(2):
            decoder.generate(ids, max_new_tokens=NEW, stop=())
    spent = host_us(decoder, ids, 1 if bench.dry else 5)
    case = f"{name} host time a token, {HOST_K} a launch"
    bench.figure(case, "us", spent, {"budget": HOST_US}, {"budget": 1.0})
    rounds, new = (
        (3, 3) if bench.dry else (5, NEW)
    )  # on a CPU every op of a token is launched by the host, and waits for the GIL
    whole: dict[str, list[float]] = {"ours": [], "undisturbed": []}
    later: dict[str, list[float]] = {"ours": [], "undisturbed": []}
    for _ in range(rounds):
        for who, threads in (("undisturbed", 0), ("ours", 2)):
            with busy(threads):
                found = decoder.generate(ids, max_new_tokens=new, stop=())
            whole[who].append(found.seconds)
            later[who].append(found.seconds - found.first_token_s)
    for what, seconds, tokens, gates in (
        ("after the first token", later, new - 1, {"undisturbed": BUSY}),
        ("with its prompt", whole, new, None),
    ):
        found = measure.compare_samples(seconds, clock="perf_counter")
        bench.keep(f"{name} beside two busy Python threads, {what}", found, unit="tok/s", amount=tokens, gates=gates)


def host_us(
    decoder: Any, ids: list[list[int]], rounds: int, k: int = HOST_K, new: int = LENGTH - PROMPT, idle: bool = False
) -> float:
    """A token's share of the median cycle from one launch of k tokens to the next, less what it waited for the device.

    idle: wait for the device before each launch. A launch of thousands of kernels otherwise waits inside the driver for room
    in its queue, which cannot be told from work.
    """
    waited, marks, cycles = [0.0], [], []
    launch, events = decoder.graphs.launch, decoder.slots._events

    def marking(*what: Any) -> None:
        if idle and events:
            timed(waited, torch.cuda.synchronize)
        if k in what:
            marks.append((time.perf_counter(), waited[0]))
        launch(*what) if events else timed(waited, lambda: launch(*what))  # on a CPU the launch is the work

    decoder.graphs.launch, decoder.slots._events = marking, [Waiting(event, waited) for event in events]
    try:
        for _ in range(rounds):
            marks.clear()
            decoder.generate(ids, max_new_tokens=new, stop=())
            cycles += [(then[0] - now[0]) - (then[1] - now[1]) for now, then in pairwise(marks)]
    finally:
        del decoder.graphs.launch
        decoder.slots._events = events
    return statistics.median(cycles) / k * 1e6


class Waiting:
    """An event that is waited for at once when it is asked, so that the waiting can be told from the work."""

    def __init__(self, event: torch.cuda.Event, waited: list[float]):
        self.event, self.waited = event, waited

    def record(self) -> None:
        self.event.record()

    def query(self) -> bool:
        timed(self.waited, self.event.synchronize)
        return True


def timed(total: list[float], work: Callable[[], object]) -> None:
    begun = time.perf_counter()
    work()
    total[0] += time.perf_counter() - begun


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """So many threads that compute in Python all the time, each holding the GIL as long as it may."""
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    running = [threading.Thread(target=count, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()
