"""A recurrent mixer in attention's place: what a token hands on is one number a channel, however long the text.

The unit and its two gates read the same x, so all three are one product, and the recurrence is one walk (kernels/rg_lru.py).
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.dispatch import Call
from ....layers.attention import Rope
from ....layers.fused_weights import Kernels, Projecting, Stacked, run_linear
from ..kernels import rg_lru
from ..kernels.rg_lru import POWER

REMEMBERED = (0.9, 0.999)  # what a channel keeps of its state in a token whose gate is open, at first: drawn between these

SHUT = -1e4  # its sigmoid is 0 in any dtype


class RGLRU(Projecting):
    """h_t = a_t · h_{t-1} + √(1 − a_t²) · σ(i_t) · x_t with a_t = σ(λ)^(8 σ(r_t)); x, r and i are projections of the input."""

    PROJECTIONS: tuple[str, ...] = ("x_proj", "r_proj", "i_proj")  # together [x | r | i]

    def __init__(self, hidden: int, width: int | None = None, bias: bool = True, device=None, dtype=None) -> None:
        super().__init__()
        width, where = width or hidden, {"device": device, "dtype": dtype}
        self.x_proj = nn.Linear(hidden, width, bias=bias, **where)
        self.r_proj = nn.Linear(hidden, width, bias=bias, **where)
        self.i_proj = nn.Linear(hidden, width, bias=bias, **where)
        self.o_proj = nn.Linear(width, hidden, bias=False, **where)
        kept = torch.empty(width, device=device, dtype=torch.float32).uniform_(*REMEMBERED)
        self.decay = nn.Parameter(kept.pow_(1 / POWER).logit_().to(self.x_proj.weight.dtype))
        self.stacked = Stacked()

    def forward(self, x: Tensor, rope: Rope | None = None, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, rope, mask)

    def mix(self, x: Tensor, rope: Rope | None = None, mask: Tensor | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden). Positions follow from the order of the tokens: `rope` is for other mixers."""
        if mask is not None:
            raise ValueError("RGLRU: mask: got one, but a recurrence reads all tokens before its own; leave the mask out.")
        return self.step(x, None)[0]

    def step(self, x: Tensor, state: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same for the tokens that come next, and the state behind them (B, width): both begin where `state` is.

        With `lengths` (B,), the state of each row is that behind so many of its tokens; what stands further on is padding.
        """
        packed = self.stacked.product(x, self.projections())
        if packed is None:
            packed = torch.cat(self.one_by_one(x), -1)
        if lengths is not None:
            packed = _still(packed, torch.arange(x.shape[1], device=x.device) >= lengths[:, None])
        decay: Any = self._parameters["decay"]
        y, state = rg_lru(packed, decay, state)
        return run_linear(self._modules["o_proj"], y), state

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('x, r, i')}; {{}}", ("rg_lru",)


def _still(packed: Tensor, where: Tensor) -> Tensor:
    """[x | r | i] with nothing coming in and a gate that is shut, hence all of the state kept, `where` (B, T) says so."""
    x, r, i = packed.chunk(3, -1)
    where = where[..., None]
    return torch.cat([x.masked_fill(where, 0.0), r.masked_fill(where, SHUT), i], -1)


def rg_lru_calls() -> tuple[Call, ...]:
    """Return the ops that a training step calls, so that the first step can compile their kernels in parallel."""
    return (("rg_lru", (False,)),)
