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
    The host knows the length of the next batch, and no batch depends on the device's counter.
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
        self.batches = sum(cutter.batches for cutter in self.cutters)
        self._epoch = -1
        self._bucket = self._before = np.zeros(0, np.int64)  # of each batch of the epoch: its length, and batches of it before

    def batch(self, number: int) -> dict[str, Tensor]:
        """Return the batch after `number` batches."""
        epoch, nth = divmod(number, self.batches)
        if epoch != self._epoch:
            self._epoch = epoch
            mixed = permutation(self.batches, self.order.seed, epoch if self.order.shuffle else 0).numpy()
            self._bucket = np.repeat(np.arange(len(self.cutters)), [cutter.batches for cutter in self.cutters])[mixed]
            self._before = np.empty_like(self._bucket)
            for bucket, cutter in enumerate(self.cutters):
                self._before[self._bucket == bucket] = np.arange(cutter.batches)
        cutter = self.cutters[self._bucket[nth]]
        return cutter.batch(epoch * cutter.batches + int(self._before[nth]))
