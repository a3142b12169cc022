"""Causal self-attention with rotary positions: one product for q, k, v, one kernel that rotates and splits it, torch's SDPA.

A position p rotates the pair (i, i + D/2) of every q and k head by the angle p · frequency_i. Training reads positions 0..T-1
in every step, so their cosines and sines are cached; others are computed in each call, on the device. Heads follow the tokens,
as the product writes them: SDPA gets transposed views, and none of its kernels needs a copy.

Legend: B batch, T tokens, H query heads, K key and value heads, D width of a head.
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import rope, rope_qkv
from ..kernels.dispatch import Call, transformed
from .block import RMSNorm
from .fused_weights import Kernels, Projecting, Stacked, run_linear
from .invariant import CONTEXT
from .linear_product import multiply
from .packed_attention import Segments, flash_attend

Mask = Tensor | Segments | None
"""as for SDPA, or the examples of packed rows; None: causal, or all tokens if the layer is not"""

Rope = tuple[Tensor, Tensor]
"""cos and sin in fp32: (T, D/2), or (B, T, D/2) where rows have separate positions"""


class Angles(Protocol):
    """RoPE angles: cos and sin (..., T, D/2) of positions (..., T) on the device."""

    def __call__(self, positions: Tensor) -> Rope: ...

    def stamp(self) -> object:
        """Return a value that changes when the frequencies do; a table of an older stamp is stale."""
        ...


class RotaryAngles:
    """Rotary angles with frequency_i = theta^(-2i / head_dim)."""

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        if head_dim % 2:
            raise ValueError(f"RotaryAngles: head_dim must be even, got {head_dim}; rotation works on pairs.")
        self.head_dim, self.theta = head_dim, theta

    def __call__(self, positions: Tensor) -> Rope:
        turn = positions[..., None].float() * self.frequencies(positions.device)
        return turn.cos(), turn.sin()

    def frequencies(self, device: torch.device) -> Tensor:
        i = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        return self.theta ** (-i / self.head_dim)

    def stamp(self) -> object:
        return self.head_dim, self.theta


class Llama3Angles(RotaryAngles):
    """RotaryAngles of Llama 3.1 for texts longer than `positions`, those of its first training: slow pairs turn more slowly.

    A pair that turns fewer than `low` times within `positions` turns at 1 / factor of its frequency, one that turns more than
    `high` times at its own, and between them the frequency rises linearly with the number of turns.
    """

    def __init__(self, head_dim: int, theta: float, factor: float, low: float, high: float, positions: int) -> None:
        super().__init__(head_dim, theta)
        self.factor, self.low, self.high, self.positions = factor, low, high, positions

    def frequencies(self, device: torch.device) -> Tensor:
        own = super().frequencies(device)
        turns = self.positions * own / (2 * math.pi)
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return own * (share + (1 - share) / self.factor)

    def stamp(self) -> object:
        return self.head_dim, self.theta, self.factor, self.low, self.high, self.positions


class RopeTable:
    """Cache of cos and sin of positions 0..T-1, computed at the first call for a device or a greater T, then sliced.

    Shorter tables are not freed: graphs that were captured before read them. Each is twice as long as the one before.
    """

    def __init__(self, angles: Angles) -> None:
        self.angles = angles
        self._tables: list[Rope] = []
        self._stamp: object = None

    def __getstate__(self):
        return {"angles": self.angles, "_tables": [], "_stamp": None}

    def first(self, length: int, device: torch.device) -> Rope:
        """Return (cos, sin) of positions 0..length-1, each (length, D/2)."""
        if transformed():  # the frequencies may be those of a batch of models
            return self.at(torch.arange(length, device=device))
        stamp = self.angles.stamp()
        same = self._tables and self._tables[0][0].device == device and stamp == self._stamp
        tables = self._tables if same else []
        if not tables or tables[-1][0].shape[0] < length:
            size = max(length, 2 * tables[-1][0].shape[0]) if tables else length
            with torch.inference_mode(False):  # a table made inside could not be saved for backward later
                cos, sin = self.at(torch.arange(size, device=device))
                tables = [*tables, (cos.contiguous(), sin.contiguous())]
            # Memory that a capture allocates is its graph's, and overwritten at the next replay.
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._tables, self._stamp = tables, stamp
        cos, sin = tables[-1]
        return cos[:length], sin[:length]

    def of(self, x: Tensor, positions: Tensor | None) -> Rope:
        """Return the angles of a batch x (B, T, ...): of its first T without positions, and by row only if those differ."""
        if positions is None:
            return self.first(x.shape[1], x.device)
        return self.at(positions[0] if positions.dim() > 1 and len(positions) == 1 else positions)

    def at(self, positions: Tensor) -> Rope:
        """Return (cos, sin) of these positions (..., T), without caching them."""
        with torch.no_grad(), torch.autocast(positions.device.type, enabled=False):
            return self.angles(positions)


class Attention(Projecting):
    """Grouped-query attention. qk_norm: an eps with which q and k heads are RMS-normed before they are rotated (Qwen3)"""

    PROJECTIONS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # together [q | k | v]

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    dropout: float = 0.0
    causal: bool = True  # without a mask; False: every token sees all

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: float | None = None,
        causal: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.causal = causal
        kv_heads, head_dim = kv_heads or heads, head_dim or hidden // heads
        if heads % kv_heads:
            raise ValueError(
                f"Attention: heads must be a multiple of kv_heads, got {heads} and {kv_heads}; choose kv_heads that divides it."
            )
        self.heads, self.kv_heads, self.head_dim, self.scaling = heads, kv_heads, head_dim, head_dim**-0.5
        where = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias, **where)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias, **where)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias, **where)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False, **where)
        if qk_norm is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, qk_norm, **where), RMSNorm(head_dim, qk_norm, **where)
        self.stacked = Stacked()

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask = None) -> Tensor:
        return self.mix(x, rope, mask)

    def mix(self, x: Tensor, rope: Rope | None, mask: Mask = None) -> Tensor:
        """Compute x (B, T, hidden) -> (B, T, hidden)."""
        q, k, v = self.project(x, rope)
        y, _ = self.attended(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.output(y.flatten(-2))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        """Return SDPA of q (B, H, T, D), k and v (B, K, L, D) as (B, T, H, D), and the scores if transformers returns them."""
        return attend(q, k, v, mask, self.scaling, self.dropout if self.training else 0.0, self.causal), None

    def project(self, x: Tensor, turn: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, H, D), k and v (B, T, K, D), q and k rotated by `turn` unless that is None."""
        joined = self.stacked.joined(self.projections())
        packed = None if joined is None else multiply(x, joined)
        if packed is None:
            rows = self.one_by_one(x)
            packed = rows[0] if len(rows) == 1 else None
        if packed is not None:
            if joined is not None and len(joined.weights) == 3:  # they may have been pruned
                q, k, _ = joined.weights
                heads, kv_heads = q.shape[0] // self.head_dim, k.shape[0] // self.head_dim
            else:
                heads, kv_heads = self.heads, self.kv_heads
            if turn is not None and "q_norm" not in self._modules:
                return rope_qkv(packed, *turn, heads, kv_heads)
            rows = packed.split([heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim], -1)
        q, k, v = self.split_heads(*rows)
        if turn is not None:
            q, k = rope(q, k, *turn)
        return q, k, v

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """View rows (B, T, H D) as heads (B, T, H, D), and norm those of q and k if there are norms."""
        children: dict[str, Any] = self._modules
        q, k, v = (t.view(*t.shape[:-1], -1, self.head_dim) for t in (q, k, v))
        return (children["q_norm"](q), children["k_norm"](k), v) if "q_norm" in children else (q, k, v)

    def fused_kernels(self) -> Kernels:
        packed = (len(self.PROJECTIONS) == 1 or self.as_one()) and "q_norm" not in self._modules
        return f"{self.product_words('q, k, v')}; {{}}; SDPA", ("rope_qkv" if packed else "rope",)

    def output(self, y: Tensor) -> Tensor:
        return run_linear(self._modules["o_proj"], y)


def turn_calls(heads: int, kv_heads: int, head_dim: int, pairs: int, normed: bool) -> tuple[Call, ...]:
    """Return the ops that `project` will call, so that a first step compiles their kernels in parallel."""
    return (("rope" if normed else "rope_qkv", (heads, kv_heads, head_dim, pairs)),)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Compute SDPA of q (B, H, T, D), k and v (B, K, T, D) -> (B, T, H, D).

    With a mask, k and v are repeated: CUDA has masked kernels for equal head counts alone, besides one that stores all T × T.
    window: of packed rows, where no mask limits the number of tokens that a token attends to
    """
    exact = None if torch.compiler.is_compiling() else getattr(CONTEXT, "mode", None)
    if exact is not None:
        return exact.attend(q, k, v, mask, scale, dropout, causal, window)
    if isinstance(mask, Segments):
        y = flash_attend(q, k, v, mask, scale, dropout, causal, window)
        if y is not None:
            return y
        mask = mask.mask(window, causal)
    grouped = q.shape[1] != k.shape[1]
    if mask is not None or q.shape[2] == 1:  # a branch: SDPA takes no SymBool of torch.compile's
        causal = False
    if grouped and mask is not None:
        groups = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return y.transpose(1, 2)
