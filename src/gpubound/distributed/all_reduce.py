"""The sum of all gradients over ranks, once a step, bucket by bucket, most of it while backward still runs.

The gradients lie in one flat buffer, and a bucket is a stretch of it. Its sum begins as soon as the last of its parameters is
finished in this backward; the host goes on, and the step waits on the device, before the norm. A parameter is finished when
autograd has come to the end of all its uses: the hook for that sits on its AccumulateGrad node, which runs also where our own
products have added the gradient to main_grad and handed on none. A tied weight has one node, behind its last use.

The order of the sums is the same on every rank whatever arrives first: bucket by bucket, in the order in which a first backward
finished them. Ranks that sum in different orders would wait for each other for ever. What is not finished exactly once in that
backward, on any rank, is summed at the end.

The device notes when it has nothing left to do but to wait for sums, and when they are there. The slowest rank waits least.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from ..kernels.device_timestamps import Stamps, can_stamp
from .ranks import Ranks
from .symmetric_memory import SymmetricSums

# NCCL comes near its full rate between 25 and 200 MB. The last bucket is what nothing hides: at 300 GB/s these take 0.2 ms.
BUCKET = (64 << 20) // 4  # elements
LATE = math.inf


@dataclass(frozen=True)
class Bucket:
    """Elements start to stop of the flat buffer, and the numbers of the parameters in there."""

    start: int
    stop: int
    members: tuple[int, ...]
    ready: float = LATE  # after how many parameters it is finished


def cut(starts: Sequence[int], size: int, borders: Collection[int], order: Sequence[float], most: int) -> list[Bucket]:
    """Buckets over elements 0 to `size`, in the order in which they are finished.

    starts   where each parameter begins, ascending
    borders  starts that a bucket may not reach over: on either side lie parameters of all layers, as gains behind matrices
    order    when each parameter is finished; LATE where that is not known
    """
    runs: list[list[int]] = []
    for number, start in enumerate(starts):
        stop = starts[number + 1] if number + 1 < len(starts) else size
        apart = not runs or start in borders or (order[number] == LATE) != (order[runs[-1][0]] == LATE)
        if apart or stop - starts[runs[-1][0]] > most:
            runs.append([])
        runs[-1].append(number)
    stops = [starts[run[0]] for run in runs[1:]] + [size]
    found = [Bucket(starts[run[0]], stop, tuple(run), max(order[number] for number in run)) for run, stop in zip(runs, stops)]
    return sorted(found, key=lambda bucket: (bucket.ready, bucket.start))


class Reduction:
    """What all ranks sum in a step: `flat` in buckets, then the small tensors `sums`, and the largest of each in `largest`.

    parameters, starts, borders  whose gradients lie in `flat`, and where: see `cut`
    settle  is told the parameters of a bucket before it is summed: whatever is still to be added to `flat` is added then
    launch  runs the beginning of a sum on the stream where gradients are written
    peers   adds up `flat` between the GPUs of one machine; None: NCCL or gloo does
    """

    def __init__(
        self,
        ranks: Ranks,
        flat: Tensor,
        parameters: Sequence[Parameter],
        starts: Sequence[int],
        borders: Collection[int],
        settle: Callable[[Sequence[Parameter]], None],
        launch: Callable[[Callable[[], Any]], Any],
        sums: Sequence[Tensor],
        largest: Sequence[Tensor] = (),
        peers: SymmetricSums | None = None,
    ):
        self.ranks, self.flat, self.sums, self.largest, self._peers = ranks, flat, sums, largest, peers
        self._parameters, self._starts, self._borders = list(parameters), list(starts), set(borders)
        self._settle, self._launch = settle, launch
        # Autograd may run nodes without a gradient in the caller's thread and the others in the device's.
        self._lock = threading.RLock()
        self._hear: Callable[[int], None] = self._arrived  # who is told of a parameter that is finished
        self._due = False  # sums of this step, with which others count
        # When this rank's device began to wait for the sums of this step, and when it had them.
        self._waits = Stamps(flat.device, 2) if not ranks.alone and can_stamp(flat.device) else None
        self._plan([Bucket(0, flat.numel(), tuple(range(len(starts))))] if starts else [])

    def _plan(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._bucket_of = {member: index for index, bucket in enumerate(buckets) for member in bucket.members}
        self.begin()

    @property
    def learns(self) -> bool:
        """Return whether the reduction must observe a backward before its first sum."""
        return bool(self._parameters) and not self.ranks.alone

    @property
    def waited(self) -> Tensor | None:
        """Return int64 (2,), ns: start and end of this rank's wait for sums in the newest step. None if not measured."""
        return None if self._waits is None else self._waits.times

    def begin(self) -> None:
        """A new step."""
        self._left = [len(bucket.members) for bucket in self.buckets]
        self._begun = 0
        self._works: list[Callable[[], Any]] = []

    def learn(self, backward: Callable[[], Any]) -> None:
        """Form buckets by the order in which parameters are finished while `backward` is listened to. Nothing is summed."""
        came: list[int] = []
        self._hear = came.append
        try:
            backward()
        finally:
            self._hear = self._arrived
        once = {number: float(at) for at, number in enumerate(came) if came.count(number) == 1}
        first, *others = self.ranks.gather([once.get(number, LATE) for number in range(len(self._starts))])
        order = [LATE if LATE in seen else seen[0] for seen in zip(first, *others)]
        self._plan(cut(self._starts, self.flat.numel(), self._borders, order, BUCKET))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the last backward of a step, behind its forward: sums begin as parameters are finished."""
        if not self.learns:
            yield
            return
        # Anew for each backward: a node kept from one step to the next would keep its stream, too, and a capture on another
        # stream would wait for that one.
        nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]
        handles = [node.register_hook(partial(_call, self._hear, number)) for number, node in enumerate(nodes)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrived(self, number: int) -> None:
        with self._lock:
            index = self._bucket_of[number]
            if self.buckets[index].ready == LATE:
                return
            self._left[index] -= 1
            assert self._left[index] >= 0, "a parameter was finished twice in one backward, and only once in the first"
            while self._begun < len(self.buckets) and self._left[self._begun] == 0 and self.buckets[self._begun].ready != LATE:
                self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[self._begun]
        self._settle([self._parameters[number] for number in bucket.members])
        self._launch(lambda: self._works.append(self._begin_sum(bucket.start, bucket.stop)))
        self._begun += 1

    def _begin_sum(self, start: int, stop: int) -> Callable[[], Any]:
        return self.ranks.begin_sum(self.flat[start:stop]) if self._peers is None else self._peers.begin(start, stop)

    def finish(self) -> None:
        """Sum what is left, and let the device wait for all of it."""
        while self._begun < len(self.buckets):
            self._begin_next()
        if self._waits is not None:
            self._waits.put(0)
        if self._peers is not None:
            self._works.append(self._peers.end())
        self._works += [self.ranks.begin_sum(tensor) for tensor in self.sums]
        for tensor in self.largest:
            self.ranks.take_largest(tensor)
        for wait in self._works:
            wait()
        if self._waits is not None:
            self._waits.put(1)
        self.begin()
        self._due = False

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Around a step that may break off: this rank then takes part in the sums that are due, or the others would wait."""
        self.begin()
        self._due = True
        try:
            yield
        except BaseException:
            recording = self.flat.is_cuda and torch.cuda.is_current_stream_capturing()
            if self._due and not recording:  # while a graph is recorded nothing runs
                settle, self._settle = self._settle, lambda parameters: None
                try:
                    self.finish()
                finally:
                    self._settle = settle
            raise


def _call(hear: Callable[[int], None], number: int, *gradients: Any) -> None:
    hear(number)
