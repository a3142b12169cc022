"""Real-gated linear recurrent unit (RG-LRU): a state that decays at a separate rate in each channel, gated by the input.

    a_t = σ(λ)^(8 σ(r_t))        h_t = a_t · h_{t-1} + √(1 − a_t²) · σ(i_t) · x_t

It reads a text in one direction, with a state of one value per channel for any length. The factor √(1 − a²) keeps the state's
variance constant. The unit and its exponent 8 are those of Griffin (De et al. 2024).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.dispatch import implementation, require_device, require_last
from ....kernels.registry import definition, draw

POWER = 8.0
LEAST = -80.0  # of log a: exp of less is 0 in fp32, and sums of many such logs stay finite


def rg_lru(packed: Tensor, decay: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h (B, T, C) and the last state (B, C) of packed [x | r | i] (B, T, 3 C), decay λ (C,) and an initial state.

    States are fp32. With T = 1 and the last state it is a decoding step.
    """
    require_last("rg_lru", "packed", packed, "(B, T, 3 C)")
    channels = packed.shape[-1] // 3
    if packed.dim() != 3 or packed.shape[-1] % 3 or not channels or not packed.shape[1]:
        raise ValueError(f"rg_lru: packed must be [x | r | i] of shape (B, T, 3 C), T and C from 1, got {tuple(packed.shape)}.")
    if decay.shape != (channels,) or not decay.is_floating_point():
        raise ValueError(
            f"rg_lru: decay must be {channels} floating-point numbers, one a channel of packed, got {decay.dtype} "
            f"{tuple(decay.shape)}."
        )
    dtype32, wanted = torch.promote_types(packed.dtype, torch.float32), (packed.shape[0], channels)
    if state is not None and (state.shape != wanted or state.dtype != dtype32):
        raise ValueError(
            f"rg_lru: state must be {dtype32} {wanted}, got {state.dtype} {tuple(state.shape)}; pass a last state."
        )
    require_device("rg_lru", packed, decay=decay, state=state)
    return implementation("rg_lru", packed, None, (state is not None,))(packed, decay, state)


def _example(g, with_state=False):
    state = torch.randn(2, 20, generator=g, device="cpu", dtype=torch.float32) if with_state else None
    return draw(g, 2, 70, 60), draw(g, 20), state


@definition(_example, gradient=True)
def rg_lru_reference(packed, decay, state=None):
    dtype32 = torch.promote_types(packed.dtype, torch.float32)
    x, r, i = packed.to(dtype32).chunk(3, -1)
    log_a = (POWER * F.logsigmoid(decay.to(dtype32)) * r.sigmoid()).clamp(LEAST, 0.0)
    share = -torch.expm1(2 * log_a)
    # At a = 1 the root's derivative is infinite; clamped, its product with that of log a is the limit, 0.
    inputs = share.clamp_min(torch.finfo(dtype32).tiny).sqrt() * i.sigmoid() * x
    a, h = log_a.exp(), torch.zeros_like(inputs[:, 0]) if state is None else state
    states = []
    for t in range(packed.shape[1]):
        h = a[:, t] * h + inputs[:, t]
        states.append(h)
    return torch.stack(states, 1).to(packed.dtype), h
