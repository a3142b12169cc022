"""Embedding and output head: tokens to streams before the first layer, and streams to logits after the last."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels import norm_product
from ....kernels.decode_product import Norm
from ...decoding import weight_of
from ..family import CollapseWeights, CompressedReader
from ..kernels import hc_head
from .products import GEMV_ROWS
from .state import normed


class Ends(NamedTuple):
    """Weights of the embedding and the head. `head` has the rows of all tokens, or of a slice of the vocabulary."""

    embed: Tensor
    collapse: CollapseWeights
    norm: Norm
    head: Tensor

    @property
    def streams(self) -> int:
        return self.collapse.product.shape[0]

    def enter(self, token_BT: Tensor) -> Tensor:
        """Return the fp32 streams (B, T, n, hidden) before the first layer."""
        x = F.embedding(token_BT, self.embed)[:, :, None]
        return x.expand(-1, -1, self.streams, -1).to(torch.float32).contiguous()  # one launch, in 16 bits and in 32

    def collapsed(self, x: Tensor) -> Tensor:
        """Collapse streams x (N, n, hidden) to (N, hidden)."""
        w = self.collapse
        return hc_head(x, w.product, w.scale, w.base, w.eps, w.norm_eps)

    def leave(self, x: Tensor, out: Tensor, best: Tensor, arg: Tensor) -> Tensor:
        """Write the logits of streams x (N, n, hidden) to out (N, vocabulary).

        For up to GEMV_ROWS tokens, also write partial maxima to `best` and `arg` (see `norm_product`).
        """
        h = self.collapsed(x)
        if len(h) <= GEMV_ROWS:
            return norm_product(h, self.norm, self.head, out=out, best=best, arg=arg)
        return out.copy_(self.logits(h))

    def logits(self, h: Tensor) -> Tensor:
        """Return the fp32 logits of collapsed streams h (N, hidden)."""
        return F.linear(normed(h, self.norm).to(self.head.dtype), self.head).float()

    def read(self) -> list[Tensor]:
        """Return the tensors that a step reads in full: all except the embedding."""
        return [*self.collapse.tensors(), self.norm.weight, self.head]

    @property
    def nbytes(self) -> int:
        shared = self.head.data_ptr() == self.embed.data_ptr() and not self.head.is_meta
        return sum(t.nbytes for t in self.read()) + (0 if shared else self.embed.nbytes)


def ends_of(reader: CompressedReader) -> Ends:
    """Return the model's current embedding and head weights."""
    trunk = reader.trunk
    return Ends(weight_of(trunk.embed_tokens), reader.collapse(), reader.norm(trunk.norm), weight_of(reader.model.lm_head))
