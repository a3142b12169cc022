"""Rows of several lengths: short examples in short rows, so that less of the batches is padding."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .packing import Packing
from .rows import BatchCutter, Order
from .source import order as permutation


class BucketCutter:
    """Batches of rows of one length each, by their number, with a BatchCutter for each length.

    An epoch has all batches of all lengths, in an order of (seed, epoch); without shuffling in one that mixes the lengths, too.
    The batches of a step have one length, whatever number of ranks share them: no rank waits for another's longer rows. The
    host knows the length of the next batch, and no batch depends on the device's counter.
    """

    def __init__(self, packing: Packing, order: Order, row_values: Mapping[str, Tensor] | None = None, **options: Any):
        self.packing, self.order, self.fields = packing, order, options["fields"]
        own = replace(order, rank=0, world=1)
        # row_values are in the order of the corpus, and each part has some of the rows.
        numbers = [part.numbers for part in packing.parts if part.numbers is not None]
        place = np.empty(packing.rows, np.int64)
        place[np.argsort(np.concatenate(numbers), kind="stable")] = np.arange(packing.rows)
        rows = [torch.from_numpy(own) for own in np.split(place, np.cumsum([part.rows for part in packing.parts])[:-1])]
        self.cutters = [
            BatchCutter(part, own, row_values={name: values[index] for name, values in (row_values or {}).items()}, **options)
            for part, index in zip(packing.parts, rows)
        ]
        self.batches = packing.batches(order.micro_batch)
        self._steps = [packing.steps(part, order.micro_batch) for part in packing.parts]
        self._epoch = -1
        self._bucket = self._before = np.zeros(0, np.int64)  # of each step of the epoch: its length, and steps of it before

    def batch(self, number: int) -> dict[str, Tensor]:
        """Return this rank's batch after `number` batches of all ranks."""
        epoch, nth = divmod(number + self.order.rank, self.batches)
        if epoch != self._epoch:
            self._epoch = epoch
            mixed = permutation(sum(self._steps), self.order.seed, epoch if self.order.shuffle else 0).numpy()
            self._bucket = np.repeat(np.arange(len(self.cutters)), self._steps)[mixed]
            self._before = np.empty_like(self._bucket)
            for bucket, steps in enumerate(self._steps):
                self._before[self._bucket == bucket] = np.arange(steps)
        step, member = divmod(nth, self.packing.batches_a_step)
        cutter = self.cutters[self._bucket[step]]
        return cutter.batch(epoch * cutter.batches + int(self._before[step]) * self.packing.batches_a_step + member)
