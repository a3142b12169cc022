"""How much arithmetic it takes to train a model on one token, where some of its weights may be frozen."""

from dataclasses import dataclass

from torch import nn

from ..layers.linear_formats import size_of
from ..models.registry import Sizes
from .recompute import blocks_of


@dataclass(frozen=True)
class TokenFlops:
    """A sum of operations. The first number of each term is how many a parameter costs: 2 forward, 2 for the gradient of what
    it is multiplied with, 2 for its own. Attention costs as much a layer, of half the square (measure.train_flops_per_token),
    and twice that where no token is hidden from another.
    """

    weights: list[tuple[int, int, str]]  # (passes, parameters, which)
    layers: list[tuple[int, int]]  # (passes, layers)
    width: int  # of a layer's attention

    def flops_per_token(self, seq: int) -> int:
        inside = sum(passes * number for passes, number in self.layers) * self.width * seq
        return sum(passes * number for passes, number, _ in self.weights) + inside


def flops_of(model: nn.Module, sizes: Sizes) -> TokenFlops:
    """Of a model that trains as a whole, or of one whose adapters alone do.

    Below the first block that trains there is no backward.
    """
    halves = 2 if getattr(getattr(model, "config", None), "causal", True) is False else 1  # of the square that attention fills
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if all(p.requires_grad for p in model.parameters()):
        return TokenFlops([(6, sizes.product_parameters, "parameters in products")], [(6 * halves, sizes.layers)], sizes.width)
    blocks = blocks_of(model)
    first = next((i for i, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters())), len(blocks))
    below = sum(size_of(p) for block in blocks[:first] for p in block.parameters() if p.dim() > 1)
    weights = [
        (6, trained, "parameters of adapters"),
        (4, sizes.product_parameters - below, "frozen parameters in products"),
        (2, below, "below the first adapter"),
    ]
    layers = [(6 * halves, sizes.layers - first), (2 * halves, first)]
    return TokenFlops([w for w in weights if w[1]], [w for w in layers if w[1]], sizes.width)
