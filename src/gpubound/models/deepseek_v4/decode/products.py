"""Products of a norm's output, for few rows and for many.

For few rows, a kernel with a fused norm reads each weight once, in one launch for all weights with the same input
(kernels/norm_products.py). For many rows, the norm is computed once and the products are GEMMs on tensor cores; fp8 weights are
dequantised first.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.decode_product import Norm
from ..family import LinearWeights
from ..kernels import norm_products
from ..kernels.products import MOST, MOST_CODED, Fp8Blocks, numbers

GEMV_ROWS = 8  # rows


def products(x: Tensor, norm: Norm | None, *layers: LinearWeights) -> list[Tensor]:
    """Multiply rms_norm(x), or x if norm is None, by each layer: (N, rows) fp32 each, for x (N, width) fp32."""
    if len(x) > GEMV_ROWS:
        h = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)
        return [product(h.to(layer.weight.dtype), layer).float() for layer in layers]
    found: dict[int, Tensor] = {}
    for some in _launches(layers):
        weights = [layers[number].weight for number in some]
        found |= zip(some, norm_products(x, norm, weights).split([layers[number].rows for number in some], 1))
    return [found[number] if layer.bias is None else found[number] + layer.bias.float() for number, layer in enumerate(layers)]


def _launches(layers: Sequence[LinearWeights]) -> Iterator[list[int]]:
    """Yield the indices of the layers of each launch, fp8 layers first."""
    coded = [number for number, layer in enumerate(layers) if isinstance(layer.weight, Fp8Blocks)]
    plain = [number for number in range(len(layers)) if number not in coded]
    while coded or plain:
        first, coded = coded[:MOST_CODED], coded[MOST_CODED:]
        room = MOST - len(first)
        yield [*first, *plain[:room]]
        plain = plain[room:]


def product(x: Tensor, layer: LinearWeights) -> Tensor:
    return F.linear(x, _matrix(layer, x.dtype), layer.bias)


def by_groups(x: Tensor, layer: LinearWeights) -> Tensor:
    """Multiply x (N, groups, width) by a grouped layer: (N, rows), fp32 up to GEMV_ROWS tokens, otherwise in x's dtype."""
    if len(x) <= GEMV_ROWS:
        return norm_products(x.float(), None, [layer.weight])
    weight = _matrix(layer, x.dtype).unflatten(0, (x.shape[1], -1)).transpose(1, 2)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).reshape(len(x), -1)


def _matrix(layer: LinearWeights, dtype: torch.dtype) -> Tensor:
    return numbers(layer.weight, dtype) if isinstance(layer.weight, Fp8Blocks) else layer.weight
