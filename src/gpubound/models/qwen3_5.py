"""Qwen3.5: three layers of the gated delta rule for each of attention, whose heads are gated; norms whose gain is 1 + weight.

Placing swaps norms, MLPs, layers of the delta rule and the loss; attention and the loop over layers stay those of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ..kernels.accumulate import join_rows
from ..kernels.decode_product import Norm
from ..kernels.delta_rule import DeltaShape
from ..layers.linear_product import format_of
from .decoding import AttentionWeights, Linear
from .hf_modules import HFShiftedNorm, mlp, norm, tried_causal_lm
from .hybrids import gated_delta
from .reader import HFAngles, linear_of, weight_of
from .recurrent import DeltaWeights, RecurrentReader
from .registry import Maker

INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

SWAPS: dict[str, Maker] = {
    "RMSNorm": partial(norm, part=HFShiftedNorm),
    "MLP": mlp,
    "GatedDeltaNet": partial(gated_delta, inputs=INPUTS),
    "ForCausalLM": tried_causal_lm,
}


class GridAngles(HFAngles):
    AXES = 3


class DeltaReader(RecurrentReader):
    OFFSET = 1.0
    ANGLES: ClassVar[type[HFAngles]] = GridAngles
    INPUTS: ClassVar[tuple[str, ...]] = INPUTS
    GROUPED = False
    ADJACENT = True
    READS = frozenset((
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "mrope_section", "mrope_interleaved",
    ))  # fmt: skip
    image_positions = False

    def refusal(self, max_length: int) -> str | None:
        if (why := super().refusal(max_length)) or self.activation() == "silu":
            return why
        return "its convolutions have another activation than silu"

    def attention(self, block: Any) -> Any:
        weights = super().attention(block)
        return replace(weights, gated=True) if isinstance(weights, AttentionWeights) else weights

    def mixer(self, block: Any) -> DeltaWeights:
        layer, common = self.attention_of(block), self.common(block)
        return DeltaWeights(
            **common | {"inputs": self.gates_joined(*common["inputs"])},
            a_log=layer._parameters["A_log"],
            dt=layer._parameters["dt_bias"],
            head_norm=Norm(weight_of(layer.norm), float(layer.norm.variance_epsilon), 0.0),
            shape=DeltaShape(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, self.GROUPED),
        )

    def gates_joined(self, *inputs: Linear) -> tuple[Linear, ...]:
        """Return the inputs with b and a as one layer where they are adjacent: a product has at most three."""
        *first, b, a = inputs
        weight = join_rows([b.weight.detach(), a.weight.detach()])
        plain = b.bias is None and a.bias is None and not (b.adapters or a.adapters)
        if len(first) < 2 or weight is None or not plain or format_of(b.weight).coded:
            return inputs
        return (*first, Linear(weight))

    def together(self, block: Any) -> list[list[Any]]:
        groups = super().together(block)
        if not self.mixes(block):
            return groups
        layers, half = [getattr(block.linear_attn, name) for name in self.INPUTS], len(self.INPUTS) // 2
        coded = any(format_of(linear_of(layer).weight).coded for layer in layers)
        return [part for part in ((layers[:half], layers[half:]) if coded else (layers,)) if len(part) > 1] + groups


DECODING: dict[str, Any] = {"ForCausalLM": DeltaReader}
