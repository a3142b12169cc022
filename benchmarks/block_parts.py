"""The layers that `bench blocks` measures: ours from the tables of models/richards, each beside plain torch on its weights.

Plain forms are written as a user of torch writes them: products, SDPA and SiLU in the dtype of the input, curves and powers
in fp32, which 16 bits would spoil.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpubound.kernels import reference
from gpubound.layers import RopeTable, RotaryAngles
from gpubound.models.richards import RichardsConfig, TransformerBlock
from gpubound.models.richards.model import MIXERS, MLPS

Plain = Callable[[Any, Tensor], Tensor]  # (our module, x) -> what it should give


@dataclass(frozen=True)
class BlockShape:
    batch: int
    seq: int
    config: RichardsConfig

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def __str__(self) -> str:
        return f"{self.batch}x{self.seq}x{self.config.hidden}"


def _config(hidden: int, intermediate: int, heads: int, kv_heads: int) -> RichardsConfig:
    return RichardsConfig(hidden, intermediate, 1, heads, kv_heads, 64)


SEED_SHAPES = {  # of RustGPT's document: a sequence at a time
    "glu": BlockShape(1, 512, _config(1024, 1024, 16, 16)),
    "feed-forward": BlockShape(1, 512, _config(1024, 4096, 16, 16)),
    "attention": BlockShape(1, 512, _config(1024, 1024, 16, 16)),
    "block": BlockShape(1, 512, _config(1024, 4096, 16, 16)),
}
LARGE = BlockShape(16, 1024, _config(1024, 4096, 16, 4))  # a layer of 350m
TINY = BlockShape(1, 8, _config(32, 64, 4, 2))


def swiglu(m: Any, x: Tensor) -> Tensor:
    return m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))


def richards_glu(m: Any, x: Tensor) -> Tensor:
    x1, x2 = m.gate_proj(x), m.up_proj(x)
    return m.down_proj((x1 * _curve(m.value, x1) * _curve(m.gate, x2)).to(x.dtype))


def _curve(c: Any, x: Tensor) -> Tensor:
    return c.curve.apply(_wide(x), c.free)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def poly(m: Any, x: Tensor) -> Tensor:
    """Of a layer without window and gates."""
    q, k, v = _heads(m, x)
    groups, tokens = q.shape[1] // k.shape[1], torch.arange(x.shape[1], device=x.device)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = _wide(q @ k.transpose(2, 3)) * m.head_dim**-0.5
    scores = m.soft_clip * torch.tanh(scores / m.soft_clip)
    a, b, scale = m.coefficients
    weights = (scale * (a * scores**m.degree + b)).masked_fill(tokens[:, None] < tokens, 0.0)
    return m.o_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


def _heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (p(x).unflatten(-1, (-1, m.head_dim)).transpose(1, 2) for p in (m.q_proj, m.k_proj, m.v_proj))
    return _turned(q), _turned(k), v


def softmax(m: Any, x: Tensor) -> Tensor:
    q, k, v = _heads(m, x)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return m.o_proj(y.transpose(1, 2).flatten(2))


def rg_lru(m: Any, x: Tensor) -> Tensor:
    packed = torch.cat([m.x_proj(x), m.r_proj(x), m.i_proj(x)], -1)
    return m.o_proj(reference("rg_lru")(packed, m.decay)[0])


def _turned(t_BHTD: Tensor) -> Tensor:
    half = t_BHTD.shape[-1] // 2
    angles = torch.arange(t_BHTD.shape[2], device=t_BHTD.device)[:, None] * torch.exp(
        -math.log(10000.0) / half * torch.arange(half, device=t_BHTD.device)
    )
    cos, sin = (torch.cat([a, a], -1).to(t_BHTD.dtype) for a in (angles.cos(), angles.sin()))
    first, second = t_BHTD.chunk(2, -1)
    return t_BHTD * cos + torch.cat([-second, first], -1) * sin


PLAIN_MLPS: dict[str, Plain] = {"swiglu": swiglu, "richards_glu": richards_glu}
PLAIN_MIXERS: dict[str, Plain] = {"softmax": softmax, "poly": poly, "rg_lru": rg_lru}
HANDFUL = 16
LOOPS = ("rg_lru",)  # a step a token: torch.compile would unroll them


def block(m: Any, x: Tensor, mixer: str, mlp: str) -> Tensor:
    h = x + PLAIN_MIXERS[mixer](m.self_attn, _normed(m.input_layernorm, x))
    return h + PLAIN_MLPS[mlp](m.mlp, _normed(m.post_attention_layernorm, h))


def _normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


class Layer:
    """One layer of ours with drawn weights, and its plain form: `ours(x)`, `plain(x)`, over `parameters`."""

    def __init__(self, kind: str, names: tuple[str, ...], shape: BlockShape, device: Any, dtype: torch.dtype):
        self.kind, self.names, self.shape, self.dtype = kind, names, shape, dtype
        torch.manual_seed(0)
        self.module = self._made(shape.config, {"device": device, "dtype": dtype})
        self.parameters = list(self.module.parameters())
        self.rope = RopeTable(RotaryAngles(shape.config.head_dim))

    def _made(self, config: RichardsConfig, where: dict[str, Any]) -> nn.Module:
        if self.kind == "block":
            return TransformerBlock(replace(config, attention=self.names[0], mlp=self.names[1]), **where)
        return (MLPS if self.kind == "mlp" else MIXERS)[self.names[0]].make(config, **where)

    def ours(self, x: Tensor) -> Tensor:
        module: Any = self.module
        if self.kind == "mlp":
            return module.mix(x)
        rope = self.rope.first(x.shape[1], x.device)
        return module.mix(x, rope, None) if self.kind == "mixer" else module(x, rope)

    def plain(self, x: Tensor) -> Tensor:
        if self.kind == "block":
            return block(self.module, x, *self.names)
        return (PLAIN_MLPS if self.kind == "mlp" else PLAIN_MIXERS)[self.names[0]](self.module, x)

    def work(self, call: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Forward and backward of it: the result, and the gradients of the input and every parameter.

        In 16 bits not those of a handful of numbers that all of the layer depends on: sums of millions of terms that cancel
        have no digit left to compare there. They are computed all the same.
        """
        where, size = self.parameters[0].device, (self.shape.batch, self.shape.seq, self.shape.config.hidden)
        generator = torch.Generator().manual_seed(1)
        x, upstream = (torch.randn(*size, generator=generator).to(where, self.dtype) for _ in range(2))
        leaves = [x.requires_grad_(), *self.parameters]

        def run() -> tuple[Tensor, ...]:
            y = call(x)
            gradients = torch.autograd.grad(y, leaves, upstream)
            return y, *(g for g in gradients if g.numel() > HANDFUL or self.dtype.itemsize > 2)

        return run

    def products(self) -> Callable[[], tuple[Tensor, ...]]:
        """Of an MLP, what nobody can leave out: its products, forward and backward, on ready operands."""
        m: Any = self.module
        both = torch.cat([m.gate_proj.weight, m.up_proj.weight]).detach()
        down, rows = m.down_proj.weight.detach(), self.shape.tokens
        # Random numbers: a GPU multiplies ones faster, because fewer bits change.
        widths, where = (both.shape[1], both.shape[0], down.shape[1]), {"device": both.device, "dtype": both.dtype}
        x, gate_up, h = (torch.randn(rows, width, **where) for width in widths)

        def run() -> tuple[Tensor, ...]:
            made = x @ both.t(), h @ down.t(), x @ down, gate_up @ both
            return *made, gate_up.t() @ x, x.t() @ h

        return run
