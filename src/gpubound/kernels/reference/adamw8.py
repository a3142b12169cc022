"""AdamW on flat buffers with both moments in 8 bits (see _code8.py). The numbers between two steps are coarse, the step is not:
each update decodes them, goes on in fp32 as `adamw` does, and codes them again.
"""

import torch
from torch import Tensor

from ._code8 import BLOCK, dequantize, quantize
from .adamw import _advance, _round_at_random

PART = 256 * BLOCK  # elements at a time on a CPU, as in adamw.py


@torch.no_grad()
def adamw8(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, m_scale: Tensor, v_scale: Tensor, master: Tensor | None,
    plan: Tensor, beta1: float, beta2: float, eps: float, decay_until: int, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """In place, as `adamw`: `m` is int8, `v` uint8, `m_scale` and `v_scale` hold the largest magnitude of each 256 elements."""
    part = PART if weight.device.type == "cpu" else max(1, weight.numel())
    for start in range(0, weight.numel(), part):
        here, rows = slice(start, start + part), slice(start // BLOCK, -(-(start + part) // BLOCK))
        whole = weight[here] if master is None else master[here]
        m_wide, v_wide = dequantize(m[here], m_scale[rows]), dequantize(v[here], v_scale[rows])
        p = _advance(whole, gradient[here], m_wide, v_wide, plan, beta1, beta2, eps, decay_until - start)
        rounded = p.to(weight.dtype) if seed is None else _round_at_random(p, start, plan[5], seed)
        moments = zip((m[here], m_scale[rows], v[here], v_scale[rows]), quantize(m_wide, m.dtype) + quantize(v_wide, v.dtype))
        for kept, new in ((weight[here], rounded), *(((whole, p),) if master is not None else ()), *moments):
            torch.where(plan[0] != 0, new, kept, out=kept)
    return weight, m, v, m_scale, v_scale
