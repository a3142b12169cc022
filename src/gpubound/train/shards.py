"""A step of a model whose weights, or some of them, are dealt to the ranks row by row (parallel/sharded.py).

What holds for both forms: rows.py, where all of a model trains, and frozen_rows.py, where what trains is whole.
"""

from collections.abc import Callable

from torch import nn

from ..errors import GraphError
from ..trace import fallback
from .holding import HoldsAll, Loss, Result


class HoldsShards(HoldsAll):
    """A block's weights are gathered just before they are used."""

    gathers = True

    waits_at_the_end = False  # FSDP gathers weights and sums gradients in between

    def __init__(self, model: nn.Module, trains_whole: bool):
        from ..parallel.dealt import DealtModel  # a second's import, for those who shard

        self.sharded = DealtModel(model, trains_whole)
        self.pieces = self.sharded.pieces
        super().__init__(model, self.sharded.ranks)

    def graph(self, mode: str) -> str:
        why = "the model is sharded, and its gathering of weights is not captured"
        if mode == "require":
            raise GraphError(f"TrainStep: {why}; take graph='auto', which runs it call by call.")
        if mode == "auto" and self.ranks.device.type == "cuda":
            fallback("train step as one graph", why)
        return "off"

    def take(self, overlap: bool) -> None:
        """Gradients are this step's from here on."""
        if overlap:
            raise ValueError(
                "TrainStep: overlap=True is for models too small to fill a GPU, and this one is sharded; leave it out."
            )
        self.sharded.take()

    def rest(self) -> None:
        self.sharded.rest()

    def loss(self, lossy: Callable[[], Loss]) -> Loss:
        def apart() -> Loss:
            total, items = lossy()
            return total.clone(), items  # FSDP hangs a hook on it, which a view may lose

        return self.sharded.within(apart)

    def within(self, work: Callable[[], Result]) -> Result:
        try:
            return self.sharded.within(work)
        finally:
            self.rest()

    def release(self) -> None:
        self.sharded.release()
