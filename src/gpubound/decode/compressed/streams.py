"""The streams between a model's layers: how a part reads a mix of them, and how what it gives is spread over a mix again.

Legend: N tokens, n streams, D hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.deepseek_v4.weights import CollapseWeights, HyperWeights


def _scores(x: Tensor, product: Tensor, eps: float) -> Tensor:
    flat = x.flatten(-2)
    return F.linear(F.rms_norm(flat, flat.shape[-1:], None, eps), product.float())


def read(x: Tensor, w: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    """(what a part reads (N, D), the share of each stream in what it gives (N, n), the mix of the streams (N, n, n)) for the
    streams x (N, n, D), fp32."""
    n = x.shape[-2]
    scores = _scores(x, w.product, w.norm_eps).split([n, n, n * n], -1)
    take, give, mix = (z * scale + base for z, scale, base in zip(scores, w.scale.float(), w.base.float().split([n, n, n * n])))
    y = ((take.sigmoid() + w.eps)[..., None] * x).sum(-2)
    return y, 2 * give.sigmoid(), balanced(mix.unflatten(-1, (n, n)), w.rounds, w.eps)


def balanced(x: Tensor, rounds: int, eps: float) -> Tensor:
    """Matrices whose rows and columns sum to 1, by Sinkhorn's rounds from a softmax of the rows of x."""
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def write(x: Tensor, y: Tensor, give: Tensor, mix: Tensor) -> Tensor:
    """The streams (N, n, D) after a part that gave y (N, D): of stream j, mix[i, j] of every stream i."""
    return give[..., None] * y[..., None, :].float() + torch.matmul(mix.transpose(-1, -2), x)


def collapse(x: Tensor, w: CollapseWeights) -> Tensor:
    """What the head reads, (N, D)."""
    take = (_scores(x, w.product, w.norm_eps) * w.scale.float() + w.base.float()).sigmoid() + w.eps
    return (take[..., None] * x).sum(-2)
