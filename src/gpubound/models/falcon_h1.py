"""Falcon-H1: attention and Mamba-2 side by side in every block, on the same normed stream, and factors of what they multiply.

The decoder reads a block as two layers, Mamba-2, and attention with the MLP. No product needs its factor. With f of the gate
and d of the MLP's output, silu(f gate) up d is silu(gate') up' d / f for a norm times f, and the stream is divided by d / f, as
Granite's (granite.py). The other norm has attention's factors, which the scores take back. Those of Mamba-2 are in the taps of
its convolution and in its step.

Placing swaps norms, MLPs, attention, layers of Mamba-2 and the loss; the loop over layers stays that of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .decoding import NoWeights, Shape
from .hf_modules import HFMLP, HFAttention, HFCausalLM, attention, causal_lm, mlp, norm
from .mamba import MambaReader
from .reader import weight_of
from .recurrent import MambaWeights
from .recurrent_modules import HFMamba, mamba
from .registry import Maker, Swap


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


SWAPS: dict[str, Maker] = {
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
        factors = [*c.mlp_multipliers, *c.ssm_multipliers, c.attention_in_multiplier, c.attention_out_multiplier]
        if not all(factor > 0 for factor in factors):
            return "one of its multipliers is not above 0"
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


DECODING: dict[str, Any] = {"ForCausalLM": FalconH1Reader}
