"""Layers that keep a state of fixed size instead of keys and values: their weights, their definitions, and their readers.

A state has the last inputs of a short convolution, and may have a matrix for each head. decode/recurrent.py has the fast
implementations.

Legend: T tokens, C channels of a convolution, K its taps, H heads.

Modules of Hugging Face models that mix tokens by a recurrence are replaced: chunks, and a scan over them. Projections, which
may carry adapters, are called as they are. With a cache a module's own forward runs, except in training, where a new cache is
left empty.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.chunk_scan import CHUNK
from ..kernels.decode_product import Norm
from ..kernels.delta_rule import DeltaParameters, DeltaShape, chunked_delta_rule, delta_inputs, gated_norm
from ..kernels.mamba import MambaParameters, MambaShape, chunked_mamba, group_normed, mamba_inputs
from ..layers.fused_weights import Kernels
from ..layers.linear_product import format_of
from .decoding import AnyNorm, Linear, PartWeights, Rounding, StateShape, plain_linear, plain_norm
from .hf_modules import IDLE
from .reader import Reader, linear_of, weight_of
from .registry import BATCH, TOKENS, Delegating, Swap, cache_name, random_case


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


def is_fresh(cache: Any, number: int) -> bool:
    """Return whether a cache holds nothing of a layer, as one that transformers makes by default, in training, too."""
    begun = getattr(cache.layers[number], "is_conv_states_initialized", True)
    return not (any(begun.values()) if isinstance(begun, dict) else begun)


def unpadded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, T, ...) with zeros where the mask (B, T) has padding."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


class HFRecurrence(Delegating, nn.Module):
    layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        *,
        cache: Any = None,
        **kwargs: Any,
    ):
        cache = cache_params if cache is None else cache  # named `cache` since transformers 5.24
        if why := self.unable(cache, attention_mask, kwargs):
            kwargs |= {cache_name(self.forwards[1]) or "cache_params": cache, "attention_mask": attention_mask}
            return self.delegate(why, hidden_states, **kwargs)
        return self.mixed(unpadded(hidden_states, attention_mask), attention_mask)

    def mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def unable(self, cache: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> str | None:
        """Return why this call must take the original forward; None if the chunks compute the same."""
        if why := self.patched():
            return why
        if cache is not None and not (self.training and is_fresh(cache, self.layer_idx)):
            return "a cache was given"
        if mask is not None and mask.dim() != 2:
            return "attention_mask is no mask of padding"
        return next((f"{name} was given" for name, value in kwargs.items() if value is not None and name not in IDLE), None)

    def convolved(self, x: Tensor) -> Tensor:
        """Return silu of the causal convolution of x (B, T, C)."""
        conv = self._modules["conv1d"]
        assert conv is not None
        weight, bias = conv._parameters["weight"], conv._parameters["bias"]
        padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))  # type: ignore[union-attr]
        return F.silu(F.conv1d(padded, weight, bias, groups=len(weight))).transpose(1, 2)  # type: ignore[arg-type]

    def fused_kernels(self) -> Kernels:
        return "chunks of the recurrence, and a scan over them: {}", ("chunk_scan",)


class HFGatedDelta(HFRecurrence):
    INPUTS: tuple[str, ...]
    delta: DeltaShape

    def mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        own: Any = self._modules
        q, k, v, z, b, a = self.delta.parts(torch.cat([own[name](x) for name in self.INPUTS], -1))
        norm = Norm(own["norm"].weight, own["norm"].variance_epsilon, 0.0)
        weights: Any = self._parameters
        parameters = DeltaParameters(own["conv1d"].weight[:, 0], weights["A_log"], weights["dt_bias"], norm)
        q, k, v, g, beta = delta_inputs(self.convolved(torch.cat([q, k, v], -1)), b, a, parameters, self.delta)
        o, _ = chunked_delta_rule(q, k, v, g, beta, precise=x.dtype == torch.float32)
        return own["out_proj"](gated_norm(o, z, norm).flatten(2).to(x.dtype))


class HFMamba(HFRecurrence):
    mamba: MambaShape
    norm_groups: int

    def projected(self, x: Tensor) -> Tensor:
        return self._modules["in_proj"](x)  # type: ignore[misc]

    def mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        own: Any = self._modules
        weights: Any = self._parameters
        z, mixed, dt = self.mamba.parts(self.projected(x))
        conv = own["conv1d"]
        parameters = MambaParameters(conv.weight[:, 0], conv.bias, weights["A_log"], weights["dt_bias"], weights["D"])
        mixed = unpadded(self.convolved(mixed), mask)  # whose bias reaches padding, too
        v, b, c, g, skipped = mamba_inputs(mixed, dt, parameters, self.mamba)
        y, _ = chunked_mamba(v, b, c, g, precise=x.dtype == torch.float32)
        y, norm = self.mamba.gated((y + skipped).flatten(2), z), head_norm(self)
        return own["out_proj"]((y if norm is None else group_normed(y, norm, self.norm_groups)).to(x.dtype))


def gated_delta(module: Any, stack: Any, inputs: tuple[str, ...], grouped: bool = False) -> Swap:
    """Return the Swap of a layer of the gated delta rule. inputs: names of its projections, q, k, v and z first"""
    shape = DeltaShape(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim, grouped)
    calls = (("chunk_scan", (True, shape.key_width, shape.value_width, CHUNK, False)),)
    refusal = "" if module.activation == "silu" else f"its activation is {module.activation!r}"
    case = random_case(module, (BATCH, TOKENS, module.hidden_size))
    return Swap(HFGatedDelta, calls, {"INPUTS": inputs, "delta": shape, "delegated": Counter()}, (case,), refusal)


def mamba_shape(layer: Any) -> MambaShape:
    least = float(layer.time_step_limit[0])
    return MambaShape(layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size, least)


def norm_groups(layer: Any) -> int:
    """Return the groups of a layer's norm. In some releases of transformers Bamba's has none."""
    groups = layer.intermediate_size // getattr(layer.norm, "group_size", layer.intermediate_size)
    return getattr(layer.norm, "n_groups", groups)


def head_norm(layer: Any) -> Norm | None:
    """Return the norm of a layer's heads after their gate, or None."""
    norm = layer._modules["norm"]
    return None if isinstance(norm, nn.Identity) else Norm(norm._parameters["weight"], float(norm.variance_epsilon), 0.0)


def mamba(module: Any, stack: Any, part: type[HFMamba] = HFMamba) -> Swap:
    """Return the Swap of a layer of Mamba-2."""
    shape = mamba_shape(module)
    calls = (("chunk_scan", (False, shape.state, shape.width, CHUNK, False)),)
    refusal = "" if module.activation == "silu" else f"its activation is {module.activation!r}"
    refusal = refusal or ("" if module.time_step_limit[1] == float("inf") else "it limits its time steps")
    refusal = refusal or ("its norm comes before the gate" if getattr(module.norm, "norm_before_gate", False) else "")
    case = random_case(module, (BATCH, TOKENS, module.hidden_size))
    attributes = {"mamba": shape, "norm_groups": norm_groups(module), "delegated": Counter()}
    return Swap(part, calls, attributes, (case,), refusal)
