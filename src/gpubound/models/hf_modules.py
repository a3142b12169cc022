"""Replacements for the modules of Hugging Face decoders: norms, the gated MLP, attention by SDPA, the stack of blocks, which is
one loop with each residual add fused into the next norm, and the language model, whose loss comes straight from the hidden
states. SWAPS and DECODING at the end are those of the Llama kind; other families use the parts.

A replacement computes what its module computes, or calls the module's own forward: for a keyword that it does not support, or
another attention implementation. The module's children are then still the fast ones. Such calls are counted, with their reason,
in `delegated`, which the placement's table shows.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from inspect import unwrap
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import rms_norm
from ..kernels.cross_entropy import loss_shape
from ..kernels.dispatch import Call
from ..kernels.norms import norm_shape
from ..layers.attention import Attention, Mask, Rope, RopeTable, attend, turn_calls
from ..layers.block import MLP, RMSNorm, gated_calls, run_block, run_blocks
from ..layers.embedding_and_head import LOSS, head_mismatch, lm_loss, look_up
from ..layers.fused_weights import Kernels, Stacked, bare, describe, hooked
from ..layers.packed_attention import Segments
from .language_model import SEGMENTS, WINDOWED, restarts
from .reader import (
    ACTIVATION_NAMES,
    FIXED,
    HFAngles,
    Reader,
    activation_name,
    config_window,
    halves,
    has_field,
    layer_window,
    rope_types,
)
from .registry import BATCH, TOKENS, Case, Delegating, Maker, Swap, cache_in, cache_word, made_up, mode, random_case

# Keywords of attention that do not change SDPA's result. Any other argument goes to the original forward.
IDLE = {
    "position_ids",
    "use_cache",
    "cache_position",
    "num_items_in_batch",
    "labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    SEGMENTS,  # in place of the mask
}
# Keywords of the stack: supported ones, and ones with which the fused loop supports only this value.
STACK_ARGUMENTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "num_items_in_batch", SEGMENTS}
FIXED_ARGUMENTS = {
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "is_causal": True,
}
# Keywords that the loss reads; the others go to the decoder.
LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")
OPS = ("add_rms_norm",)
MASK_CACHE, OUTPUT_CACHE = cache_word(create_causal_mask), cache_word(CausalLMOutputWithPast)


class HFNorm(Delegating, RMSNorm):
    @property
    def eps(self) -> float:  # type: ignore[override]  # the module's attribute, which may change
        return vars(self)[_eps_name(self)]

    @eps.setter
    def eps(self, eps: float) -> None:
        vars(self)[_eps_name(self)] = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        if why := self.patched():
            return self.delegate(why, hidden_states)
        return rms_norm(hidden_states, self.weight, self.eps, self.offset)


class HFShiftedNorm(HFNorm):
    """Gemma's norm. The gain is 1 + weight, added in fp32, since a 16-bit sum would lose the weight's last bits."""

    offset = 1.0


def _eps_name(norm: Any) -> str:
    """Return the name of the attribute: variance_epsilon for Llama, eps for Gemma."""
    return "variance_epsilon" if "variance_epsilon" in vars(norm) else "eps"


def norm(module: Any, stack: Any, part: type = HFNorm) -> Swap:
    shape = (BATCH, TOKENS, module.weight.shape[0])
    calls = (("rms_norm", norm_shape(shape[-1], module.weight)),)
    return Swap(part, calls, {"delegated": Counter()}, (random_case(module, shape),))


class HFMLP(Delegating, MLP):
    activates: type  # class of the activation when the module was placed

    def forward(self, x: Tensor) -> Tensor:
        why = self.unable()
        return self.delegate(why, x) if why else self.mix(x)

    def unable(self) -> str | None:
        """Return why the kernel may not compute what the original forward computes; None if it does."""
        if why := self.patched():
            return why
        activation: Any = _activation(self)
        if type(activation) is not self.activates:
            return "another activation than when it was placed"
        return "hooks on the activation" if activation is not None and hooked(activation) else None


def _activation(mlp: nn.Module) -> nn.Module | None:
    return mlp._modules.get("act_fn") or mlp._modules.get("activation_fn")


def mlp(module: Any, stack: Any, part: type[HFMLP] = HFMLP) -> Swap:
    name = activation_name(module.config)
    activation = ACTIVATION_NAMES.get(name)
    return Swap(
        part,
        gated_calls(activation, module.down_proj.in_features),
        {"stacked": Stacked(), "activation": activation, "activates": type(_activation(module)), "delegated": Counter()},
        (random_case(module, (BATCH, TOKENS, module.config.hidden_size)),),
        "" if activation else f"no kernel for the activation {name!r}",
    )


class HFAttention(Delegating, Attention):
    IMPLEMENTATIONS = ("sdpa",)

    # Attributes of the module, which may change and are read at each call.
    attention_dropout: float
    is_causal: bool

    def forward(  # type: ignore[override]  # the module's own signature, not the part's
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, *, cache=None, **kwargs
    ):
        cache = past_key_values if cache is None else cache  # the name depends on transformers' version
        if why := self.unable(kwargs):
            kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            return self.delegate(why, hidden_states, **kwargs, **{cache_word(self.forwards[1]): cache})
        mask = kwargs.pop(SEGMENTS, attention_mask)
        q, k, v = (t.transpose(1, 2) for t in self.project(hidden_states, self.angles(position_embeddings)))
        cached = cache is not None
        if cached:
            k, v = cache.update(k, v, self.layer_idx)
        y, scores = self.attended(q, k, v, mask, cached, **kwargs)
        return self.output(y.flatten(-2)), scores

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.attention_dropout if self.training else 0.0
        if not cached:
            return attend(q, k, v, mask, self.scaling, dropout, self.is_causal, self.window()), None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, mask, dropout=dropout, scaling=self.scaling)

    def angles(self, embeddings: tuple[Tensor, Tensor]) -> Rope:
        """Convert transformers' cos and sin to the kernels' layout."""
        return halves(embeddings)

    def project(self, x: Tensor, turn: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        return Attention.project(self, x, turn if self.turns() else None)

    def window(self) -> int | None:
        """Return the number of tokens that a token attends to, which masks of packed rows must limit; None: all."""
        return layer_window(self)

    def turns(self) -> bool:
        """Return False for a layer without positions, which SmolLM3 has."""
        return bool(vars(self).get("use_rope", True))

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        """Return why this call must take the original forward; None if SDPA computes the same."""
        if why := self.patched():
            return why
        if self.config._attn_implementation != "sdpa":
            return f"the config asks for {self.config._attn_implementation!r} attention"
        for name, value in kwargs.items():
            if value is not None and name not in IDLE and not (name == "is_causal" and value is self.is_causal):
                return f"{name} was given"
        return None

    def fused_kernels(self) -> Kernels:
        words, ops = Attention.fused_kernels(self)
        return words, ops if self.turns() else ()


def attention(
    module: Any,
    stack: Any,
    part: type[HFAttention] = HFAttention,
    rotary: Any = None,
    calls: tuple[Call, ...] | None = None,
) -> Swap:
    """Return the Swap of an attention module.

    rotary: computes position_embeddings; None: the stack's rotary_emb. calls: of its rotation; None: those of equal heads
    """
    config = module.config
    refusal = "" if stack is not None else "it is outside a decoder stack with a rotary_emb"
    if config._attn_implementation not in part.IMPLEMENTATIONS:
        refusal = f"the config asks for {config._attn_implementation!r} attention; load with attn_implementation='sdpa'"
    attributes = {"stacked": Stacked(), "delegated": Counter()}
    rotary = rotary or getattr(stack, "rotary_emb", None)
    cases = tuple(attention_case(module, rotary, masked) for masked in (False, True))
    if calls is None and (frequencies := getattr(rotary, "inv_freq", None)) is not None:
        heads = config.num_attention_heads, config.num_key_value_heads, module.head_dim
        calls = turn_calls(*heads, len(frequencies), hasattr(module, "q_norm"))
    return Swap(part, calls or (), attributes, cases, refusal)


def attention_case(module: Any, rotary: Any, masked: bool) -> Case:
    """Return random hidden states at positions 0, 1, ...; masked: causal, and the second row a few tokens shorter."""
    states = random_case(module, (BATCH, TOKENS, module.config.hidden_size))

    def case(dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        x, _ = states(dtype)
        positions = torch.arange(TOKENS, device=x.device)[None]
        mask = None
        if masked:
            mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
            mask[1, :, :, -TOKENS // 3 :] = False
            if module.config._attn_implementation == "eager":  # the mask is added to the scores
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return x, {"position_embeddings": rotary(x, positions), "attention_mask": mask, "position_ids": positions}

    return case


class HFStack(Delegating):
    """Llama's stack of pre-norm blocks. A subclass for other blocks overrides PARTS and `step`."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFNorm,
        "self_attn": HFAttention,
        "post_attention_layernorm": HFNorm,
        "mlp": HFMLP,
    }
    step: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]] = staticmethod(run_block)
    output: Any = BaseModelOutputWithPast
    takes_masks_by_type = False

    table: RopeTable
    # State when the module was placed:
    rotary: Any
    rotary_type: type
    blocks: tuple[Any, ...]  # classes of the layers
    implementation: str  # of attention
    rotary_emb: Any
    embed_tokens: Any
    layers: Any
    norm: Any

    def forward(self, *args, **kwargs):
        if args:
            kwargs = self.by_name(args, kwargs)
        if why := self.unable(kwargs):
            return self.delegate(why, **kwargs)
        x = kwargs.get("inputs_embeds")
        if x is None:
            x = look_up(self.embed_tokens, kwargs["input_ids"])
        positions, mask = kwargs.get("position_ids"), kwargs.get(SEGMENTS, kwargs.get("attention_mask"))
        if mask is None and positions is not None and positions.dim() == 2:  # as TRL packs rows
            mask = restarts(positions, len(x))
        window = self.window()
        if window is not None and x.shape[1] > window and not isinstance(mask, Segments):
            return self.delegate(f"the sequence is longer than the sliding window of {window}", **kwargs)
        return self.output(last_hidden_state=self.run(x, positions, mask, *self.more(x, kwargs)))

    def more(self, x: Tensor, kwargs: dict[str, Any]) -> tuple:
        """Return what `run` takes of a call besides the embeddings x, positions and mask."""
        return ()

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Mask) -> Tensor:
        """Return the hidden states after the final norm, from the embeddings x."""
        rope, mask = self.angles(x, positions), attention_mask
        if isinstance(mask, Tensor):
            # transformers decides if a mask is needed, which synchronises with the device once
            mask = self.masked(create_causal_mask, x, mask)
        return run_blocks(self.layers._modules.values(), self.norm, x, rope, mask, self.step)

    def angles(self, x: Tensor, positions: Tensor | None) -> Any:
        """Return what rotates q and k of every layer."""
        return self.table.of(x, positions)

    def window(self) -> int | None:
        """Return the length up to which all layers have one causal mask, by the current config; None for any length."""
        if has_field(self.config, "layer_types"):
            return self.config.sliding_window if WINDOWED in (self.config.layer_types or ()) else None
        return config_window(self.config)

    def masked(self, make: Callable, x: Tensor, attention_mask: Tensor | None) -> Any:
        """Return the mask by a function of transformers, for rows of one example."""
        return make(config=self.config, inputs_embeds=x, attention_mask=attention_mask, **{MASK_CACHE: None})

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        """Return why this call must take the original forward; None if the loop computes the same."""
        config = self.config
        if why := self.patched():
            return why
        for name, value in kwargs.items():
            if (
                value is not None
                and name not in STACK_ARGUMENTS
                and not (name in FIXED_ARGUMENTS and value is FIXED_ARGUMENTS[name])
            ):
                return f"{name}={value}" if isinstance(value, bool) else f"{name} was given"
        if kwargs.get("use_cache") is None and config.use_cache and not self.training:
            return "use_cache=True is the config's default"
        if (kwargs.get("input_ids") is None) == (kwargs.get("inputs_embeds") is None):
            return "not one of input_ids and inputs_embeds"
        if config._attn_implementation != self.implementation:
            return f"the config asks for {config._attn_implementation!r} attention"
        if config.output_hidden_states or config.output_attentions or not config.return_dict:
            return "the config asks for more than the last hidden state"
        if not getattr(config, "is_causal", True):
            return "the config lets tokens attend to later tokens"
        if isinstance(kwargs.get("attention_mask"), dict) and kwargs.get(SEGMENTS) is None and not self.takes_masks_by_type:
            return "attention_mask is a dict"
        return "torch.compile traces it" if torch.compiler.is_compiling() else self.changed_below()

    def changed_below(self) -> str | None:
        """Return why the loop may not bypass the blocks' forwards: a module below was replaced or hooked. None if none was."""
        if nn.modules.module._has_any_global_hook() or hooked(self.norm):
            return "hooks on the final norm or on every module"
        if not isinstance(self.norm, HFNorm):
            return "the final norm was replaced"
        kind = type(self.rotary_emb)
        if (
            self.rotary_emb is not self.rotary
            or hooked(self.rotary)
            or (kind, _forward_of(kind)) != (self.rotary_type, _placed_forward(self.rotary_type))
        ):
            return "hooks on rotary_emb, or another than when it was placed"
        if len(self.layers) != self.config.num_hidden_layers:
            return "the config counts other layers than there are"
        layers = self.layers._modules.values()
        if not {_forward_of(kind) for kind in set(map(type, layers))} <= set(map(_placed_forward, self.blocks)):
            return "a layer was replaced, or its class has another forward than when it was placed"
        parts: dict[Any, str] = {type(self.norm): "norm"}
        for layer in layers:
            if hooked(layer, but=getattr(layer, "gathers", ())):
                return "hooks on a layer"
            for name, part in self.PARTS.items():
                module = layer._modules.get(name)
                if not isinstance(module, part):
                    return f"{name} was replaced"
                if hooked(module):
                    return f"hooks on {name}"
                if isinstance(module, HFMLP) and (why := module.unable()):
                    return why
                parts[type(module)] = name
        for kind, name in parts.items():
            if (kind.forward, kind.original.forward) != kind.forwards:
                return f"{name} has another class than when it was placed, or its class another forward"
        return None

    def fused_kernels(self) -> Kernels:
        return "residual adds in the norms: {}", OPS


def _forward_of(kind: Any) -> Any:
    """Return a class's forward without wrappers: FSDP2 gives a layer another class, for which transformers wraps it again."""
    return unwrap(kind.forward)


@cache
def _placed_forward(kind: Any) -> Any:
    """Return the class's forward when a model with such modules was first placed."""
    return _forward_of(kind)


def stack(module: Any, _: Any, part: type[HFStack] = HFStack) -> Swap:
    changing = sorted(set(rope_types(module.rotary_emb)) - set(FIXED))
    refusal = f"rope_type {changing[0]!r} changes its frequencies as it reads" if changing else ""
    attributes: dict[str, Any] = {
        "table": RopeTable(HFAngles(module.rotary_emb)),
        "rotary": module.rotary_emb,
        "rotary_type": type(module.rotary_emb),
        "blocks": tuple({type(layer) for layer in module.layers}),
        "implementation": module.config._attn_implementation,
        "delegated": Counter(),
    }
    for kind in (attributes["rotary_type"], *attributes["blocks"]):
        _placed_forward(kind)
    calls = (("add_rms_norm", norm_shape(len(module.norm.weight), module.norm.weight)),)
    return Swap(part, calls, attributes, refusal=refusal or unswapped(module, part))


def unswapped(module: Any, part: type[HFStack]) -> str:
    """Return the first module that the loop bypasses and that was not replaced by the part that it needs; empty if none."""
    for i, layer in enumerate(module.layers):
        for child, wanted in part.PARTS.items():
            if not isinstance(getattr(layer, child), wanted):
                return f"layers.{i}.{child} was not swapped"
    return "" if isinstance(module.norm, RMSNorm) else "norm was not swapped"


class HFCausalLM(Delegating):
    """Causal language model that, in training with labels, computes the loss from the hidden states and returns no logits.

    Without labels, or in eval mode, it calls the original forward.
    """

    output: ClassVar[Any] = CausalLMOutputWithPast
    base_model_prefix: str
    scales: tuple  # the config's cap of the logits and factors when the module was placed, which left them unchanged
    lm_head: Any
    loss_function: Any

    def forward(self, *args, **kwargs):
        if args:
            kwargs = self.by_name(args, kwargs)
        if kwargs.get("labels") is None or not self.training:
            return self.original.forward(self, **kwargs)
        if why := self.unable(kwargs):
            return self.delegate(why, **kwargs)
        shifted, total, ignored = (kwargs.get(name) for name in ("shift_labels", "num_items_in_batch", "ignore_index"))
        labels = kwargs["labels"] if shifted is None else shifted
        outputs = getattr(self, self.base_model_prefix)(**{k: v for k, v in kwargs.items() if k not in LOSS_ARGUMENTS})
        x, head = self.scaled(outputs.last_hidden_state), self.lm_head
        loss = lm_loss(
            x,
            head.weight,
            labels.to(x.device),
            head.bias,
            shifted=shifted is not None,
            total=total.to(x.device) if isinstance(total, Tensor) else total,
            ignore_index=-100 if ignored is None else ignored,
            softcap=self.scales[0],
        )
        rest = {name: outputs.get(name) for name in ("hidden_states", "attentions")}
        rest[OUTPUT_CACHE] = cache_in(outputs)
        return self.output(loss=loss, logits=None, **rest)

    def scaled(self, x: Tensor) -> Tensor:
        """Return the hidden states whose product with the head is the logits."""
        return x

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        if why := self.patched():
            return why
        keep = kwargs.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 0):
            return "logits_to_keep was given"
        if kwargs.get("return_dict") is False or not self.config.return_dict:
            return "return_dict=False"
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            return "the model has its own loss function"
        if scales_of(self.config) != self.scales:
            return "the config scales or caps the logits otherwise than when it was placed"
        return None if bare(self.lm_head) else f"lm_head: {describe(self.lm_head)}"

    def fused_kernels(self) -> Kernels:
        return LOSS


def causal_lm(module: Any, stack: Any, part: type[HFCausalLM] = HFCausalLM) -> Swap:
    """Return the Swap for a family whose logits are lm_head's product with the hidden states."""
    head = getattr(module, "lm_head", None)
    scales = scales_of(module.config)
    shape: Any = () if head is None else loss_shape(head.weight.shape[0], softcap=scales[0])
    calls: Any = () if head is None else (("linear_cross_entropy", (*shape, False, False)),)
    return Swap(part, calls, {"delegated": Counter(), "scales": scales})


def scales_of(config: Any) -> tuple:
    """Return the options by which Gemma caps, and Cohere and Granite scale their logits."""
    config = config.get_text_config()
    return tuple(getattr(config, name, None) or None for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"))


def tried_causal_lm(module: Any, stack: Any) -> Swap:
    """Return the Swap for any other family. It is refused if a trial shows that the model changes the head's product."""
    return replace(causal_lm(module, stack), trial=partial(_why_not_head, module))


def _why_not_head(module: Any) -> str | None:
    """Return why the logits are not the head's product with the hidden states; None if they are."""
    trunk = getattr(module, module.base_model_prefix, module)
    if trunk is module:
        return f"it has no {module.base_model_prefix!r} to take hidden states from"
    ids = made_up(module)
    with mode(module, training=False):
        return head_mismatch(
            module.lm_head,
            lambda: module(input_ids=ids, use_cache=False).logits,
            lambda: trunk(input_ids=ids, use_cache=False).last_hidden_state,
            scales_of(module.config)[0],
        )


SWAPS: dict[str, Maker] = {"RMSNorm": norm, "MLP": mlp, "Attention": attention, "Model": stack, "ForCausalLM": causal_lm}

DECODING = {"ForCausalLM": Reader}
