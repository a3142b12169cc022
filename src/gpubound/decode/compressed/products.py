"""Products of a norm's output, for few rows and for many.

For few rows, a kernel reads each weight once, with the norm inside, of all weights that read the same in one launch
(kernels/norm_products.py). Of many rows the norm is computed once, and the products are matrices worth a tensor core.
"""

import torch.nn.functional as F
from torch import Tensor

from ...kernels import norm_products
from ...kernels.decode_product import Norm
from ...kernels.norm_products import MOST
from ...models.decoding import Linear

NARROW = 8  # rows


def products(x: Tensor, norm: Norm | None, *layers: Linear) -> list[Tensor]:
    """rms_norm(x), or x, times each layer, (N, rows) fp32, for x (N, width) fp32."""
    if len(x) > NARROW:
        h = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.eps)
        return [product(h.to(layer.weight.dtype), layer).float() for layer in layers]
    found: list[Tensor] = []
    for some in (layers[first : first + MOST] for first in range(0, len(layers), MOST)):
        weights = [layer.weight for layer in some]
        found += norm_products(x, norm, weights).split([len(weight) for weight in weights], 1)
    return [y if layer.bias is None else y + layer.bias.float() for y, layer in zip(found, layers)]


def product(x: Tensor, layer: Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)
