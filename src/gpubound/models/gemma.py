"""The Gemma models: 1, 2, 3, 3n, 4, and VaultGemma.

Gemma, Gemma 2 and VaultGemma have scaled embeddings, norms whose gain is 1 + weight, and an MLP gated by gelu. Gemma 2 has
norms before and after each part of a block, and a window in every other layer; VaultGemma has no norms after the parts. The
scores of both are capped, score -> cap · tanh(score / cap), which SDPA does not support. A placed model therefore calls
transformers' attention function that the config names, between the fused projections with RoPE and the output projection.
(With SDPA, transformers omits the cap, and so does the placed model.) The logits are capped too, so the loss stays that of
transformers.

Gemma 3 has normed heads, no cap on scores, and other angles for layers with a window.

Gemma 4 has normed values, too, heads that belong to a layer, and a factor after each block. Layers without a window have wider
heads, and keys that are values if `attention_k_eq_v`. The last layers may share the keys and values of earlier ones, and a
block may have a separate input (decode/weights.py).

Gemma 3n has the attention of Gemma 4, and MLPs whose gates may keep their largest values alone. Each block mixes four streams
(AltUp), one of which attention and the MLP read. No kernel of a step does, so a decoder runs the model's own forward.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import rope
from ..kernels.decode_product import Norm
from ..kernels.gated import gated
from ..layers.attention import Attention, Mask, Rope
from ..layers.block import run_blocks
from ..layers.fused_weights import Kernels, hooked, run_linear
from ..layers.packed_attention import Segments
from .decoding import (
    AttentionWeights,
    DenseAndExpertWeights,
    ExpertWeights,
    LayerInputs,
    LayerInputWeights,
    LayerWeights,
)
from .hf_modules import HFMLP, HFAttention, HFNorm, HFShiftedNorm, HFStack, attention, mlp, norm, stack, tried_causal_lm
from .language_model import SEGMENTS
from .layer_types import TypedStack, typed_attention, typed_stack
from .reader import ACTIVATION_NAMES, Reader, layer_type, linear_of, text_stack, weight_of
from .registry import BATCH, TOKENS, Case, Maker, Swap, cache_word, noise, random_case, role_of


class CappedAttention(HFAttention):
    IMPLEMENTATIONS = ("eager",)

    attn_logit_softcapping: float | None
    sliding_window: int | None

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        """Return why the class was patched; transformers' function supports every argument of its module."""
        return self.patched()

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        eager = sys.modules[self.original.__module__].eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        if isinstance(mask, Segments):
            mask = mask.bias(q.dtype, self.sliding_window)
        kwargs |= {"sliding_window": self.sliding_window, **self.beyond_sdpa()}
        return function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def beyond_sdpa(self) -> dict[str, Any]:
        """Return the arguments of transformers' function that SDPA lacks."""
        return {"softcap": self.attn_logit_softcapping}

    def fused_kernels(self) -> Kernels:
        words, ops = Attention.fused_kernels(self)
        return words.replace("SDPA", "transformers' eager attention (it caps the scores)"), ops


def run_sandwich(
    block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    children = block._modules
    y, x = children["input_layernorm"].add(x, pending)
    y = children["post_attention_layernorm"](children["self_attn"].mix(y, rope, mask))
    y, x = children["pre_feedforward_layernorm"].add(x, y)
    return x, children["post_feedforward_layernorm"](children["mlp"].mix(y))


def run_vault(block: Any, x: Tensor, pending: Tensor | None, rope: Rope, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    children = block._modules
    y, x = children["input_layernorm"].add(x, pending)
    y, x = children["pre_feedforward_layernorm"].add(x, children["self_attn"].mix(y, rope, mask))
    return x, children["mlp"].mix(y)


class VaultStack(TypedStack):
    """Stack of blocks with norms before each part."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFShiftedNorm,
        "self_attn": HFAttention,
        "pre_feedforward_layernorm": HFShiftedNorm,
        "mlp": HFMLP,
    }

    step = staticmethod(run_vault)


class SandwichStack(TypedStack):
    """Stack of blocks with norms before and after each part."""

    PARTS: ClassVar[dict[str, type]] = VaultStack.PARTS | {
        "post_attention_layernorm": HFShiftedNorm,
        "post_feedforward_layernorm": HFShiftedNorm,
    }

    step = staticmethod(run_sandwich)


class ShiftedStack(HFStack):
    """Gemma's stack: Llama's blocks with other norms."""

    PARTS: ClassVar[dict[str, type]] = HFStack.PARTS | {
        "input_layernorm": HFShiftedNorm,
        "post_attention_layernorm": HFShiftedNorm,
    }


def gemma_stack(module: Any, _: Any) -> Swap:
    """Return the Swap of a stack of one of the three kinds of blocks, which differ in their norms."""
    names = module.layers[0]._modules
    if "pre_feedforward_layernorm" not in names:
        return stack(module, None, ShiftedStack)
    return typed_stack(module, None, SandwichStack if "post_feedforward_layernorm" in names else VaultStack)


def capped_attention(module: Any, stack: Any) -> Swap:
    capped = hasattr(module, "attn_logit_softcapping") and module.config._attn_implementation == "eager"
    return attention(module, stack, CappedAttention if capped else HFAttention)


GEMMA: dict[str, Maker] = {
    "RMSNorm": partial(norm, part=HFShiftedNorm),
    "MLP": mlp,
    "Attention": capped_attention,
    "Model": gemma_stack,
    "ForCausalLM": tried_causal_lm,
}


class GemmaReader(Reader):
    OFFSET = 1.0


class SandwichReader(GemmaReader):
    NORMS: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    READS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping"})

    def cap(self, attention: Any) -> float:
        """Return the cap of the scores, which transformers' SDPA omits."""
        capped = self.config._attn_implementation != "sdpa"
        return (capped and attention.attn_logit_softcapping) or 0.0


class VaultReader(SandwichReader):
    NORMS = ("input_layernorm", None, "pre_feedforward_layernorm", None)


def read(model: Any) -> Reader:
    names = text_stack(model).layers[0]._modules
    if "pre_feedforward_layernorm" not in names:
        return GemmaReader(model)
    return SandwichReader(model) if "post_feedforward_layernorm" in names else VaultReader(model)


GEMMA3: dict[str, Maker] = {role: GEMMA[role] for role in ("RMSNorm", "MLP", "ForCausalLM")}
GEMMA3 |= {"Attention": typed_attention, "TextModel": partial(typed_stack, part=SandwichStack)}


class NormedReader(SandwichReader):
    READS = frozenset({"query_pre_attn_scalar"})  # not the cap, which its attention has as an attribute and does not apply


EXPERTS, ROUTER = {"gate_up_proj", "down_proj"}, {"scale", "per_expert_scale"}  # parameters
Shared = dict[Any, tuple[Tensor, Tensor]]  # keys and values (B, K, L, D) that later layers read, most often by type of layer


class HFPlainNorm(HFNorm):
    """Norm without weights."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if why := self.patched():
            return self.delegate(why, hidden_states)
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], None, self.eps)

    def fused_kernels(self) -> Kernels:
        return "torch's fused norm", ()

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def any_norm(module: Any, stack: Any) -> Swap:
    if module.with_scale:
        return norm(module, stack)
    return Swap(HFPlainNorm, (), {"delegated": Counter()}, (random_case(module, (BATCH, TOKENS, 64)),))


class SharedAttention(HFAttention):
    """Attention with normed values, over the module's keys, which may be the values too, or over those of an earlier layer."""

    is_kv_shared_layer: bool
    store_full_length_kv: bool

    def forward(  # type: ignore[override]  # the module's own signature
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        shared_kv_states=None,
        past_key_values=None,
        *,
        cache=None,
        **kwargs,
    ):
        cache = past_key_values if cache is None else cache
        if why := self.unable(kwargs):
            kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            kwargs |= {"shared_kv_states": shared_kv_states, cache_word(self.forwards[1]): cache}
            return self.delegate(why, hidden_states, **kwargs)
        mask = kwargs.pop(SEGMENTS, attention_mask)
        q, k, v = self.heads_of(hidden_states, self.angles(position_embeddings), shared_kv_states, cache)
        y, scores = self.attended(q, k, v, mask, cache is not None, **kwargs)
        return self.output(y.flatten(-2)), scores

    def mix(self, x: Tensor, turn: Rope, mask: Any, shared: Shared) -> Tensor:  # type: ignore[override]
        y, _ = self.attended(*self.heads_of(x, turn, shared), mask)
        return self.output(y.flatten(-2))

    def heads_of(self, x: Tensor, turn: Rope, shared: Shared, cache: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, T, D), k and v (B, K, L, D)."""
        children: dict[str, Any] = self._modules
        q, *own = (rows.unflatten(-1, (-1, self.head_dim)) for rows in self.products(x))
        q = children["q_norm"](q)
        if own:
            q, k = rope(q, children["k_norm"](own[0]), *turn)
            k, v = k.transpose(1, 2), children["v_norm"](own[-1]).transpose(1, 2)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
        else:
            q, _ = rope(q, q[..., :1, :], *turn)
            k, v = shared[share_of(self)]
        if self.store_full_length_kv:
            shared[share_of(self)] = k, v
        return q.transpose(1, 2), k, v


def share_of(attention: Any) -> Any:
    """Return the key of a layer's keys and values among those that layers share: the type of the layer.

    Before transformers 5.23, Gemma 3n's key is the number of the layer that has them.
    """
    own = vars(attention)
    if "kv_shared_layer_index" not in own:
        return layer_type(attention)
    return own["layer_idx"] if own["kv_shared_layer_index"] is None else own["kv_shared_layer_index"]


def shared_attention(module: Any, stack: Any) -> Swap:
    """Return the Swap of an attention module of any of the three kinds."""
    swap = attention(module, stack, SharedAttention, partial(stack.rotary_emb, layer_type=layer_type(module)))
    names = tuple(name for name in ("q_proj", "k_proj", "v_proj") if module._modules.get(name) is not None)
    swap.attributes["PROJECTIONS"] = names
    swap.cases = tuple(partial(_with_keys, module, case) for case in swap.cases)
    return swap


def _with_keys(module: Any, case: Case, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """Add the keys and values that a layer may share to a case."""
    x, keywords = case(dtype)
    shape = len(x), module.config.num_attention_heads // module.num_key_value_groups, x.shape[1], module.head_dim
    keys = (noise(shape, x, 1), noise(shape, x, 2)) if module.is_kv_shared_layer else None
    return x, keywords | {"shared_kv_states": {} if keys is None else {share_of(module): keys}}


def run_with_input(
    block: Any,
    x: Tensor,
    pending: Tensor | None,
    rope: dict[str, Rope],
    mask: dict[str, Any],
    inputs: tuple[Tensor, ...] | None = None,
    shared: Shared | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a block. inputs: of each layer, (B, T, width), in a model whose layers have some"""
    children, kind = block._modules, layer_type(block._modules["self_attn"])
    y, x = children["input_layernorm"].add(x, pending)
    y = children["post_attention_layernorm"](children["self_attn"].mix(y, rope[kind], mask[kind], shared))
    y, x = children["pre_feedforward_layernorm"].add(x, y)
    y = children["mlp"].mix(y)
    if "experts" in children:
        flat = x.flatten(0, 1)
        _, shares, ids = children["router"](flat)
        routed = children["experts"](children["pre_feedforward_layernorm_2"](flat), ids, shares).view_as(x)
        y = children["post_feedforward_layernorm_1"](y) + children["post_feedforward_layernorm_2"](routed)
    y = children["post_feedforward_layernorm"](y)
    if inputs is not None:
        x = x + y
        h = gated(children["mlp"].activation, run_linear(children["per_layer_input_gate"], x), inputs[block.layer_idx])
        y = children["post_per_layer_input_norm"](run_linear(children["per_layer_projection"], h))
    return (x + y) * block.layer_scalar, None


class SharingStack(TypedStack):
    """Stack of blocks that may share keys and values and have separate inputs."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFNorm,
        "self_attn": SharedAttention,
        "post_attention_layernorm": HFNorm,
        "pre_feedforward_layernorm": HFNorm,
        "mlp": HFMLP,
        "post_feedforward_layernorm": HFNorm,
    }

    step = staticmethod(run_with_input)
    get_per_layer_inputs: Any  # of the model's class
    project_per_layer_inputs: Any

    def run(  # type: ignore[override]
        self, x: Tensor, positions: Tensor | None, attention_mask: Mask, inputs: tuple[Tensor, ...] | None
    ) -> Tensor:
        rope = {kind: table.of(x, positions) for kind, table in self.tables.items()}
        mask = {kind: self.mask_of(kind, x, attention_mask) for kind in self.tables}
        step = partial(self.step, inputs=inputs, shared={})
        return run_blocks(self.layers._modules.values(), self.norm, x, rope, mask, step)

    def more(self, x: Tensor, kwargs: dict[str, Any]) -> tuple:
        """Return the layers' inputs, one after the other in memory."""
        if not has_inputs(self):
            return (None,)
        rows = kwargs.get("per_layer_inputs")
        if rows is None:
            rows = self.get_per_layer_inputs(kwargs["input_ids"], x)
        return (self.project_per_layer_inputs(x, rows).movedim(-2, 0).contiguous().unbind(0),)

    @property
    def output(self) -> Any:  # type: ignore[override]
        """The class of the stack's outputs."""
        kind: Any = self.original
        return getattr(sys.modules[kind.__module__], f"{kind.__name__}OutputWithPast")

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        # logits_to_keep: the states of all tokens are right too, and the language model selects the last ones
        known = "per_layer_inputs", *(("logits_to_keep",) if isinstance(kwargs.get("logits_to_keep"), int) else ())
        if why := super().unable({name: value for name, value in kwargs.items() if name not in known}):
            return why
        if has_inputs(self) and kwargs.get("input_ids") is None and kwargs.get("per_layer_inputs") is None:
            return "inputs_embeds without per_layer_inputs"
        layers = self.layers._modules.values()
        again = self.training and any(layer.gradient_checkpointing for layer in layers)
        if again and any(layer._modules["self_attn"].is_kv_shared_layer for layer in layers):
            return "gradient checkpointing of layers that share keys"
        return None

    def changed_below(self) -> str | None:
        if why := super().changed_below():
            return why
        if has_inputs(self):
            for layer in self.layers._modules.values():
                if type(layer.act_fn) is not type(layer.mlp.act_fn):
                    return "a layer's input has another activation"
        return None


def mixes(block: Any) -> bool:
    return "experts" in block._modules


def has_inputs(stack: Any) -> bool:
    return "per_layer_model_projection" in stack._modules


GEMMA4: dict[str, Maker] = {
    "RMSNorm": any_norm,
    "TextMLP": mlp,
    "TextAttention": shared_attention,
    "TextModel": partial(typed_stack, part=SharingStack),
    "ForCausalLM": tried_causal_lm,
}


class Gemma4Reader(SandwichReader):
    OFFSET = 0.0
    READS = frozenset((
        "attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input",
        "vocab_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size",
    ))  # fmt: skip

    def refusal(self, max_length: int) -> str | None:
        for number, block in enumerate(self.blocks):
            attention = block.self_attn
            if getattr(attention, "v_norm", None) is not None and attention.v_norm.with_scale:
                return f"model.layers.{number}.self_attn.v_norm has weights"
            if not mixes(block):
                continue
            for name, kind, wanted in (("experts", "TextExperts", EXPERTS), ("router", "TextRouter", ROUTER)):
                module = getattr(block, name)
                known = role_of(module) == kind and set(module._parameters) == wanted and "forward" not in vars(module)
                if not known or hooked(module) or any(map(hooked, module.children())):
                    return f"model.layers.{number}.{name}: {type(module).__name__}, not the family's own, or with hooks"
        return super().refusal(max_length)

    def heads(self, attention: Any) -> tuple[int, int]:
        count = self.config.num_attention_heads
        return count, count // attention.num_key_value_groups

    def cap(self, attention: Any) -> float:
        return 0.0

    def projections(self, attention: Any) -> list[Any]:
        """Return the weights of q, k and v; None where a layer has none."""
        layers = (getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj"))
        return [None if layer is None else linear_of(layer) for layer in layers]

    def attention(self, block: Any) -> AttentionWeights:
        attention, weights = block.self_attn, super().attention(block)
        if attention.is_kv_shared_layer:
            return replace(weights, source=self.source(attention))
        return replace(weights, v_eps=float(attention.v_norm.eps))

    def source(self, attention: Any) -> int:
        """Return the number of the layer whose keys and values a layer shares: the last one of its type that has some."""
        layers = [block.self_attn for block in self.blocks]
        kind = layer_type(attention)
        return max(n for n, one in enumerate(layers) if not one.is_kv_shared_layer and layer_type(one) == kind)

    def mlp(self, block: Any) -> Any:
        dense = super().mlp(block)
        if not mixes(block):
            return dense
        router, experts = block.router, block.experts
        scale = self.copies.of(router._parameters["scale"], lambda scale: scale * router.scalar_root_size)
        return DenseAndExpertWeights(
            dense=replace(dense, post_norm=self.norm(block.post_feedforward_layernorm_1)),
            experts=ExpertWeights(
                norm=self.norm(block.pre_feedforward_layernorm_2),
                router=linear_of(router.proj),
                gate_up=experts._parameters["gate_up_proj"],
                down=experts._parameters["down_proj"],
                slots=int(self.config.top_k_experts),
                normalise=True,
                post_norm=self.norm(block.post_feedforward_layernorm_2),
                activation=dense.activation,
                router_norm=Norm(scale, float(router.eps)),
                factors=router._parameters["per_expert_scale"],
            ),
            post_norm=dense.post_norm,
        )

    def routers(self) -> dict[int, Any]:
        return {number: block.router for number, block in enumerate(self.blocks) if mixes(block)}

    def layers(self) -> list[LayerWeights]:
        result = []
        for block, layer in zip(self.blocks, super().layers()):
            extra = None
            if block._modules.get("per_layer_input_gate") is not None:
                extra = LayerInputWeights(
                    linear_of(block.per_layer_input_gate),
                    linear_of(block.per_layer_projection),
                    ACTIVATION_NAMES[self.config.hidden_activation],
                    self.norm(block.post_per_layer_input_norm),
                )
            result.append(layer._replace(extra=extra, factor=block.layer_scalar))
        return result

    def layer_inputs(self) -> LayerInputs | None:
        trunk = self.trunk
        if "per_layer_model_projection" not in trunk._modules:
            return None
        table, norm = trunk.embed_tokens_per_layer, trunk.per_layer_projection_norm
        return LayerInputs(
            weight_of(table),
            float(table.embed_scale.to(table.weight.dtype)),
            linear_of(trunk.per_layer_model_projection),
            Norm(weight_of(norm), norm.eps / trunk.per_layer_model_projection_scale**2),  # of the product before its factor
            float(trunk.per_layer_input_scale),
        )


class SparseGateMLP(HFMLP):
    activation_sparsity: float
    _gaussian_topk: Any  # of the module's class

    def mix(self, x: Tensor) -> Tensor:
        if self.activation_sparsity <= 0:
            return super().mix(x)
        gate, up = self.products(x)
        return run_linear(self._modules["down_proj"], gated(self.activation, self._gaussian_topk(gate), up.contiguous()))


class Gemma3nReader(Reader):
    def refusal(self, max_length: int) -> str:
        return "its blocks mix several streams (AltUp), which no kernel of a step does"


GEMMA3N: dict[str, Maker] = {
    "RMSNorm": any_norm,
    "TextMLP": partial(mlp, part=SparseGateMLP),
    "TextAttention": shared_attention,
    "ForCausalLM": tried_causal_lm,
}


SWAPS: dict[str, Any] = GEMMA | {"gemma3": GEMMA3, "gemma3n": GEMMA3N, "gemma4": GEMMA4, "gemma4_unified": GEMMA4}
DECODING: dict[str, Any] = {
    "ForCausalLM": read,
    "Gemma3ForCausalLM": NormedReader,
    "Gemma3nForCausalLM": Gemma3nReader,
    "Gemma4ForCausalLM": Gemma4Reader,
    "Gemma4UnifiedForCausalLM": Gemma4Reader,
}
