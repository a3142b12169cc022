"""A step of a model of which each rank has all that trains, and its rows of what is frozen (parallel/sharded.py).

That is the way of low-rank adapters over a model that fits no rank. What trains is small: it is kept, summed and updated as
replicas' weights are, in flat buffers of its own. The frozen rows are in the dtype that the model computes in, 2 bytes a weight
over all ranks, and no gradient of theirs is ever made.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn import Parameter

from ..layers.linear_formats import format_of
from ..parallel import Ranks
from ..parallel.pieces import is_sharded
from ..parallel.reduction import Reduction
from .accumulate import Accumulators
from .flat_buffers import FlatLayout
from .precision import Precision
from .shards import HoldsShards


class HoldsFrozenRows(HoldsShards):
    """All that trains, and this rank's rows of what is frozen."""

    def __init__(self, model: nn.Module):
        super().__init__(model, trains_whole=True)

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if not is_sharded(p)]

    def kept(self, numbers: Precision) -> Precision:
        if numbers.fp8:
            raise ValueError(
                "TrainStep: precision='fp8' rounds weights that train, and here these are low-rank adapters, or little more; "
                "take precision='bf16', and gb.lora.quantize_base(model, 'fp8') before the model is sharded."
            )
        for piece in self.pieces:
            if piece.dtype != numbers.dtype and not format_of(piece.parameter).coded:
                raise ValueError(
                    f"parameters: fully_shard of {piece.name} computes in {piece.dtype}, and this precision in "
                    f"{numbers.dtype}; shard the model with param_dtype={numbers.dtype}."
                )
        return numbers

    def accumulators(self, layout: FlatLayout, overlap: bool) -> Accumulators:
        self.take(overlap)
        return SumsBehindBackward(layout)


class SumsBehindBackward(Accumulators):
    """Gradients are summed over the ranks when backward is over.

    Within it, autograd may begin sums in one thread while it gathers weights in another, in another order on each rank, and
    ranks would wait for each other for ever. What trains is small: 168 MB of gradients, for rank 16 on all layers of 8b.
    """

    def reduction(self, ranks: Ranks, sums: Sequence[Tensor], largest: Sequence[Tensor]) -> Reduction:
        everything = [self.gradient, *sums]
        return Reduction(ranks, self.gradient[:0], [], [], (), self.settle, lambda work: work(), everything, largest)
