"""The model shapes that every benchmark uses, so that figures of different benchmarks speak of the same thing."""

from dataclasses import dataclass
from typing import Any

from gpubound import measure


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def matrix_params(self) -> int:
        """Weights that enter a matrix product for every token: linear layers and output head, not the embedding's lookup."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    def train_flops_per_token(self, seq: int) -> int:
        return measure.train_flops_per_token(self.matrix_params, self.layers, self.heads * self.head_dim, seq)

    def frozen_flops_per_token(self, seq: int) -> int:
        """Forward and dX: without the gradients of the weights, 2 operations each."""
        return self.train_flops_per_token(seq) - 2 * self.matrix_params


@dataclass(frozen=True)
class SparseShape(Shape):
    """A mixture of experts in every layer; `intermediate` is the width of one."""

    experts: int
    chosen: int  # of them, a token

    @property
    def matrix_params(self) -> int:
        dense = super().matrix_params - 3 * self.layers * self.hidden * self.intermediate
        return dense + self.layers * self.hidden * (3 * self.chosen * self.intermediate + self.experts)


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3, 49152, True),
    "350m": Shape(1024, 4096, 24, 16, 4, 32768, False),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256, True),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, False),
    "tiny": Shape(64, 128, 2, 4, 2, 256, True),
}


# Half as deep and half as many experts as Qwen3-30B-A3B: 7.6 billion weights, of which a token reads 1.2.
SPARSE = {"moe": SparseShape(2048, 768, 24, 16, 4, 32768, False, experts=64, chosen=8)}


@dataclass(frozen=True)
class Qwen3Shape(Shape):
    """Norms the queries and keys of each head, which may be wider than its part of the hidden size."""

    head: int

    @property
    def head_dim(self) -> int:
        return self.head


QWEN3 = {
    "0.6b": Qwen3Shape(1024, 3072, 28, 16, 8, 151936, True, head=128),
    "1.7b": Qwen3Shape(2048, 6144, 28, 16, 8, 151936, True, head=128),
    "tiny-qwen3": Qwen3Shape(64, 128, 2, 4, 2, 256, True, head=32),
}


def shape_of(name: str) -> Shape:
    return (SHAPES | SPARSE | QWEN3)[name]


def llama_config(shape: Shape, positions: int):
    """The Hugging Face configuration of `shape`; needs transformers (pip install 'gpubound[hf]')."""
    from transformers import LlamaConfig

    return LlamaConfig(intermediate_size=shape.intermediate, rope_theta=500000.0, **_common(shape, positions))


def qwen3_config(shape: Qwen3Shape, positions: int):
    """The Hugging Face configuration of `shape`."""
    from transformers import Qwen3Config

    return Qwen3Config(intermediate_size=shape.intermediate, rope_theta=1e6, **_common(shape, positions))


def qwen3_moe_config(shape: SparseShape, positions: int):
    """The Hugging Face configuration of `shape`, whose shares are of what was chosen, as in the models that are published."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
        norm_topk_prob=True,
        **_common(shape, positions),
    )


def _common(shape: Shape, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": positions,
        "head_dim": shape.head_dim,
        "use_cache": False,
    }
