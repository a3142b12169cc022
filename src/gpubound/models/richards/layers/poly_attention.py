"""Polynomial attention as a layer: Attention's projections and positions, and a power of each score in place of softmax.

Nothing divides a row by its sum, so a token that sees more keys gives more: `scale` begins at 1 / sqrt(positions), which keeps
a sum over all positions near the size of one value, and is learned. A degree above 1 wants scores that stay small: a soft clip
bounds them, `qk_norm` norms q and k before.

Legend: B batch, T tokens, H query heads, K key and value heads, D width of a head, L places of a cache.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.dispatch import Call
from ....layers.attention import Attention, Rope
from ....layers.fused_weights import Kernels, run_linear
from ..kernels import poly_attention, poly_attention_step
from ..kernels.poly_attention import EVEN
from ..kernels.richards import GATE
from .richards import RichardsCurve, given

TABLE_SPREAD = 0.02


class PolyAttention(Attention):
    """Attention by φ = scale · (a s̃^p + b): degree p, the scores s̃ clipped softly at `soft_clip` (0: not), a, b, scale learned.

    window     a token sees those less than `window` away; 0: all
    max_pos    a learned table adds q · P[distance] to the score of keys up to `max_pos` tokens away, behind the token too if it
               is not causal; 0: no table
    gates      each head of each token is multiplied by a Richards curve, from 0 to 1, of a linear function of x
    positions  the longest text to expect, for the scale at first
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: float | None = None,
        causal: bool = True,
        degree: int = 3,
        soft_clip: float = 8.0,
        window: int = 0,
        max_pos: int = 0,
        gates: bool = False,
        positions: int = 1024,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(hidden, heads, kv_heads, head_dim, bias, qk_norm, causal, device, dtype)
        if max_pos < 0 or positions < 1:
            raise ValueError(
                f"PolyAttention: max_pos must be at least 0 and positions at least 1, got {max_pos} and {positions}; "
                f"0 gives no table."
            )
        self.degree, self.soft_clip, self.window, self.max_pos = degree, soft_clip, window, max_pos
        self.coefficients = nn.Parameter(given([1.0, 0.0, positions**-0.5], device, dtype))  # a, b and scale
        if max_pos:
            rows = max_pos + 1 if causal else 2 * max_pos + 1
            self.relative = nn.Parameter(torch.empty(rows, self.head_dim, device=device, dtype=dtype).normal_(0, TABLE_SPREAD))
        if gates:
            self.head_gate = nn.Linear(hidden, heads, device=device, dtype=dtype)
            self.gate_curve = RichardsCurve(GATE, device, dtype)

    def mix(self, x: Tensor, rope: Rope | None, mask: Tensor | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden). `mask` hides keys from all tokens, beside what `causal` and `window` hide: bool,
        (B, T) or (B, 1, 1, T), True where there is a key."""
        q, k, v = self.project(x, rope)
        return self.weighted(q, k, v if mask is None else self._without(v, mask), self.gates(x))

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> Tensor:
        """Heads (B, T, H, D), (B, T, K, D) and gates (B, T, H) -> (B, T, hidden)."""
        y = poly_attention(q, k, v, *self._learned(), gates, self.degree, self.soft_clip, self.window, self.causal)
        return self.output(y.flatten(-2))

    def step(self, x: Tensor, rope: Rope | None, position: Tensor, cache_k: Tensor, cache_v: Tensor) -> Tensor:
        """x (B, 1, hidden), a token of each row at its place `position` (B,) int32, whose key and value go into the caches
        (B, L, K, D)."""
        if not self.causal:
            raise ValueError("PolyAttention: step: a token of this layer sees those behind it; take one with causal=True.")
        q, k, v = (heads[:, 0] for heads in self.project(x, rope))
        gates = self.gates(x)
        y, *_ = poly_attention_step(
            q, k, v, cache_k, cache_v, position, *self._learned(), None if gates is None else gates[:, 0], self.degree,
            self.soft_clip, self.window,
        )  # fmt: skip
        return self.output(y.flatten(-2)[:, None])

    def gates(self, x: Tensor) -> Tensor | None:
        """(B, T, H)"""
        children: dict[str, Any] = self._modules
        return children["gate_curve"](run_linear(children["head_gate"], x)) if "head_gate" in children else None

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("PolyAttention has no softmax: `weighted` and `step` are what it computes.")

    def fused_kernels(self) -> Kernels:
        words, ops = super().fused_kernels()
        gates = ("richards",) if "head_gate" in self._modules else ()
        return words.removesuffix("; SDPA"), (*ops, "poly_attention", *gates)

    def extra_repr(self) -> str:
        shape = f"degree={self.degree}, soft_clip={self.soft_clip}, window={self.window}, max_pos={self.max_pos}"
        return shape if self.causal else f"{shape}, causal=False"

    def _learned(self) -> tuple[Tensor, Tensor | None]:
        own: dict[str, Any] = self._parameters
        return own["coefficients"], own.get("relative")

    def _without(self, v: Tensor, mask: Tensor) -> Tensor:
        """A hidden key's value is zero: it adds nothing, and none of its gradients is anything but zero."""
        shape = tuple(mask.shape)
        keys = mask[:, 0, 0] if mask.dim() == 4 and shape[1:3] == (1, 1) else mask
        if keys.dim() != 2 or keys.dtype != torch.bool or keys.shape[1] != v.shape[1] or len(keys) not in (1, len(v)):
            raise ValueError(
                f"PolyAttention: mask must be bool (batch, tokens) or (batch, 1, 1, tokens), True where there is a key, for a "
                f"batch {tuple(v.shape[:2])}, got {mask.dtype} {shape}; what each token sees is said by causal and window."
            )
        return torch.where(keys[..., None, None], v, 0.0)


def poly_calls(
    heads: int,
    kv_heads: int,
    head_dim: int,
    degree: int,
    soft_clip: float,
    window: int,
    max_pos: int,
    gates: bool,
    causal: bool,
) -> tuple[Call, ...]:
    """Return the ops that `weighted` calls, so that the first step can compile their kernels in parallel."""
    shape = heads, head_dim, kv_heads, degree, soft_clip, max_pos > 0, gates, window > 0, causal, EVEN
    return ("poly_attention", shape), *((("richards", (GATE,)),) if gates else ())
