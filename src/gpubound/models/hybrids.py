"""Models with recurrent layers: Mamba-2, Bamba, Falcon-H1, Nemotron-H, LFM2 and LFM2-MoE.

Placing swaps norms, layers of Mamba-2 and the loss, of Mamba-2, Bamba and Falcon-H1 also MLPs, and of Falcon-H1 attention; all
else, such as the loop over layers, stays that of transformers.

- Mamba-2 has no attention and no MLP; Bamba has attention in some layers.
- Falcon-H1 has attention and Mamba-2 side by side in every block, on the same normed stream, and factors of what they multiply.
  The decoder reads a block as two layers, Mamba-2, and attention with the MLP. No product needs its factor. With f of the gate
  and d of the MLP's output, silu(f gate) up d is silu(gate') up' d / f for a norm times f, and the stream is divided by d / f,
  as Granite's (granite.py). The other norm has attention's factors, which the scores take back. Those of Mamba-2 are in the
  taps of its convolution and in its step.
- Nemotron-H has blocks of Mamba-2, attention without positions, and MLPs without a gate. A block that mixes tokens and the MLP
  after it are read as one layer. A mixer that another one follows is a layer without an MLP.
- LFM2 and LFM2-MoE have gated short convolutions in most layers, and attention with normed heads in the others.

Modules that mix tokens by a recurrence are replaced: chunks, and a scan over them. Projections, which may carry adapters, are
called as they are. With a cache a module's own forward runs, except in training, where a new cache is left empty.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.decode_product import Norm, group_normed
from ..kernels.recurrent import (
    CHUNK,
    DeltaParameters,
    DeltaShape,
    MambaParameters,
    MambaShape,
    chunked_delta_rule,
    chunked_mamba,
    delta_inputs,
    gated_norm,
    mamba_inputs,
)
from ..layers.fused_weights import Kernels
from .decoding import NoWeights, Shape, UngatedWeights
from .hf_modules import HFMLP, IDLE, HFAttention, HFCausalLM, attention, causal_lm, mlp, norm, tried_causal_lm
from .mixtral import SparseReader
from .reader import UNGATED_NAMES, Reader, linear_of, weight_of
from .recurrent import MambaWeights, RecurrentReader, ShortConvWeights
from .registry import BATCH, TOKENS, Delegating, Maker, Swap, cache_name, random_case


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


def bamba_causal_lm(module: Any, stack: Any) -> Swap:
    swap = tried_causal_lm(module, stack)
    return replace(swap, refusal="its loss has a z-loss") if getattr(module, "z_loss_coefficient", 0) else swap


MAMBA: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "Mixer": mamba, "ForCausalLM": bamba_causal_lm}


class MambaReader(RecurrentReader):
    NORMS = ("input_layernorm", None, "pre_ff_layernorm", None)
    FINAL, MIXER, MLP = "final_layernorm", "mamba", "feed_forward"
    READS = frozenset((
        "attn_layer_indices", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "num_logits_to_keep", "z_loss_coefficient",
    ))  # fmt: skip

    def refusal(self, max_length: int) -> str | None:
        if (why := super().refusal(max_length)) or self.activation() == "silu":
            return why
        return "its Mamba layers have another activation than silu"

    def mixer(self, block: Any) -> MambaWeights:
        layer = self.attention_of(block)
        return MambaWeights(
            **self.common(block),
            a_log=layer._parameters["A_log"],
            dt=layer._parameters["dt_bias"],
            skip=layer._parameters["D"],
            head_norm=head_norm(layer),
            norm_groups=norm_groups(layer),
            shape=mamba_shape(layer),
        )


class Mamba2Reader(MambaReader):
    NORMS = ("norm", None, "norm", None)
    EMBEDDING, FINAL, MIXER, ROTATES = "embeddings", "norm_f", "mixer", False
    READS = frozenset((
        "num_heads", "state_size", "layer_norm_epsilon", "expand", "conv_kernel", "n_groups", "use_bias", "use_conv_bias",
        "residual_in_fp32", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
        "rescale_prenorm_residual", "chunk_size",
    ))  # fmt: skip

    def mlp(self, block: Any) -> NoWeights:
        return NoWeights()

    def head_dim(self, attention: Any) -> int:
        return 2  # of a table that no layer reads


class MultipliedMLP(HFMLP):
    gate_multiplier: float
    down_multiplier: float

    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x * self.gate_multiplier) * (self.down_multiplier / self.gate_multiplier)


class MultipliedAttention(HFAttention):
    key_multiplier: float

    def project(self, x: Tensor, turn: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, turn)
        return q, k * self.key_multiplier, v


class MultipliedMamba(HFMamba):
    ssm_in_multiplier: float
    mup_vector: Tensor

    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x * self.ssm_in_multiplier) * self.mup_vector


class MultipliedCausalLM(HFCausalLM):
    model: Any

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.model.lm_head_multiplier


def multiplied_mlp(module: Any, stack: Any) -> Swap:
    swap = mlp(module, stack, MultipliedMLP)
    plain = module.gate_multiplier and not module.config.mlp_bias
    return swap if plain else replace(swap, refusal="its gate has a factor of 0, or its projections have biases")


FALCON_H1: dict[str, Maker] = {
    "RMSNorm": norm,
    "MLP": multiplied_mlp,
    "Attention": partial(attention, part=MultipliedAttention),
    "Mixer": partial(mamba, part=MultipliedMamba),
    "ForCausalLM": partial(causal_lm, part=MultipliedCausalLM),
}


class FalconH1Reader(MambaReader):
    READS = MambaReader.READS | {
        "mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm", "projectors_bias", "lm_head_multiplier",
        "embedding_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier", "attention_in_multiplier",
        "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    }  # fmt: skip

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.halves: list[Any] = []  # of each block
        for block in self.trunk.layers:
            mixing = nn.ModuleDict({name: block._modules[name] for name in ("input_layernorm", "mamba")})
            self.halves += [mixing, nn.ModuleDict({k: v for k, v in block.named_children() if k != "mamba"})]

    @property
    def factor(self) -> float:
        gate, down = self.config.mlp_multipliers
        return down / gate

    @property
    def gains(self) -> tuple[float, float]:
        """The factors of a block's norms."""
        c = self.config
        return c.attention_in_multiplier * c.attention_out_multiplier / self.factor, c.mlp_multipliers[0]

    @property
    def blocks(self) -> Any:
        return self.halves

    def refusal(self, max_length: int) -> str | None:
        c = self.config
        if c.attention_bias or c.mlp_bias or c.projectors_bias or c.mamba_proj_bias:
            return "its projections have biases, which its multipliers would have to leave out"
        lists, single = ("mlp_multipliers", "ssm_multipliers"), ("key", "attention_in", "attention_out")
        for name in (*lists, *(f"{part}_multiplier" for part in single)):
            value = getattr(c, name)
            if not all(factor and factor > 0 for factor in (value if name in lists else [value])):
                return f"its {name}={value!r} is not above 0"
        if c.mamba_rms_norm and c.mamba_norm_before_gate:
            return "the norm of its Mamba layers comes before their gate"
        return super().refusal(max_length)

    def shape(self) -> Shape:
        c = self.config
        return replace(super().shape(), embedded=c.embedding_multiplier / self.factor, logit_scale=c.lm_head_multiplier)

    def norms(self, parent: Any, names: Any) -> list[Any]:
        gains = dict(zip(self.NORMS[::2], self.gains))
        return [
            norm and norm._replace(weight=self.copies.of(norm.weight, partial(times, gains[name])))
            for name, norm in zip(names, super().norms(parent, names))
        ]

    def attention(self, block: Any) -> Any:
        c, weights = self.config, super().attention(block)
        if self.mixes(block):
            return weights
        return replace(weights, scale=weights.scale * c.key_multiplier * (c.attention_in_multiplier / self.gains[0]) ** 2)

    def mlp(self, block: Any) -> Any:
        return NoWeights() if self.mixes(block) else super().mlp(block)

    def mixer(self, block: Any) -> MambaWeights:
        c, weights = self.config, super().mixer(block)
        z, *taps, rate = (factor * c.ssm_in_multiplier / self.gains[0] for factor in c.ssm_multipliers)
        scale, norm, (*_, groups, state) = c.ssm_out_multiplier / self.factor, weights.head_norm, weights.shape[:4]
        sizes = [weights.shape.inner, groups * state, groups * state]
        if norm is not None:
            norm, scale = norm._replace(weight=self.copies.of(norm.weight, partial(times, scale))), 1.0
        return replace(
            weights,
            conv=self.copies.of(
                weight_of(block.mamba.conv1d),
                lambda conv: torch.cat([part.float() * factor for part, factor in zip(conv[:, 0].split(sizes), taps)]),
            ),
            head_norm=norm,
            shape=weights.shape._replace(gate=z, rate=rate, scale=scale),
            joined=True,
        )


def times(factor: float, weight: Tensor) -> Tensor:
    """Return a weight times a factor in fp32, which rounds nothing again."""
    return weight.float() * factor


NEMOTRON_H: dict[str, Maker] = {"RMSNorm": norm, "Mamba2Mixer": mamba, "ForCausalLM": tried_causal_lm}


class NemotronHReader(MambaReader):
    NORMS = ("norm", None, "norm", None)
    EMBEDDING, FINAL, ATTENTION, ROTATES = "embeddings", "norm_f", "mixer", False
    READS = frozenset((
        "layers_block_type", "mlp_hidden_act", "use_mamba_kernels", "ssm_state_size", "mamba_num_heads", "mamba_head_dim",
        "mamba_hidden_act", "n_groups", "conv_kernel", "expand", "time_step_min", "time_step_max", "time_step_limit",
        "time_step_floor", "use_conv_bias", "chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype", "n_routed_experts",
        "output_router_logits", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
        "moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group",
        "norm_topk_prob", "num_nextn_predict_layers", "mtp_layers_block_type", "use_bias", "layer_norm_epsilon",
        "num_logits_to_keep", "hidden_dropout", "rescale_prenorm_residual", "residual_in_fp32",
    ))  # fmt: skip

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.pairs_of_blocks: list[Any] = []
        for block in self.trunk.layers:
            if block.block_type == "mlp" and self.pairs_of_blocks and len(self.pairs_of_blocks[-1]) == 1:
                self.pairs_of_blocks[-1].append(block)
            else:
                self.pairs_of_blocks.append(nn.ModuleList([block]))

    @property
    def blocks(self) -> Any:
        return self.pairs_of_blocks

    def refusal(self, max_length: int) -> str | None:
        types = [pair[0].block_type for pair in self.blocks]
        if other := set(types) - {"linear_attention", "full_attention"}:
            return f"it has blocks of type {sorted(other)[0]!r}, which do not follow a mixer of tokens, or which have experts"
        if self.config.mamba_hidden_act != "silu":
            return "its Mamba layers have another activation than silu"
        return Reader.refusal(self, max_length)

    def activation(self) -> str | None:
        return UNGATED_NAMES.get(self.config.mlp_hidden_act)

    def mixes(self, block: Any) -> bool:
        return block[0].block_type == "linear_attention"

    def attention_of(self, block: Any) -> Any:
        return (block[0] if isinstance(block, nn.ModuleList) else block).mixer

    def attention(self, block: Any) -> Any:
        return self.mixer(block[0]) if self.mixes(block) else Reader.attention(self, block[0])

    def mlp_of(self, block: Any) -> Any:
        return block[1].mixer if len(block) > 1 else None

    def mlp(self, block: Any) -> Any:
        layers, activation = self.mlp_of(block), self.activation()
        if layers is None:
            return NoWeights()
        assert activation is not None
        (before,) = self.norms(block[1], self.NORMS[:1])
        return UngatedWeights(before, linear_of(layers.up_proj), linear_of(layers.down_proj), activation)

    def window(self, attention: Any) -> int:
        return 0


LFM2: dict[str, Maker] = {"RMSNorm": norm, "ForCausalLM": tried_causal_lm}


class Lfm2Reader(RecurrentReader):
    NORMS = ("operator_norm", None, "ffn_norm", None)
    FINAL, OUTPUT, MIXER, CONV, MLP = "embedding_norm", "out_proj", "conv", "conv", "feed_forward"
    HEAD_NORMS, GATED = ("q_layernorm", "k_layernorm"), ("w1", "w3", "w2")
    READS = frozenset((
        "norm_eps", "conv_bias", "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim",
        "full_attn_idxs",
    ))  # fmt: skip

    def activation(self) -> str:
        return "silu"  # no option of the config

    def mixer(self, block: Any) -> ShortConvWeights:
        return ShortConvWeights(**self.common(block))


class Lfm2MoeReader(Lfm2Reader, SparseReader):
    READS = Lfm2Reader.READS | SparseReader.READS | {"num_dense_layers", "use_expert_bias"}
    CORRECTION, ROTARY = "expert_bias", "pos_emb"

    def refusal(self, max_length: int) -> str | None:
        why = super().refusal(max_length)
        return why or (None if self.config.use_expert_bias else "its router has sigmoid scores without a correction")


SWAPS: dict[str, Any] = {
    "bamba": MAMBA,
    "mamba2": MAMBA,
    "falcon_h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
}
DECODING: dict[str, Any] = {
    "BambaForCausalLM": MambaReader,
    "Mamba2ForCausalLM": Mamba2Reader,
    "FalconH1ForCausalLM": FalconH1Reader,
    "NemotronHForCausalLM": NemotronHReader,
    "Lfm2ForCausalLM": Lfm2Reader,
    "Lfm2MoeForCausalLM": Lfm2MoeReader,
}
