"""The blocks: a transformer's, from any parts of parts.py, and a denoiser's, which is told the time.

Legend: B batch, T tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.attention import Rope
from ...layers.block import Block, mixed, normed_for
from .config import RichardsConfig
from .parts import MIXERS, MLPS, NORMS

ANGLES = 1000.0  # what a time of 1 is multiplied by, so that neighbouring times differ by whole turns of the fastest sinusoid
WAVES = 256  # sinusoids of a time
REACH = 0.1  # how far FiLM may scale and shift


class TransformerBlock(Block):
    """A pre-norm block of the parts that the config names."""

    def __init__(self, config: RichardsConfig, device=None, dtype=None) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        mixer, mlp = MIXERS[config.attention].make(config, **where), MLPS[config.mlp].make(config, **where)

        def norm(hidden: int, eps: float, **where: Any) -> nn.Module:
            return NORMS[config.norm].make(config, **where)

        super().__init__(mixer, mlp, config.hidden, config.eps, **where, norm=norm)


class DiffusionBlock(TransformerBlock):
    """The same, told the time by FiLM: what its norms give is scaled by 1 + 0.1 tanh(a) and shifted by 0.1 tanh(b), where a
    and b are linear in the embedded time."""

    def __init__(self, config: RichardsConfig, device=None, dtype=None) -> None:
        super().__init__(config, device, dtype)
        self.film = nn.Linear(config.hidden, 4 * config.hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor, rope: Rope | None, mask: Tensor | None = None, *, time: Tensor) -> Tensor:  # type: ignore[override]
        x, pending = run_at_time(self, x, None, rope, mask, time=time)
        return x + pending.to(x.dtype)


def run_at_time(
    block: DiffusionBlock, x: Tensor, pending: Tensor | None, rope: Rope | None, mask: Tensor | None = None, *, time: Tensor
) -> tuple[Tensor, Tensor]:
    """As layers.block.run_block, at the embedded time (B, hidden) of each row."""
    scale1, shift1, scale2, shift2 = (REACH * torch.tanh(block.film(time)))[:, None].chunk(4, -1)
    y, x = normed_for(None, block.input_layernorm, x, pending)
    y, x = normed_for(
        None, block.post_attention_layernorm, x, mixed(block.self_attn, torch.addcmul(shift1, y, 1 + scale1), rope, mask)
    )
    return x, mixed(block.mlp, torch.addcmul(shift2, y, 1 + scale2))


class TimeEmbedding(nn.Module):
    """A time from 0 to 1, one a row, as a vector: sinusoids of 1000 t, then an MLP.

    The factor matters. Of a bare t no sinusoid turns by more than a radian, and all times look alike.
    """

    def __init__(self, hidden: int, device=None, dtype=None) -> None:
        super().__init__()
        self.inner = nn.Linear(WAVES, hidden, device=device, dtype=dtype)
        self.outer = nn.Linear(hidden, hidden, device=device, dtype=dtype)

    def forward(self, time: Tensor) -> Tensor:
        """time (B,) -> (B, hidden)."""
        half = WAVES // 2
        steps = torch.arange(half, device=time.device, dtype=torch.float32) / half
        angles = ANGLES * time.float()[:, None] * torch.exp(-math.log(10000.0) * steps)
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(self.inner.weight.dtype)
        return F.silu(self.outer(F.silu(self.inner(waves))))
