"""Phi and Phi-3.

Phi: parallel blocks after one LayerNorm, an MLP without a gate, rotation of a part of each head, a head with a bias.

Placing swaps norms, attention and the loss; the loop over layers and the MLP stay those of transformers.

Phi-3: q, k, v in one weight and gate, up in another; rotation of a part of each head.

The kernels' GEMMs take the stacked weights without copies, and each layer's weight is a view.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..layers.attention import RopeTable
from ..layers.fused_weights import run_linear
from .hf_modules import HFMLP, SWAPS as LLAMA, HFAttention, HFStack, attention, mlp, stack, tried_causal_lm, unswapped
from .reader import ChangingAngles, Reader, UngatedReader
from .registry import Maker, Swap


class PhiAttention(HFAttention):
    def output(self, y: Tensor) -> Tensor:
        return run_linear(self._modules["dense"], y)


def phi_attention(module: Any, stack: Any) -> Swap:
    swap = attention(module, stack, PhiAttention)
    if module.qk_layernorm:
        swap.refusal = "it norms each head by a LayerNorm (qk_layernorm)"
    return swap


PHI: dict[str, Maker] = {"Attention": phi_attention, "ForCausalLM": tried_causal_lm}


class PhiReader(UngatedReader):
    NORMS = ("input_layernorm", None, None, None)
    READS = frozenset({"layer_norm_eps", "partial_rotary_factor"})
    FINAL, OUTPUT, LAYERS, PARALLEL = "final_layernorm", "dense", ("fc1", "fc2"), True


class PackedAttention(HFAttention):
    PROJECTIONS = ("qkv_proj",)

    num_key_value_heads: int

    @property
    def heads(self) -> int:  # type: ignore[override]  # the config's, which may change
        return self.config.num_attention_heads

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        return self.num_key_value_heads


class PackedMLP(HFMLP):
    PROJECTIONS = ("gate_up_proj",)


class Phi3Stack(HFStack):
    def changed_below(self) -> str | None:
        for layer in self.layers._modules.values() if self.training else ():
            if any(isinstance(part, nn.Dropout) and part.p and part.training for part in layer._modules.values()):
                return "its blocks have dropout, which the loop does not apply"
        return super().changed_below()


def phi3_stack(module: Any, _: Any) -> Swap:
    swap = stack(module, None, Phi3Stack)
    if module.rotary_emb.rope_type == "longrope":  # one set of frequencies for short batches, one for long ones
        swap.attributes["table"] = RopeTable(ChangingAngles(module.rotary_emb))
        swap.refusal = unswapped(module, Phi3Stack)
    if module.config.resid_pdrop > 0:
        swap.refusal = f"its blocks have dropout (resid_pdrop {module.config.resid_pdrop}), which the loop does not apply"
    return swap


PHI3: dict[str, Maker] = LLAMA | {
    "MLP": partial(mlp, part=PackedMLP),
    "Attention": partial(attention, part=PackedAttention),
    "Model": phi3_stack,
    "ForCausalLM": tried_causal_lm,
}


SWAPS: dict[str, Any] = {"phi": PHI, "phi3": PHI3}
DECODING: dict[str, Any] = {"PhiForCausalLM": PhiReader, "Phi3ForCausalLM": Reader}
