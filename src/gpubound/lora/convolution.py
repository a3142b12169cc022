"""Adapters of nn.Conv2d, in PEFT's form: a is a convolution like the layer's own with `rank` channels, b one of a single pixel.

The layer's forward adds them, in torch's own convolutions. One of a single pixel whose images lie channels last is a product of
rows, and runs as one (layers/linear_product.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.accumulate import widened
from ..layers.linear_product import linear
from .adapter import LowRank
from .pair import Pair
from .pairs import ForwardAdapters, on


class ConvAdapters(ForwardAdapters):
    """The adapters of one nn.Conv2d."""

    @classmethod
    def unfit(cls, layer: nn.Conv2d) -> str | None:
        if layer.groups != 1:
            return f"has groups = {layer.groups}, and adapters are for convolutions of one group"
        return super().unfit(layer)

    @staticmethod
    def adapted(layer: Any, input: Tensor) -> Tensor:
        if _is_product(layer, input):
            lows = [LowRank(pair.a.flatten(1), pair.b.flatten(1), pair.scale, pair.dropout) for pair in on(layer)]
            return linear(input.permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias, lows).permute(0, 3, 1, 2)
        y = nn.Conv2d.forward(layer, input)
        for pair in on(layer):
            y = y + _through(layer, pair, input)
        return y

    def unlike_peft(self) -> str | None:
        """PEFT gives a the layer's stride and padding alone."""
        layer = self.layer
        if layer.padding_mode != "zeros" and layer.padding not in ((0, 0), "valid"):
            form = f"pads by {layer.padding_mode!r}"
        elif any(size > 1 and step > 1 for size, step in zip(layer.kernel_size, layer.dilation)):
            form = f"has dilation {layer.dilation}"
        else:
            return None
        return f"{form}, which PEFT leaves out until the adapter is merged"


def _is_product(layer: Any, x: Tensor) -> bool:
    single = layer.kernel_size == layer.stride == (1, 1) and layer.padding in ((0, 0), "valid", "same")
    return single and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _through(layer: Any, pair: Pair, x: Tensor) -> Tensor:
    """Dilation and the padding's mode are the layer's, so that what is merged is the same. PEFT leaves them out."""
    h = layer._conv_forward(pair.dropout(x), widened(pair.a, x.dtype), None)
    return F.conv2d(pair.scale * h, widened(pair.b, x.dtype))
