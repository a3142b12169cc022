"""Ranks for tests: processes on this machine that speak over gloo, as torchrun makes them, without its start-up time.

A server that has imported torch and gpubound forks each rank, 0.1 s instead of 4. What a rank returns is compared in the test.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..processes import forking

SECONDS = 120  # for all ranks together; a busy machine takes a twentieth


class RankFailed(AssertionError):
    """A rank ended with an error, or without a word."""


def on_ranks(world: int, work: Callable, *args: Any, seconds: float = SECONDS, store: Any = None) -> list[Any]:
    """`work(*args)` in each of `world` processes that find each other by torchrun's variables; what each returned, by rank.

    `work` is a function of a module. It joins by itself: `with distributed.join("cpu") as ranks:`.
    """
    processes, pipes, store = started(world, work, *args, store=store)
    results: list[Any] = []
    for rank, (process, pipe) in enumerate(zip(processes, pipes)):
        if not pipe.poll(seconds):
            results.append(RankFailed(f"rank {rank} said nothing within {seconds} s"))
            continue
        try:
            results.append(pipe.recv())
        except EOFError:
            process.join()
            results.append(RankFailed(f"rank {rank} ended with code {process.exitcode} and without a word"))
    for process in processes:
        process.join(timeout=10)
        process.kill()
    del store
    if failed := [result for result in results if isinstance(result, RankFailed)]:
        raise RankFailed("\n".join(map(str, failed)))
    return results


def each_on_ranks(world: int, works: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """What each of several works returned by rank, in the same processes: starting some costs more than many a work."""
    ranks = on_ranks(world, _each, works, seconds=SECONDS * len(works))
    return {name: [rank[name] for rank in ranks] for name in works}


def _each(works: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: work() for name, work in works.items()}


def started(world: int, work: Callable, *args: Any, store: Any = None) -> tuple[list[Any], list[Any], Any]:
    """(processes, the pipes of their results, the store where they meet: keep it while they run). For tests that kill them.
    `store`: one where others have met before, as torch's agent keeps it when it starts the ranks again."""
    context, store = forking(), store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        variables = {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        process = context.Process(target=_rank, args=(there, variables, work, args), daemon=True)
        process.start()
        there.close()  # so that a rank's end is seen
        processes.append(process)
        pipes.append(here)
    return processes, pipes, store


def _rank(pipe: Any, variables: dict[str, Any], work: Callable, args: tuple) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.pop("TRITON_INTERPRET", None)  # the definitions: ten times faster, and what ranks add to them is the same
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # as tests/footing.py: what is not written holds NaN
    faulthandler.dump_traceback_later(SECONDS - 5)  # of one that hangs, its lines
    try:
        result = work(*args)
    except BaseException:
        result = RankFailed(f"rank {variables['RANK']}:\n{traceback.format_exc()}")
    pipe.send(result)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # nothing of the server's is ended here
