"""The micro-batches of a step: drawn from what the caller gives, checked, and counted on every rank."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Feed
from ..data.leaves import flatten, name
from ..distributed import Ranks
from ..errors import RankError
from ..trace import notice


def gather(batches: Any, accumulate: int) -> list[Any]:
    """Return the next step's micro-batches: a list, one batch, or up to `accumulate` from a feed or iterator."""
    if isinstance(batches, list):
        if not 1 <= len(batches) <= accumulate:
            raise ValueError(
                f"step: got a list of {len(batches)} micro-batches, wanted 1 to accumulate={accumulate}; "
                f"a list always holds micro-batches, one batch goes in as a tensor, a tuple or a dict."
            )
        return batches
    if isinstance(batches, Tensor | tuple | Mapping):
        return [batches]
    if isinstance(batches, Feed):
        return [batches.take() for _ in range(accumulate)]
    if isinstance(batches, Iterator):
        return list(islice(batches, accumulate))
    raise ValueError(
        f"step: got a {type(batches).__name__}, wanted a list of micro-batches, one batch (a tensor, tuple or dict), a feed, "
        f"or an iterator over batches; pass gpubound.feed(source), or keep an iter(source)."
    )


class MicroBatch:
    """One micro-batch, flattened into its tensors and constants, and checked.

    signature  its shapes, dtypes and constants
    key        the model's signature (ModelGuard.signature) and this one's: what one graph serves
    """

    def __init__(self, batch: Any, device: torch.device, model: int):
        self.tree, self.model = flatten(batch), model
        leaves, signature = self.tree.leaves, list[tuple]()
        for index, (path, leaf) in enumerate(zip(self.tree.paths, leaves)):
            if not isinstance(leaf, Tensor):
                try:
                    hash(leaf)
                except TypeError:
                    raise ValueError(
                        f"step: {name(path)} is a {type(leaf).__name__}, wanted tensors, numbers, strings and the like; "
                        f"it could not be told whether it changed since the step was captured."
                    ) from None
                signature.append((path, leaf))
                continue
            if leaf.device != device:
                raise ValueError(
                    f"step: {name(path)} is on {leaf.device}, the model on {device}; a copy here would make the device wait: "
                    f"draw the batches from gpubound.feed(source), which copies ahead."
                )
            signature.append((path, leaf.shape, leaf.dtype))
            if leaf.is_inference():  # backward may not save it
                leaves[index] = leaf.clone()
        self.signature, self.tensors = tuple(signature), [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.key = model, self.signature

    def whole(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the batch as it was given, with its own tensors or these."""
        rest = iter(self.tensors if tensors is None else tensors)
        return self.tree.rebuild([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.tree.leaves])


class MicroBatchCounts:
    """The number of micro-batches of each rank in a step, where the data of one rank may end before the others'.

    Replicas wait for each other only in sums; a rank without a micro-batch takes part in these with zeros. Ranks of a sharded
    model also gather weights in each micro-batch, so all need the same number. Their hosts exchange the numbers in the
    background, and only a rank with fewer than `accumulate` waits for them.
    """

    def __init__(self, ranks: Ranks, accumulate: int, sharded: bool):
        self.ranks, self.accumulate, self.sharded = ranks, accumulate, sharded
        self._steps = 0  # that have begun
        self._reported_idle = False
        self._pending: tuple[Tensor, Any] | None = None  # an all-reduce of the ranks' counts

    def begins(self, count: int) -> bool:
        """Return whether a step begins, with `count` micro-batches of this rank. Raise RankError if the counts forbid it."""
        if self.ranks.world == 1:
            return count > 0
        self.ranks.check_joined()
        begins = True
        if not self._steps:
            begins = self._check(self.ranks.gather(count))  # the first step makes ranks wait for each other anyway
        elif self.sharded:
            self._finish_pending()  # the last step's, which is done: gloo raises if it is dropped before
            counts = torch.zeros(self.ranks.world, dtype=torch.int64, device="cpu")
            counts[self.ranks.rank] = count
            self._pending = counts, dist.all_reduce(counts, group=self.ranks.host, async_op=True)
            begins = count == self.accumulate or self._check(self._finish_pending())
        self._steps += begins
        return begins

    def report_idle(self) -> None:
        """Print once that the other ranks continue without this one's data."""
        if not self._reported_idle:
            notice(
                f"train: the data of rank {self.ranks.rank} ended before step {self._steps}, and others have more; it adds "
                f"nothing to their steps. Give all ranks as many micro-batches to have all of them work."
            )
        self._reported_idle = True

    def _finish_pending(self) -> list[int]:
        if self._pending is None:
            return []
        (counts, work), self._pending = self._pending, None
        work.wait()
        return counts.tolist()

    def _check(self, counts: list[int]) -> bool:
        """Return whether any rank has a micro-batch."""
        most, least = max(counts), min(counts)
        if self.sharded and most != least:
            wanted = "as many on every rank, because the ranks of a sharded model gather its weights for each of them"
        elif most and not least:
            wanted = "one at least on every rank in the first step, which they prepare together"
        else:
            return most > 0

        def described(count: int) -> str:
            return "1 micro-batch" if count == 1 else f"{count or 'no'} micro-batches"

        raise RankError(
            f"step {self._steps + 1}: the data of rank {counts.index(least)} ended: it has {described(least)}, and rank "
            f"{counts.index(most)} has {described(most)}; wanted {wanted}. Give all ranks iterators of one length, or a "
            f"gpubound.feed(source), which does not end."
        )
