"""Replacements for the modules of Hugging Face models that mix tokens by a recurrence: chunks, and a scan over them.

Projections, which may carry adapters, are called as they are. With a cache a module's own forward runs, except in training,
where a new cache is left empty.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.chunk_scan import CHUNK
from ..kernels.decode_product import Norm
from ..kernels.delta_rule import DeltaParameters, DeltaShape, chunked_delta_rule, delta_inputs, gated_norm
from ..kernels.mamba import MambaParameters, MambaShape, chunked_mamba, group_normed, mamba_inputs
from ..layers.fused_weights import Kernels
from .hf_modules import IDLE
from .registry import BATCH, TOKENS, Delegating, Swap, cache_name, random_case


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
