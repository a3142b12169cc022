"""The time that a script waits for its DataLoader, measured without a profiler.

A profiler slows the host, but not the loader's workers. So a loader that cannot keep up with the script may keep up with the
recorded script, and the tape has no waits for it. Slow steps also fill the loader's queue: the steps after them take batches
that were made before, until the queue is empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...watch.ops import replaced


class LoaderClock:
    """Inside its block, the seconds in which the thread that opened it was in a DataLoader."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ahead = 0  # batches that workers may have made in advance
        self.waited = False  # whether a batch was not ready when it was asked for
        self.workers = 0  # of the loader that has the most
        self._home = 0
        self._ending = ExitStack()

    def __enter__(self) -> LoaderClock:
        self._home = threading.get_ident()
        self._ending.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._timed))
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.close()

    def restart(self) -> None:
        self.seconds = 0.0

    def _timed(self, original: Callable) -> Callable:
        def following(iterator: Any) -> Any:
            if threading.get_ident() != self._home:
                return original(iterator)
            self.ahead = max(self.ahead, batches_ahead(iterator))
            self.workers = max(self.workers, getattr(iterator, "_num_workers", 0))
            self.waited |= not is_ready(iterator)
            began = time.perf_counter()
            try:
                return original(iterator)
            finally:
                self.seconds += time.perf_counter() - began

        return following


def batches_ahead(iterator: Any) -> int:
    """Return how many batches the workers of a DataLoader's iterator make in advance; 0 without workers."""
    return getattr(iterator, "_num_workers", 0) * (getattr(iterator, "_prefetch_factor", None) or 0)


def is_ready(iterator: Any) -> bool:
    """Return whether the next batch of a DataLoader's iterator has been made. Without workers, none is made in advance."""
    queue, tasks = getattr(iterator, "_data_queue", None), getattr(iterator, "_task_info", {})
    arrived = len(tasks.get(getattr(iterator, "_rcvd_idx", None), ())) == 2  # out of order: it is kept with its worker's number
    return arrived or (queue is not None and not queue.empty())
