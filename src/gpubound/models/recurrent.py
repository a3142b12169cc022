"""Layers that keep a state of fixed size instead of keys and values: their weights, their definitions, and their readers.

A state has the last inputs of a short convolution, and may have a matrix for each head. decode/recurrent.py has the fast
implementations.

Legend: T tokens, C channels of a convolution, K its taps, H heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.decode_product import Norm, group_normed
from ..kernels.recurrent import (
    DeltaParameters,
    DeltaShape,
    MambaParameters,
    MambaShape,
    delta_inputs,
    gated_norm,
    mamba_inputs,
)
from ..layers.linear_product import format_of
from .decoding import AnyNorm, Linear, PartWeights, Rounding, StateShape, plain_linear, plain_norm
from .reader import Reader, linear_of, weight_of


@dataclass(frozen=True)
class RecurrentWeights(PartWeights):
    """Base class of the weights of a layer with a state. `conv` (C, K): the last tap is that of the token itself."""

    norm: AnyNorm
    inputs: tuple[Linear, ...]
    output: Linear
    conv: Tensor
    conv_bias: Tensor | None
    post_norm: ClassVar[None] = None

    def state(self) -> StateShape:
        recurrence: Any = getattr(self, "shape", None)
        channels, taps = self.conv.shape
        return StateShape(channels, taps, () if recurrence is None else recurrence.matrix)

    @property
    def width(self) -> int:
        """The columns of the output layer's input, of which codes have fewer."""
        recurrence: Any = getattr(self, "shape", None)
        return len(self.conv) if recurrence is None else recurrence.inner

    def vectors(self) -> list[Tensor]:
        """Return the weights that are no matrices."""
        return [t for t in vars(self).values() if isinstance(t, Tensor)]

    def tensors(self) -> list[Tensor]:
        return super().tensors() + self.vectors()

    def linears(self) -> list[Linear]:
        return [*self.inputs, self.output]

    def groups(self) -> list[tuple[Linear, ...]]:
        return [self.inputs, (self.output,)]

    def mapped(self, change: Callable[[Any], Any]) -> Any:
        moved = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(super().mapped(change), inputs=tuple(map(change, self.inputs)), **moved)

    def define(self, x: Tensor, tables: Any, rounded: Rounding, kept: dict, number: int) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        h = plain_norm(x, self.norm)
        return plain_linear(self.mixed([plain_linear(h, layer) for layer in self.inputs]), self.output)

    def mixed(self, rows: list[Tensor]) -> Tensor:
        """Return the input of the output layer in plain fp32, for rows (T, ...) of each of the input layers."""
        raise NotImplementedError

    def convolved(self, x: Tensor) -> Tensor:
        """Return the causal convolution of x (T, C) in fp32."""
        bias = None if self.conv_bias is None else self.conv_bias.float()
        padded = F.pad(x.t(), (self.conv.shape[1] - 1, 0))
        return F.conv1d(padded[None], self.conv.float()[:, None], bias, groups=len(self.conv))[0].t()


@dataclass(frozen=True)
class ShortConvWeights(RecurrentWeights):
    """LFM2's convolution of the product of two projections, times a third."""

    def mixed(self, rows: list[Tensor]) -> Tensor:
        gate, output_gate, value = rows[0].chunk(3, -1)
        return output_gate * self.convolved(gate * value)


@dataclass(frozen=True)
class DeltaWeights(RecurrentWeights):
    """The gated delta rule of Qwen3-Next and Qwen3.5. The inputs are q, k, v and z, and then b and a."""

    a_log: Tensor
    dt: Tensor
    head_norm: Norm
    shape: DeltaShape

    def groups(self) -> list[tuple[Linear, ...]]:
        """Return the layers that are one product each: all inputs, unless they are four, or only some of them quantised."""
        if len(self.inputs) < 4 and len({format_of(layer.weight).coded for layer in self.inputs}) == 1:
            return super().groups()
        half = len(self.inputs) // 2
        return [self.inputs[:half], self.inputs[half:], (self.output,)]

    def parameters(self) -> DeltaParameters:
        return DeltaParameters(self.conv, self.a_log, self.dt, self.head_norm)

    def mixed(self, rows: list[Tensor]) -> Tensor:
        q, k, v, z, b, a = self.shape.parts(torch.cat(rows, -1))
        x = F.silu(self.convolved(torch.cat([q, k, v], -1)))
        q, k, v, g, beta = (t[0] for t in delta_inputs(x[None], b[None], a[None], self.parameters(), self.shape))
        S, outputs = q.new_zeros(self.shape.matrix), []
        for t in range(len(q)):
            S = S * g[t].exp()[:, None, None]
            change = beta[t][:, None] * (v[t] - torch.einsum("hde,hd->he", S, k[t]))
            S = S + k[t][..., None] * change[:, None]
            outputs.append(torch.einsum("hde,hd->he", S, q[t]))
        return gated_norm(torch.stack(outputs), z, self.head_norm).flatten(1)


@dataclass(frozen=True)
class MambaWeights(RecurrentWeights):
    """Mamba-2. `head_norm`: after the gate, of `norm_groups` groups of heads; None: there is none"""

    a_log: Tensor
    dt: Tensor
    skip: Tensor
    head_norm: Norm | None
    norm_groups: int
    shape: MambaShape
    joined: bool = False

    def parameters(self) -> MambaParameters:
        return MambaParameters(self.conv, self.conv_bias, self.a_log, self.dt, self.skip)

    def mixed(self, rows: list[Tensor]) -> Tensor:
        z, x, dt = self.shape.parts(rows[0])
        x = F.silu(self.convolved(x))
        v, b, c, g, skipped = (t[0] for t in mamba_inputs(x[None], dt[None], self.parameters(), self.shape))
        S, outputs = v.new_zeros(self.shape.matrix), []
        for t in range(len(v)):
            S = S * g[t].exp()[:, None, None] + v[t][..., None] * b[t][:, None]
            outputs.append(torch.einsum("hpn,hn->hp", S, c[t]))
        y = self.shape.gated((torch.stack(outputs) + skipped).flatten(1), z)
        return y if self.head_norm is None else group_normed(y, self.head_norm, self.norm_groups)


class RecurrentReader(Reader):
    """Reader of a model in which some blocks have a layer with a state, named MIXER, in the place of attention."""

    MIXER, CONV = "linear_attn", "conv1d"
    INPUTS: ClassVar[tuple[str, ...]] = ("in_proj",)  # names of the layer's projections

    def mixes(self, block: Any) -> bool:
        return self.MIXER in block._modules

    def attention_of(self, block: Any) -> Any:
        return block._modules[self.MIXER if self.mixes(block) else self.ATTENTION]

    def first_attention(self) -> Any:
        return next((self.attention_of(block) for block in self.blocks if not self.mixes(block)), None)

    def head_dim(self, attention: Any) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    def scale(self, attention: Any) -> float:
        return self.head_dim(attention) ** -0.5

    def attention(self, block: Any) -> Any:
        """Return the weights of a block's attention, or of the layer in its place."""
        return self.mixer(block) if self.mixes(block) else super().attention(block)

    def mixer(self, block: Any) -> RecurrentWeights:
        raise NotImplementedError

    def common(self, block: Any) -> dict[str, Any]:
        """Return the weights that every kind of layer with a state has."""
        layer, (before,) = self.attention_of(block), self.norms(block, self.NORMS[:1])
        conv = layer._modules[self.CONV]
        return {
            "norm": before,
            "inputs": tuple(linear_of(layer._modules[name]) for name in self.INPUTS),
            "output": linear_of(layer.out_proj),
            "conv": weight_of(conv).detach()[:, 0],
            "conv_bias": conv._parameters["bias"],
        }
