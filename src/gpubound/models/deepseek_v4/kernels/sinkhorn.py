"""Sinkhorn normalisation: doubly stochastic matrices from logits.

DeepSeek-V4 mixes its residual streams by such a matrix for each token (hyper_connections.py), so the streams neither explode
nor vanish.
"""

import torch
from torch import Tensor

from ....kernels.dispatch import implementation
from ....kernels.registry import definition, draw

WIDEST = 16  # rows of a matrix that a few threads hold in registers


def sinkhorn(logits: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Compute (..., S, S): softmax of each row plus eps, columns divided by their sums, then `iterations` - 1 times rows and
    columns divided by their sums.

    Each sum has eps added. Backward saves only the logits, and recomputes the iterations.
    """
    if logits.dim() < 2 or not logits.is_floating_point() or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(
            f"sinkhorn: logits must be a floating-point tensor of square matrices (..., S, S), got {logits.dtype} "
            f"{tuple(logits.shape)}; reshape or cast it before the call."
        )
    check_rounds("sinkhorn", iterations)
    wide = logits.shape[-1]
    unable = f"its kernel holds matrices of up to {WIDEST} rows" if wide > WIDEST else None
    return implementation("sinkhorn", logits, unable, (wide, iterations))(logits, iterations, eps)


@definition(lambda g, wide=4, iterations=20: (draw(g, 5, wide, wide), iterations, 1e-6))
def sinkhorn_reference(logits: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    m = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m.to(logits.dtype)


def check_rounds(op: str, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"{op}: iterations must be at least 1, got {iterations}; DeepSeek-V4 takes 20.")
