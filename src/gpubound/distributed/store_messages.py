"""Exchange texts between the processes of a script after its process group has been destroyed.

The texts go through the rendezvous store, which torchrun's agent keeps.
"""

import os
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .failures import meeting_place
from .ranks import launched

SILENT = timedelta(minutes=1)  # all ranks end at the same step; what is left is a profile to read


def numbers() -> tuple[int, int]:
    """Return (this process's rank, number of ranks) from the launcher's variables; (0, 1) without a launcher."""
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched() else (0, 1)


def gather_texts(text: str, timeout: timedelta = SILENT) -> dict[int, str]:
    """Return all ranks' texts by rank on the first rank, without those that did not arrive within `timeout`; {} on others."""
    rank, world = numbers()
    found = {rank: text} if rank == 0 else {}
    if world == 1:
        return found
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"gpubound/told/{attempt}/{other}" for other in range(world)]
    try:
        place = meeting_place(timeout)
        place.set(keys[rank], text)
        until = time.monotonic() + timeout.total_seconds()
        for other in range(1, world) if rank == 0 else ():
            try:
                place.wait([keys[other]], timedelta(seconds=max(until - time.monotonic(), 0.1)))
            except dist.DistStoreError:
                continue  # missing in what is returned, which the caller says
            found[other] = place.get(keys[other]).decode()
    except (dist.DistNetworkError, RuntimeError):  # the place is gone with the process that kept it
        return found
    return found


def wait_for_ranks(timeout: timedelta = SILENT) -> None:
    """Wait until all ranks are here, or `timeout` is over: who leaves sooner takes away what another still reads from it."""
    rank, world = numbers()
    if world == 1:
        return
    keys = [f"gpubound/met/{other}" for other in range(world)]
    with suppress(dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        place = meeting_place(timeout)
        place.set(keys[rank], "")
        place.wait(keys, timeout)
