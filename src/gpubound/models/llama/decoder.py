"""The decoder: a Llama-shaped language model over the library's layers.

Grouped-query attention, rotary positions, RMSNorm and a gated MLP, with the options that set Llama, Mistral, Qwen2, Qwen3 and
SmolLM apart: biases on q, k and v, normed q and k heads, tied embeddings. With causal=False it is a masked diffusion model, as
LLaDA and Dream are. Parameters are named as Hugging Face names them, so checkpoint.py moves a checkpoint in or out without
renaming (LLaDA has other names: storing.py).

Legend: B batch, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ...kernels.dispatch import Call
from ...kernels.norms import norm_shape
from ...layers.attention import Angles, Attention, Llama3Angles, Mask, RopeTable, RotaryAngles, turn_calls
from ...layers.block import MLP, Block, RMSNorm, gated_calls, run_blocks
from ...layers.embedding_and_head import embedding, look_up
from ..decoding import Shape
from ..language_model import LanguageModel
from ..reader import Reader

BOTH_DIRECTIONS = "its tokens attend to later tokens (causal=False)"  # why a model does not generate token by token
REQUIRED: Any = None  # default of required fields, so that __post_init__ names a missing one: dataclasses raise a TypeError


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Decoder. What follows from it (head_dim, counts) is computed here and nowhere else."""

    hidden: int = REQUIRED
    intermediate: int = REQUIRED
    layers: int = REQUIRED
    heads: int = REQUIRED
    kv_heads: int = REQUIRED
    vocabulary: int = REQUIRED
    tied: bool = False
    head_width: int | None = None  # None: hidden / heads
    rope_theta: float = 10000.0
    rope_factor: float = 1.0  # Llama 3.1's rope scaling, "llama3" (layers/attention.py Llama3Angles); 1: none
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_positions: int = 8192
    eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 4096  # the longest sequence it is meant for; written to HF's config, not a limit of the code
    causal: bool = True  # False: attention in both directions, for masked diffusion
    shifted: bool = False  # with causal=False: a token is predicted at the position before it, as Dream does

    def __post_init__(self) -> None:
        kind = type(self).__name__
        self._check_types()
        for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary", "positions", "rope_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{kind}: {name}: got {getattr(self, name)}, wanted 1 or more.")
        if self.hidden % self.heads and self.head_width is None:
            raise ValueError(f"{kind}: hidden {self.hidden} is not a multiple of heads {self.heads}; give head_width.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{kind}: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; choose one that divides it."
            )
        if self.rope_low >= self.rope_high:
            raise ValueError(f"{kind}: rope_low: got {self.rope_low}, wanted a number below rope_high, {self.rope_high}.")
        if self.shifted and self.causal:
            raise ValueError(
                f"{kind}: shifted: got True, but a causal model predicts the next token anyway; give causal=False."
            )

    def _check_types(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), get_args(field.type) or (field.type,)
            fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
            if not fits or (isinstance(value, bool) and bool not in kinds) or (float in kinds and not math.isfinite(value)):
                wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise ValueError(f"{type(self).__name__}: {field.name}: got {value!r}, wanted a value of type {wanted}.")
        for name in ("eps", "rope_theta", "rope_factor", "rope_low", "head_width"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{type(self).__name__}: {name}: got {value!r}, wanted a number above 0.")

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def angles(self) -> RotaryAngles:
        if self.rope_factor == 1:
            return RotaryAngles(self.head_dim, self.rope_theta)
        scaling = self.rope_factor, self.rope_low, self.rope_high, self.rope_positions
        return Llama3Angles(self.head_dim, self.rope_theta, *scaling)

    @property
    def product_parameters(self) -> int:
        """The number of parameters that every token is multiplied by. The embedding is a lookup and does not count."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden


PRESETS = {
    "tiny": DecoderConfig(64, 128, 2, 4, 2, 256, tied=True),
    "10m": DecoderConfig(256, 768, 10, 4, 2, 8192, tied=True),
    "135m": DecoderConfig(576, 1536, 30, 9, 3, 49152, tied=True),
    "350m": DecoderConfig(1024, 4096, 24, 16, 4, 32768),
    "1b": DecoderConfig(2048, 8192, 16, 32, 8, 128256, tied=True, rope_theta=500000.0),
    "8b": DecoderConfig(4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
    "1m": DecoderConfig(128, 384, 4, 4, 2, 1024, tied=True),  # of the demo: two CPU cores teach it some Python in two minutes
}


class Trunk(nn.Module):
    """Everything below the head: token ids (B, T) to the last hidden state (B, T, hidden)."""

    def __init__(self, config: DecoderConfig, device=None, dtype=None) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"bias": config.qkv_bias, "qk_norm": config.eps if config.qk_norm else None}
        options |= {"causal": config.causal}
        self.embed_tokens = embedding(config.vocabulary, config.hidden, **where)
        self.layers = nn.ModuleList(
            Block(
                Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, **options, **where),
                MLP(config.hidden, config.intermediate, **where),
                config.hidden,
                config.eps,
                **where,
            )
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.eps, **where)
        self.rope = RopeTable(config.angles)
        self.shifted = config.shifted

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Mask = None) -> Tensor:
        x, rope = self.embed(input_ids), self.rope.of(input_ids, position_ids)
        x = run_blocks(self.layers, self.norm, x, rope, mask)
        return torch.cat([x[:, :1], x[:, :-1]], 1) if self.shifted else x

    def embed(self, input_ids: Tensor) -> Tensor:
        return look_up(self.embed_tokens, input_ids)


class OwnReader(Reader):
    """Reader of Decoder."""

    def refusal(self, max_length: int) -> str | None:
        return self.model.undecoded()

    def shape(self) -> Shape:
        return Shape(self.config.hidden, self.config.vocabulary)

    def heads(self, attention: Any) -> tuple[int, int]:
        return self.config.heads, self.config.kv_heads

    def scale(self, attention: Any) -> float:
        return attention.head_dim**-0.5

    def angles(self) -> list[Angles]:
        return [self.config.angles]

    def activation(self) -> str:
        return "silu"


class Decoder(LanguageModel):
    """A Llama-like language model: `Decoder(PRESETS["10m"])`. A call gives logits. `loss` never holds the whole logits."""

    CONFIG, TRUNK, reader = DecoderConfig, Trunk, OwnReader

    def undecoded(self) -> str | None:
        return super().undecoded() if self.config.causal else BOTH_DIRECTIONS

    def unpacked(self) -> str | None:
        return "it predicts a token at the position before it (shifted=True)" if self.config.shifted else None

    def calls(self) -> Iterator[Call]:
        c = self.config
        yield from ((op, norm_shape(c.hidden, self.model.norm.weight)) for op in RMSNorm.OPS)
        yield from gated_calls("silu", c.intermediate)
        yield from turn_calls(c.heads, c.kv_heads, c.head_dim, c.head_dim // 2, c.qk_norm)
