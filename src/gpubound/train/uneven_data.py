"""How many micro-batches each rank has in a step, where the data of one may end before the others'.

Ranks with whole weights wait for each other in sums alone. A rank without a micro-batch takes part in these, and adds nothing.
Ranks of a sharded model also gather weights in each micro-batch, so all must have the same number. There the hosts tell each
other their numbers beside the step. Only a rank with fewer than `accumulate` waits for the others' numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Ranks
from ..errors import RankError
from ..trace import notice


class MicroBatchCounts:
    """Asked once a step. sharded: all ranks must have as many micro-batches."""

    def __init__(self, ranks: Ranks, accumulate: int, sharded: bool):
        self.ranks, self.accumulate, self.sharded = ranks, accumulate, sharded
        self._steps = 0  # that were begun
        self._idle = False
        self._under_way: tuple[Tensor, Any] | None = None

    def begins(self, mine: int) -> bool:
        """Whether a step begins, of which `mine` micro-batches are this rank's. RankError if the others' numbers forbid it."""
        if self.ranks.alone:
            return mine > 0
        self.ranks.check_joined()
        if not self._steps:
            goes = self._may(self.ranks.gather(mine))  # the first step makes ranks wait for each other anyway
        elif self.sharded:
            goes = self._told(mine)
        else:
            goes = True
        self._steps += goes
        return goes

    def idle(self) -> None:
        """Say, the first time, that others went on without this rank."""
        if not self._idle:
            notice(
                f"train: the data of rank {self.ranks.rank} ended before step {self._steps}, and others have more; it adds "
                f"nothing to their steps. Give all ranks as many micro-batches to have all of them work."
            )
        self._idle = True

    def _told(self, mine: int) -> bool:
        self._answer()  # of the step before, which is there: what is let go of while it is under way is an error of gloo's
        counts = torch.zeros(self.ranks.world, dtype=torch.int64, device="cpu")
        counts[self.ranks.rank] = mine
        self._under_way = counts, dist.all_reduce(counts, group=self.ranks.host, async_op=True)
        return mine == self.accumulate or self._may(self._answer())

    def _answer(self) -> list[int]:
        if self._under_way is None:
            return []
        (counts, work), self._under_way = self._under_way, None
        work.wait()
        return counts.tolist()

    def _may(self, counts: list[int]) -> bool:
        """Whether there is anything to do with so many of each rank."""
        most, least = max(counts), min(counts)
        if self.sharded and most != least:
            wanted = "as many on every rank, because the ranks of a sharded model gather its weights for each of them"
        elif most and not least:
            wanted = "one at least on every rank in the first step, which they prepare together"
        else:
            return most > 0
        raise RankError(
            f"step {self._steps + 1}: the data of rank {counts.index(least)} ended: it has {_micro_batches(least)}, and rank "
            f"{counts.index(most)} has {_micro_batches(most)}; wanted {wanted}. Give all ranks iterators of one length, or a "
            f"gpubound.feed(source), which does not end."
        )


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count or 'no'} micro-batches"
