"""The straight line of one layer: attention with its norm and residual, then an MLP with its own.

Each part has three forms: `step` for few rows, whose products are kernels of our own that read the weights once and may each
start while the one before still runs; `wide_step` for more, whose products are matrices worth a tensor core; and `prompt`. It
gets its weights in any format (weights/) and keeps keys and values in any cache (cache.py). What it computes is said once more
in plain fp32 by its weights' `define`.

Experts are another file with the same methods (experts.py); so is whatever comes next.

Legend: B rows, T tokens of a prompt, H query heads, K key and value heads, D width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import can_launch
from ..kernels import norm_rows, rms_norm, rope, swiglu
from ..kernels.decode_attention import Heads, Scratch
from ..layers.attention import attend
from ..layers.linear_site import fused_linear
from .cache import Cache

SPLITS = 16  # programs over which the keys of a row and kv head may spread

Rounding = Callable[[Tensor], Tensor] | None  # of keys (T, K, D) in their places, and of values


@dataclass(frozen=True)
class Shape:
    """What all layers of a model have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    head_eps: float  # of the normed q and k heads
    scale: float


class Bench:
    """What all layers of a body work on: tables, cache, and buffers, made once so that graphs find them where they were."""

    def __init__(
        self, shape: Shape, cache: Cache, angles: tuple[Tensor, Tensor], rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.cache, self.rows, self.dtype, self.device = shape, cache, rows, dtype, device
        self.turned = angles
        self.still = torch.ones_like(angles[0]), torch.zeros_like(angles[1])  # for layers that do not turn their heads
        self.overheard: Any = None  # the judge's Choices, while it listens to what experts are chosen
        self._buffers: dict[tuple, Tensor] = {}

    @property
    def kernels(self) -> str:
        """Which implementation of the kernels runs here, for the table."""
        return "triton" if can_launch(self.device) else "reference"

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros, one buffer for all layers that ask for the same."""
        key = (name, *shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, device=self.device, dtype=dtype)
        return self._buffers[key]


@dataclass(frozen=True)
class AttentionWeights:
    """Biases and head norms may be None."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    window: int  # 0: all keys
    turned: bool  # False: a layer without positions

    def part(self, number: int, form: Any, bench: Bench) -> "Attention":
        return Attention(self, number, form, bench)

    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def define(self, shape: Shape, x: Tensor, cos: Tensor, sin: Tensor, rounded: Rounding) -> Tensor:
        """What is added to x (T, hidden), in plain fp32."""
        T = x.shape[0]
        h = plain_norm(x, self.norm, shape.eps)
        q = plain_linear(h, self.q, self.q_bias).view(T, shape.heads, -1)
        k, v = (plain_linear(h, w, b).view(T, shape.kv_heads, -1) for w, b in ((self.k, self.k_bias), (self.v, self.v_bias)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = plain_norm(q, self.q_norm, shape.head_eps), plain_norm(k, self.k_norm, shape.head_eps)
        if self.turned:
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        if rounded is not None:
            k, v = rounded(k), rounded(v)
        groups = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * shape.scale
        age = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
        hidden = (age < 0) | (age >= (self.window or T))
        y = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        return plain_linear(y.flatten(1), self.o, self.o_bias)


class Attention:
    """Norm, q k v, rotation, cache, attention, output."""

    def __init__(self, weights: AttentionWeights, number: int, form: Any, bench: Bench) -> None:
        self.weights, self.number, self.bench = weights, number, bench
        w, s, rows = weights, bench.shape, bench.rows
        self.qkv = form.stacked([w.q, w.k, w.v], [w.q_bias, w.k_bias, w.v_bias])
        self.o = form.stacked([w.o], [w.o_bias])
        self._named = f"{form.prefix}norm_product", f"{form.prefix}add_product"
        self._qkv = bench.buffer("qkv", rows, (s.heads + 2 * s.kv_heads) * s.head_dim)
        self._normed = bench.buffer("normed", rows, s.hidden, dtype=bench.dtype)
        self._mixed = bench.buffer("mixed", rows, s.heads * s.head_dim, dtype=bench.dtype)
        self._partial = bench.buffer("partial", rows, s.kv_heads, SPLITS, s.heads // s.kv_heads, s.head_dim + 2)
        self._finished = bench.buffer("finished", rows * s.kv_heads, dtype=torch.int32)
        self._angles = bench.turned if w.turned else bench.still

    def step(self, x: Tensor, position: Tensor, mode: int) -> None:
        rows, qkv, mixed = len(x), self._qkv[: len(x)], self._mixed[: len(x)]
        self.qkv.norm_product(x, self.weights.norm, self.bench.shape.eps, qkv, mode)
        self._attend(rows, qkv, position, mode)
        self.o.add_product(mixed, x, mode)

    def wide_step(self, x: Tensor, position: Tensor) -> None:
        h = norm_rows(x, self.weights.norm, self.bench.shape.eps, self._normed[: len(x)])
        self._attend(len(x), fused_linear(h, self.qkv.matrices(), self.qkv.biases or None), position, 0)
        accumulate(x, self._mixed[: len(x)], self.o.matrices()[0], self.weights.o_bias)

    def prompt(self, h: Tensor, start: int, end: int) -> Tensor:
        """What is added to the stream, for normed h (B, T, hidden) at places start to end."""
        q, k, v = self._project(h, start, end)
        k, v = self.bench.cache.extend(self.number, start, k, v)
        mask = _mask(start, end, self.weights.window, h.device)
        mixed = attend(q.transpose(1, 2), k, v, mask, self.bench.shape.scale)
        return F.linear(mixed.flatten(2), self.o.matrices()[0], self.weights.o_bias)

    def _attend(self, rows: int, qkv: Tensor, position: Tensor, mode: int) -> None:
        s, w = self.bench.shape, self.weights
        heads = Heads(*self._angles, w.q_norm, w.k_norm, s.head_eps, s.scale, w.window)
        scratch = Scratch(self._partial[:rows], self._finished[: rows * s.kv_heads])
        self.bench.cache.attend(self.number, qkv, position, heads, scratch, self._mixed[:rows], mode)

    def _project(self, h: Tensor, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, heads, D) each, q and k normed and turned."""
        s, w = self.bench.shape, self.weights
        pairs = zip(self.qkv.matrices(), (w.q_bias, w.k_bias, w.v_bias))
        q, k, v = (F.linear(h, weight, bias).unflatten(-1, (-1, s.head_dim)) for weight, bias in pairs)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = rms_norm(q, w.q_norm, s.head_eps), rms_norm(k, w.k_norm, s.head_eps)
        if w.turned:
            cos, sin = self._angles
            q, k = rope(q, k, cos[start:end], sin[start:end])
        return q, k, v

    def exact(self) -> AttentionWeights:
        """In fp32 or as it is: what the weights stand for."""
        (q, k, v), (o,) = self.qkv.exact(), self.o.exact()
        return replace(self.weights, q=q, k=k, v=v, o=o)

    def tensors(self) -> list[Tensor]:
        """What a step reads whole."""
        w = self.weights
        norms = [t for t in (w.norm, w.q_norm, w.k_norm) if t is not None]
        return [*norms, *self.qkv.tensors(), *self.o.tensors()]

    def report(self) -> list[tuple[str, str, str]]:
        kernels, attention = self.bench.kernels, self.bench.cache.layout.op.split(".")[-1]
        product, add = self._named
        return [
            ("norm, q k v", f"{kernels}: {product}", ""),
            ("rotation, cache, attention", f"{kernels}: {attention}", ""),
            ("output", f"{kernels}: {add}", ""),
        ]


@dataclass(frozen=True)
class DenseWeights:
    norm: Tensor
    gate: Tensor
    up: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    on_host = True  # whether host.py has a step for it

    def part(self, number: int, form: Any, bench: Bench) -> "DenseMLP":
        return DenseMLP(self, form, bench)

    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def define(self, h: Tensor, number: int, choices: Any) -> Tensor:
        """What is added to the stream for normed h (T, hidden), in plain fp32."""
        gated = F.silu(plain_linear(h, self.gate, self.gate_bias)) * plain_linear(h, self.up, self.up_bias)
        return plain_linear(gated, self.down, self.down_bias)


class DenseMLP:
    """Norm, gate and up, down."""

    captures_prompts = True

    def __init__(self, weights: DenseWeights, form: Any, bench: Bench) -> None:
        self.weights, self.bench = weights, bench
        self.gate_up = form.gate_up(weights.gate, weights.up, [weights.gate_bias, weights.up_bias])
        self.down = form.stacked([weights.down], [weights.down_bias])
        self._named = f"{form.prefix}norm_gate_up", f"{form.prefix}add_product"
        self._normed = bench.buffer("normed", bench.rows, bench.shape.hidden, dtype=bench.dtype)
        self._gated = bench.buffer("gated", bench.rows, len(weights.gate), dtype=bench.dtype)
        self.gate_up_bytes = self.gate_up.nbytes  # of which a step reads all

    def step(self, x: Tensor, mode: int) -> None:
        gated = self._gated[: len(x)]
        self.gate_up.norm_gate_up(x, self.weights.norm, self.bench.shape.eps, gated, mode)
        self.down.add_product(gated, x, mode)

    def wide_step(self, x: Tensor) -> None:
        h = norm_rows(x, self.weights.norm, self.bench.shape.eps, self._normed[: len(x)])
        gated = swiglu(fused_linear(h, self.gate_up.matrices(), self.gate_up.biases or None))
        accumulate(x, gated, self.down.matrices()[0], self.weights.down_bias)

    def prompt(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up.matrices()
        gated = swiglu(F.linear(h, gate, self.weights.gate_bias), F.linear(h, up, self.weights.up_bias))
        return F.linear(gated, self.down.matrices()[0], self.weights.down_bias)

    def exact(self) -> DenseWeights:
        (gate, up), (down,) = self.gate_up.exact(), self.down.exact()
        return replace(self.weights, gate=gate, up=up, down=down)

    def tensors(self) -> list[Tensor]:
        return [self.weights.norm, *self.gate_up.tensors(), *self.down.tensors()]

    def chosen_bytes(self, tokens: int) -> float:
        """What a step of so many tokens reads besides."""
        return 0.0

    def report(self) -> list[tuple[str, str, str]]:
        kernels = self.bench.kernels
        gate_up, add = self._named
        return [("norm, gate, up", f"{kernels}: {gate_up}", ""), ("down", f"{kernels}: {add}", "")]

    def report_wide(self, wide: bool) -> list[tuple[str, str, str]]:
        return []


def accumulate(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x (fp32) += h weightᵀ + bias, summed in fp32."""
    if h.is_cuda and h.dtype != torch.float32:
        torch.addmm(x, h, weight.t(), out_dtype=torch.float32, out=x)
        if bias is not None:
            x.add_(bias)
    else:
        x.add_(F.linear(h, weight, bias))


def _mask(start: int, end: int, window: int, device: torch.device) -> Tensor | None:
    """Who sees whom among the places start..end and all before: None for plain causal from the beginning."""
    if start == 0 and not (window and end > window):
        return None
    age = torch.arange(start, end, device=device)[:, None] - torch.arange(end, device=device)
    return (age >= 0) & (age < (window or end))


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
