"""Products of a norm's output, for few rows and for many.

For few rows, a kernel reads the weights once, with the norm inside (kernels/decode_product.py); of several weights that read
the same, three share a launch. Of many rows the norm is computed once, and the products are matrices worth a tensor core.
"""

import torch.nn.functional as F
from torch import Tensor

from ...kernels import norm_product
from ...kernels.decode_product import Norm
from ...models.decoding import Linear

NARROW = 8  # rows


def products(x: Tensor, norm: Norm | None, *layers: Linear) -> list[Tensor]:
    """rms_norm(x), or x, times each layer, (N, rows) fp32, for x (N, width) fp32."""
    if len(x) > NARROW:
        h = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)
        return [product(h.to(layer.weight.dtype), layer).float() for layer in layers]
    found: list[Tensor] = []
    for first in range(0, len(layers), 3):
        some = layers[first : first + 3]
        weights, biases = ([*column, *[None] * (3 - len(some))] for column in zip(*(layer[:2] for layer in some)))
        found += norm_product(x, norm, *weights, *biases).split([len(layer.weight) for layer in some], 1)
    return found


def product(x: Tensor, layer: Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)
