"""Granite, Granite 4 and HyperCLOVA X: factors of the embeddings, of what each part adds to the stream, of scores and logits.

The decoder divides the whole stream by the factor m of its additions: x = m y, so that y grows by a part's unscaled output.
The norms, which alone read the stream, give the same for y with eps / m².

Granite 4 (GraniteMoeHybrid): Mamba-2 or attention, then an MLP with or without experts, with Granite's factors.

Placing swaps norms, layers of Mamba-2 and the loss; attention, MLPs and the loop over layers stay those of transformers.

HyperCLOVA X: Granite's factors, of which that of the logits multiplies, and norms after the parts of a block as well.

Placing swaps norms.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..layers.attention import Mask, Rope
from ..layers.block import normed_for
from .decoding import DenseWeights, Linear, Shape
from .hf_modules import SWAPS as LLAMA, HFCausalLM, HFStack, causal_lm, norm, stack
from .hybrids import MambaReader, mamba
from .mixtral import SparseCausalLM, SparseReader
from .reader import Reader, linear_of, parts_of
from .registry import Maker


def scaled_step(
    block: Any, factor: float, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None
) -> tuple[Tensor, Tensor]:
    """Run a block whose parts' outputs are multiplied by `factor` before they are added to the stream."""
    children = block._modules
    attention, mlp = children["self_attn"], children["mlp"]
    y, x = normed_for(attention, children["input_layernorm"], x, pending)
    y, x = normed_for(mlp, children["post_attention_layernorm"], x, attention.mix(y, rope, mask) * factor)
    return x, mlp.mix(y) * factor


class MultipliedStack(HFStack):
    embedding_multiplier: float

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Mask) -> Tensor:
        return super().run(x * self.embedding_multiplier, positions, attention_mask)

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None) -> tuple[Tensor, Tensor]:
        return scaled_step(block, block.residual_multiplier, x, pending, rope, mask)


class ScaledCausalLM(HFCausalLM):
    def scaled(self, x: Tensor) -> Tensor:
        return x / self.config.logits_scaling


GRANITE: dict[str, Maker] = LLAMA | {
    "Model": partial(stack, part=MultipliedStack),
    "ForCausalLM": partial(causal_lm, part=ScaledCausalLM),
}


class MultipliedReader(Reader):
    READS = frozenset({"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"})

    def refusal(self, max_length: int) -> str | None:
        if len({block.residual_multiplier for block in self.trunk.layers}) > 1 or not self.factor > 0:
            return "its layers' residual_multiplier are not one number above 0"
        return super().refusal(max_length)

    @property
    def factor(self) -> float:
        return self.trunk.layers[0].residual_multiplier

    def shape(self) -> Shape:
        embedded = self.trunk.embedding_multiplier / self.factor
        alone = self.config is self.model.config  # a model of images or sounds and text around it scales no logits
        return replace(super().shape(), embedded=embedded, logit_scale=1 / self.config.logits_scaling if alone else 1.0)


class GraniteHybridCausalLM(ScaledCausalLM, SparseCausalLM):
    pass


GRANITE_HYBRID: dict[str, Maker] = {
    "RMSNorm": norm,
    "MambaLayer": mamba,
    "ForCausalLM": partial(causal_lm, part=GraniteHybridCausalLM),
}


class GraniteHybridReader(MultipliedReader, MambaReader, SparseReader):
    NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
    FINAL, ROUTER, GATED = "norm", "router", ("gate_proj", "up_proj", "output_linear")
    READS = MultipliedReader.READS | MambaReader.READS | SparseReader.READS | {
        "shared_intermediate_size", "position_embedding_type",
    }  # fmt: skip

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.ROTATES = self.trunk.rotary_emb is not None

    def mlp_of(self, block: Any) -> Any:
        return block._modules.get("block_sparse_moe") or block.shared_mlp

    def mlp(self, block: Any) -> Any:
        weights, (gate, up) = super().mlp(block), self.gate_up(block.shared_mlp)
        if isinstance(weights, DenseWeights):
            return weights
        return replace(weights, shared=DenseWeights(None, gate, up, linear_of(block.shared_mlp.output_linear)))

    def gate_up(self, mlp: Any) -> list[Linear]:
        return parts_of(mlp.input_linear, [self.config.shared_intermediate_size] * 2)

    def scale(self, attention: Any) -> float:
        return attention.scaling


HYPERCLOVAX: dict[str, Maker] = {}


class PeriReader(MultipliedReader):
    NORMS = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    READS = MultipliedReader.READS | {"use_post_norm"}

    def shape(self) -> Shape:
        return replace(super().shape(), logit_scale=self.config.logits_scaling)

    def norm(self, module: Any) -> Any:
        return None if isinstance(module, nn.Identity) else super().norm(module)

    def norms(self, parent: Any, names: Sequence[str | None]) -> list[Any]:
        before, after = super().norms(parent, names)
        return [before, after and after._replace(eps=after.eps * self.factor**2)]  # which does not read the stream


SWAPS: dict[str, Any] = GRANITE | {"granitemoehybrid": GRANITE_HYBRID, "hyperclovax": HYPERCLOVAX}
DECODING: dict[str, Any] = {
    "ForCausalLM": MultipliedReader,
    "GraniteMoeHybridForCausalLM": GraniteHybridReader,
    "HyperCLOVAXForCausalLM": PeriReader,
}
