"""Qwen3.5, Qwen3-Next, Qwen2-VL to Qwen3-VL.

Qwen3.5: three layers of the gated delta rule for each of attention, whose heads are gated; norms whose gain is 1 + weight.

Placing swaps norms, MLPs, layers of the delta rule and the loss; attention and the loop over layers stay those of transformers.

Qwen3-Next, and Qwen3.5 with experts: the layers of Qwen3.5, and sparse MLPs with a shared expert, as Qwen2-MoE has.

Placing swaps norms and layers of the delta rule; all else stays that of transformers.

Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's text models, where an image's tokens have positions of a grid.

The tokens of a text have one position on all three axes, and so the angles of any other model.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..kernels.accumulate import join_rows
from ..kernels.decode_product import Norm
from ..kernels.recurrent import DeltaShape
from ..layers.linear_product import format_of
from .decoding import AttentionWeights, Linear
from .hf_modules import SWAPS as LLAMA, HFShiftedNorm, HFStack, attention, mlp, norm, stack, tried_causal_lm
from .hybrids import gated_delta
from .mixtral import SWAPS as MIXTRAL, SparseReader
from .reader import HFAngles, Reader, linear_of, weight_of
from .recurrent import DeltaWeights, RecurrentReader
from .registry import Maker, Swap

INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

QWEN3_5: dict[str, Maker] = {
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


GROUPED = ("in_proj_qkvz", "in_proj_ba")


def delta_layer(module: Any, stack: Any) -> Swap:
    grouped = hasattr(module, GROUPED[0])
    return gated_delta(module, stack, GROUPED if grouped else INPUTS, grouped)


QWEN3_NEXT: dict[str, Maker] = {"RMSNorm": partial(norm, part=HFShiftedNorm), "GatedDeltaNet": delta_layer}


class SparseDeltaReader(DeltaReader, SparseReader):
    READS = DeltaReader.READS | SparseReader.READS

    def mlp_norms(self, block: Any) -> list[Any]:
        """Return the norms around the MLP. The experts' kernels take a gain, which is a copy in fp32."""
        before, after = super().mlp_norms(block)
        gain = self.copies.of(weight_of(getattr(block, self.NORMS[2] or "")), lambda weight: 1 + weight.float())
        return [Norm(gain, before.eps, 0.0), after]


class NextReader(SparseDeltaReader):
    ANGLES = HFAngles
    INPUTS = GROUPED
    GROUPED = True


class GridStack(HFStack):
    def unable(self, kwargs: dict[str, Any]) -> str | None:
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 3:
            return "position_ids are those of a grid"
        return super().unable(kwargs)


QWEN_VL: dict[str, Maker] = LLAMA | {
    "Model": partial(stack, part=GridStack),
    # Qwen2-VL's and Qwen2.5-VL's names of the text model's parts; its MLP and Attention are those for images
    "Qwen2_5_VLRMSNorm": norm,
    "Qwen2MLP": mlp,
    "Qwen2_5_VLAttention": attention,
    "Qwen2VLRMSNorm": norm,
    "Qwen2VLAttention": attention,
}


class GridReader(Reader):
    READS = frozenset({"mrope_section", "mrope_interleaved"})
    image_positions = False


class SparseGridReader(SparseReader):
    READS = SparseReader.READS | GridReader.READS
    image_positions = False


SWAPS: dict[str, Any] = {
    "qwen3_5": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe": QWEN3_NEXT,
    "qwen2_5_vl": QWEN_VL,
    "qwen2_vl": QWEN_VL,
    "qwen3_vl": QWEN_VL,
    "qwen3_vl_moe": MIXTRAL,
}
DECODING: dict[str, Any] = {
    "Qwen3_5ForCausalLM": DeltaReader,
    "Qwen3NextForCausalLM": NextReader,
    "Qwen3_5MoeForCausalLM": SparseDeltaReader,
    "Qwen2_5_VLTextForCausalLM": GridReader,
    "Qwen2VLTextForCausalLM": GridReader,
    "Qwen3VLTextForCausalLM": GridReader,
    "Qwen3VLMoeTextForCausalLM": SparseGridReader,
}
