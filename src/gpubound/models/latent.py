"""Multi-head latent attention, whose cache holds one latent a token: DeepSeek-V2 and V3, A.X-K1, GLM-4-MoE-Lite, Youtu,
MiniCPM3 and Mistral 4; and Ministral 3, of which Mistral 4 has the queries.

DeepSeek-V3 is Kimi-K2's layout, too. Experts are read as those of models/mixtral.py. DeepSeek-V2 chooses them by a softmax,
with groups ranked by the best of each.

MiniCPM3: latent attention, with factors of the embeddings, of what each part adds to the stream, and of the logits.

The decoder divides the stream by the factor of its additions, as models/granite.py does.

Ministral 3: Mistral with queries that grow with the logarithm of their position, beyond the length of its first training.

In a step of the decoder nothing scales the queries, so its texts end where the scale begins.

Mistral 4: DeepSeek-V3's latent attention with Ministral 3's queries, and experts chosen by a softmax.

Placing replaces norms, MLPs and the loss. Attention, whose queries grow with their position, and its loop stay transformers'.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import rope
from ..kernels.experts import ExpertRouting
from ..kernels.rope import apart, together
from ..layers.attention import Mask, Rope, RopeTable
from ..layers.block import MLP, must_be_called, normed_for
from ..layers.fused_weights import Kernels, run_linear
from ..layers.linear_product import format_of
from .decoding import ExpertWeights, LatentAttentionWeights, Shape
from .granite import ScaledCausalLM, scaled_step
from .hf_modules import SWAPS as LLAMA, HFAttention, HFNorm, HFStack, attention, causal_lm, mlp, norm, stack
from .mixtral import SparseReader, sparse_causal_lm
from .reader import HFAngles, Reader, linear_of
from .registry import Maker, Swap


class HFLatentAttention(HFAttention):
    """Latent attention by expanded keys and values, with one product of x: queries, or what they are made of, and latents."""

    PROJECTIONS: tuple[str, ...]
    interleaved: bool  # whether pairs (2i, 2i + 1) are rotated
    complex_angles: bool  # whether the module gets those, as DeepSeek-V2, which also leaves pairs of keys in their order

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def forward(  # type: ignore[override]
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, *, cache=None, **kwargs
    ):
        cache = past_key_values if cache is None else cache
        if cache is None or self.unable(kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs)
        q, latent, key = self.turned(hidden_states, self.angles(position_embeddings))
        if self.complex_angles:
            pairs, width = self.qk_rope_head_dim // 2, self.qk_nope_head_dim
            q, key = torch.cat([q[..., :width], together(q[..., width:], pairs)], -1), together(key, pairs)
        latent, key = cache.update(latent.unsqueeze(1), key.transpose(1, 2), self.layer_idx)
        k, v = (t.transpose(1, 2) for t in self.expanded(latent[:, 0], key.transpose(1, 2)))
        y, scores = ALL_ATTENTION_FUNCTIONS["sdpa"](self, q.transpose(1, 2), k, v, attention_mask, scaling=self.scaling)
        return self.output(y.flatten(-2)), scores

    def project(self, x: Tensor, turn: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        assert turn is not None
        q, latent, key = self.turned(x, turn)
        return q, *self.expanded(latent, key)

    def turned(self, x: Tensor, turn: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, H, D), the normed latents (B, T, R) and the rotated keys that all heads share (B, T, 1, 2P)."""
        children: dict[str, Any] = self._modules
        low, latent = self.products(x)
        latent, key = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        q = run_linear(children["q_b_proj"], children["q_a_layernorm"](low)) if self.PROJECTIONS[0] == "q_a_proj" else low
        q = q.unflatten(-1, (self.num_heads, -1))
        plain, turning = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        pair = turning, key.unsqueeze(-2)
        if self.interleaved:
            pair = apart(turning, self.qk_rope_head_dim // 2), apart(pair[1], self.qk_rope_head_dim // 2)
        turning, key = rope(*pair, *turn)
        return torch.cat([plain, turning], -1), children["kv_a_layernorm"](latent), key

    def expanded(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, T, H, ...) of latents (B, T, R) and shared keys (B, T, 1, 2P)."""
        both = run_linear(self._modules["kv_b_proj"], latent).unflatten(-1, (self.num_heads, -1))
        plain, v = both.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        return torch.cat([plain, key.expand(-1, -1, self.num_heads, -1)], -1), v

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention with values as wide as keys, which flash attention wants."""
        padded = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
        y, scores = super().attended(q, k, padded, mask, cached, **kwargs)
        return y[..., : v.shape[-1]], scores

    def angles(self, embeddings: Any) -> Rope:
        if not self.complex_angles:
            return super().angles(embeddings)
        turns = embeddings[0] if len(embeddings) == 1 else embeddings
        return turns.real.contiguous(), turns.imag.contiguous()

    def fused_kernels(self) -> Kernels:
        return f"{self.product_words('q, latent')}; {{}}; SDPA", ("rope",)


def is_complex(config: Any) -> bool:
    return config.model_type == "deepseek_v2"


def latent_attention(module: Any, stack: Any) -> Swap:
    config, width = module.config, module.qk_rope_head_dim
    swap = attention(module, stack, HFLatentAttention, calls=(("rope", (module.num_heads, 1, width, width // 2)),))
    swap.attributes |= {
        "PROJECTIONS": ("q_proj" if module.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa"),
        "interleaved": is_complex(config) or bool(getattr(config, "rope_interleave", False)),
        "complex_angles": is_complex(config),
    }
    return swap


class LatentStack(HFStack):
    """Stack of blocks whose MLPs may be experts, which are called."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFNorm,
        "self_attn": HFLatentAttention,
        "post_attention_layernorm": HFNorm,
    }
    output = MoeModelOutputWithPast

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None) -> tuple[Tensor, Tensor]:
        children = block._modules
        attention, mlp = children["self_attn"], children["mlp"]
        y, x = normed_for(attention, children["input_layernorm"], x, pending)
        y, x = normed_for(mlp, children["post_attention_layernorm"], x, attention.mix(y, rope, mask))
        return x, mlp.mix(y) if isinstance(mlp, MLP) and not must_be_called(mlp) else mlp(y)

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        asked = getattr(self.config, "output_router_logits", False)
        return "the config asks for the router's logits" if asked else super().unable(kwargs)


def latent_stack(module: Any, _: Any) -> Swap:
    swap = stack(module, None, LatentStack)
    if is_complex(module.config):
        swap.attributes["table"] = RopeTable(ComplexAngles(module.rotary_emb))
    return swap


LATENT: dict[str, Maker] = {
    "RMSNorm": norm,
    "MLP": mlp,
    "Attention": latent_attention,
    "Model": latent_stack,
    "ForCausalLM": sparse_causal_lm,
}


class LatentReader(SparseReader):
    READS = SparseReader.READS | {
        "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "rope_interleave",
        "mlp_layer_types", "topk_method", "embedding_initializer_range",
    }  # fmt: skip

    def refusal(self, max_length: int) -> str | None:
        for number, block in enumerate(self.blocks):
            if format_of(linear_of(block.self_attn.kv_b_proj).weight).coded:
                return (
                    f"model.layers.{number}.self_attn.kv_b_proj is quantised, of which a step multiplies each head's two parts"
                )
        return super().refusal(max_length)

    def head_dim(self, attention: Any) -> int:
        return attention.qk_head_dim

    def attention(self, block: Any) -> LatentAttentionWeights:  # type: ignore[override]
        attention, (before,) = self.attention_of(block), self.norms(block, self.NORMS[:1])
        q_norm, latent_norm = self.norms(attention, ("q_a_layernorm", "kv_a_layernorm"))
        low = attention.q_lora_rank is not None
        return LatentAttentionWeights(
            norm=before,
            q=linear_of(attention.q_b_proj if low else attention.q_proj),
            latent=linear_of(attention.kv_a_proj_with_mqa),
            latent_norm=latent_norm,
            up=linear_of(attention.kv_b_proj)._replace(adapters=()),  # a step multiplies the weight, and would add none
            o=linear_of(attention.o_proj),
            head_dim=self.head_dim(attention),
            scale=self.scale(attention),
            interleaved=self.interleaved,
            q_down=linear_of(attention.q_a_proj) if low else None,
            q_norm=q_norm,
        )

    def mlp(self, block: Any) -> Any:
        weights, after = super().mlp(block), self.norms(block.mlp, ("post_mlp_layernorm",))[0]  # of A.X-K1's experts
        return weights if after is None else replace(weights, post_norm=after)

    @property
    def interleaved(self) -> bool:
        return bool(self.config.rope_interleave)

    def together(self, block: Any) -> list[list[Any]]:
        attention, ungrouped = self.attention_of(block), self.mlp_of(block)
        q = attention.q_proj if attention.q_lora_rank is None else attention.q_a_proj
        mlp = [[ungrouped.gate_proj, ungrouped.up_proj]] if hasattr(ungrouped, "gate_proj") else []
        return [[q, attention.kv_a_proj_with_mqa], *mlp]


class ComplexAngles(HFAngles):
    """Angles of a rotary module that returns complex numbers."""

    def __call__(self, positions: Tensor) -> Rope:
        like = torch.empty(0, device=positions.device, dtype=torch.float32)
        turns = self.rotary(like, positions.reshape(-1, positions.shape[-1])).reshape(*positions.shape, -1)
        return turns.real.float(), turns.imag.float()


class DeepseekV2Reader(LatentReader):
    ANGLES = ComplexAngles
    interleaved = True

    def mlp(self, block: Any) -> Any:
        weights = super().mlp(block)
        return replace(weights, normalise=False) if isinstance(weights, ExpertWeights) else weights

    def routing(self, block: Any) -> ExpertRouting | None:
        router = block.gate
        groups = router.topk_method == "group_limited_greedy"
        if not groups and router.routed_scaling_factor == 1:
            return None
        count, kept = (router.num_group, router.topk_group) if groups else (1, 1)
        return ExpertRouting(None, False, float(router.routed_scaling_factor), count, kept, best=1)


class ResidualScaledStack(LatentStack):
    """Stack of blocks that multiply what each part adds to the stream."""

    @staticmethod
    def step(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Mask = None) -> tuple[Tensor, Tensor]:
        return scaled_step(block, block.residual_scale, x, pending, rope, mask)


MINICPM3: dict[str, Maker] = LATENT | {
    "Model": partial(stack, part=ResidualScaledStack),
    "ForCausalLM": partial(causal_lm, part=ScaledCausalLM),
}


class MiniCPM3Reader(LatentReader):
    READS = LatentReader.READS | {"scale_emb", "scale_depth", "dim_model_base"}
    interleaved = False

    @property
    def factor(self) -> float:
        return self.blocks[0].residual_scale

    def refusal(self, max_length: int) -> str | None:
        depth = self.config.scale_depth
        return super().refusal(max_length) if depth > 0 else f"its scale_depth={depth!r} is not above 0"

    def shape(self) -> Shape:
        return replace(super().shape(), logit_scale=1 / self.config.logits_scaling)

    def attention(self, block: Any) -> LatentAttentionWeights:  # type: ignore[override]
        weights = super().attention(block)
        others: dict[str, Any] = {name: getattr(weights, name) for name in ("q_norm", "latent_norm")}  # not of the stream
        return replace(
            weights, **{name: norm and norm._replace(eps=norm.eps * self.factor**2) for name, norm in others.items()}
        )


BETA = "llama_4_scaling_beta"


def first_scaled(config: Any) -> int:
    """Return the first position whose queries are scaled."""
    return config.rope_parameters["original_max_position_embeddings"]


class ScaledAttention(HFAttention):
    """`mix` takes the angles and, where some may be scaled, the positions."""

    def mix(self, x: Tensor, rope: Any, mask: Mask = None) -> Tensor:
        cos, sin, positions = rope
        q, k, v = (t.transpose(1, 2) for t in self.project(x, (cos, sin)))
        y, _ = self.attended(q, k, v, mask, position_ids=positions)
        return self.output(y.flatten(-2))

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, position_ids: Tensor | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        if position_ids is not None:
            often = torch.floor(position_ids / first_scaled(self.config))
            scale = 1 + self.config.rope_parameters[BETA] * torch.log(1 + often)
            q = q * scale[..., None, :, None].to(q.dtype)
        return super().attended(q, k, v, mask, cached, **kwargs)


class ScaledStack(HFStack):
    def angles(self, x: Tensor, positions: Tensor | None) -> Any:
        if positions is None and x.shape[1] > first_scaled(self.config):
            positions = torch.arange(x.shape[1], device=x.device)
        return *super().angles(x, positions), positions


MINISTRAL3: dict[str, Maker] = LLAMA | {
    "Attention": partial(attention, part=ScaledAttention),
    "Model": partial(stack, part=ScaledStack),
}


class ScaledReader(Reader):
    READS = frozenset({BETA})

    def refusal(self, max_length: int) -> str | None:
        first = first_scaled(self.config)
        if self.config.rope_parameters.get(BETA) and max_length > first:
            return f"its queries are scaled beyond {first} tokens, and max_length is {max_length}"
        return super().refusal(max_length)


MISTRAL4: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "ForCausalLM": sparse_causal_lm}


class Mistral4Reader(ScaledReader, LatentReader):
    READS = LatentReader.READS | ScaledReader.READS

    def refusal(self, max_length: int) -> str | None:
        if self.config.n_group > 1:
            return f"its experts are in {self.config.n_group} groups, and chosen by a softmax"
        return super().refusal(max_length)

    def routing(self, block: Any) -> ExpertRouting | None:
        router = block.gate
        factor = float(router.routed_scaling_factor)
        return None if factor == 1 else ExpertRouting(None, bool(router.norm_topk_prob), factor)


SWAPS: dict[str, Any] = LATENT | {"minicpm3": MINICPM3, "ministral3": MINISTRAL3, "mistral4": MISTRAL4}
DECODING: dict[str, Any] = {
    "DeepseekV2ForCausalLM": DeepseekV2Reader,
    "ForCausalLM": LatentReader,
    "MiniCPM3ForCausalLM": MiniCPM3Reader,
    "Ministral3ForCausalLM": ScaledReader,
    "Mistral4ForCausalLM": Mistral4Reader,
}
