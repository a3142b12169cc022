"""What stands before the first layer and behind the last: words to streams, and streams to the logits of words."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import norm_product
from ...kernels.decode_product import Norm
from ...models.decoding import weight_of
from ...models.deepseek_v4.family import CompressedReader
from ...models.deepseek_v4.kernels import hc_head
from ...models.deepseek_v4.weights import CollapseWeights
from .products import GEMV_ROWS
from .state import normed


class Ends(NamedTuple):
    """Of all words, or of a stretch of them in `head`."""

    embed: Tensor
    collapse: CollapseWeights
    norm: Norm
    head: Tensor

    @property
    def streams(self) -> int:
        return self.collapse.product.shape[0]

    def enter(self, token_BT: Tensor) -> Tensor:
        """(B, T, n, hidden) fp32: the streams before the first layer."""
        x = F.embedding(token_BT, self.embed)[:, :, None]
        return x.expand(-1, -1, self.streams, -1).to(torch.float32).contiguous()  # one launch, in 16 bits and in 32

    def collapsed(self, x: Tensor) -> Tensor:
        """(N, hidden) of streams x (N, n, hidden)."""
        w = self.collapse
        return hc_head(x, w.product, w.scale, w.base, w.eps, w.norm_eps)

    def leave(self, x: Tensor, out: Tensor, best: Tensor, arg: Tensor) -> Tensor:
        """out (N, words) = the logits of streams x (N, n, hidden). Of few, also partial maxima: see norm_product."""
        h = self.collapsed(x)
        if len(h) <= GEMV_ROWS:
            return norm_product(h, self.norm, self.head, out=out, best=best, arg=arg)
        return out.copy_(self.logits(h))

    def logits(self, h: Tensor) -> Tensor:
        """Of streams that are collapsed, at once."""
        return F.linear(normed(h, self.norm).to(self.head.dtype), self.head).float()

    def read(self) -> list[Tensor]:
        """What a step reads whole: all but the embedding."""
        return [*self.collapse.tensors(), self.norm.weight, self.head]

    @property
    def nbytes(self) -> int:
        shared = self.head.data_ptr() == self.embed.data_ptr() and not self.head.is_meta
        return sum(t.nbytes for t in self.read()) + (0 if shared else self.embed.nbytes)


def ends_of(reader: CompressedReader) -> Ends:
    """Of a model as it is now."""
    trunk = reader.trunk
    return Ends(weight_of(trunk.embed_tokens), reader.collapse(), reader.norm(trunk.norm), weight_of(reader.model.lm_head))
