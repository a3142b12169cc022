"""The decoder stack: one loop over a model's layers, with each residual add inside the next norm. And the language model around
it: its loss straight from the hidden states.
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

from ..kernels.cross_entropy import loss_shape
from ..layers.attention import RopeTable
from ..layers.block import run_block, run_blocks
from ..layers.embedding_and_head import LOSS, lm_loss, look_up, why_whole
from ..layers.fused_weights import Kernels, bare, describe, hooked
from ..layers.norm import RMSNorm
from .keywords import cache_in, cache_word
from .parts import HFMLP, HFAttention, HFNorm
from .placing import Delegating, Swap, made_up, mode
from .rotary import FIXED, HFAngles, rope_types

# What a decoder's keyword must be for the fused loop to be the same computation. Without an entry it must not be given at all.
HARMLESS = {
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "is_causal": True,
}
WINDOWED = "sliding_attention"  # the type of a layer whose tokens see only the last few before them
TAKEN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "num_items_in_batch"}
OPS = ("add_rms_norm",)
OF_MASKS, OF_OUTPUTS = cache_word(create_causal_mask), cache_word(CausalLMOutputWithPast)


class HFStack(Delegating):
    """The stack of pre-norm blocks, as Llama's. For another kind of block, PARTS and `step` say so."""

    PARTS: ClassVar[dict[str, type]] = {
        "input_layernorm": HFNorm,
        "self_attn": HFAttention,
        "post_attention_layernorm": HFNorm,
        "mlp": HFMLP,
    }
    step: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = staticmethod(run_block)

    table: RopeTable
    # What it was placed with:
    rotary: Any
    turns: type  # the class of `rotary`
    blocks: tuple[Any, ...]  # its layers' classes
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
        window = self.window()
        if window is not None and x.shape[1] > window:
            return self.delegate(f"the sequence is longer than the sliding window of {window}", **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.run(x, kwargs.get("position_ids"), kwargs.get("attention_mask")))

    def run(self, x: Tensor, positions: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """The hidden states behind the final norm, from the embeddings."""
        rope, mask = self.table.of(x, positions), None
        if positions is not None or attention_mask is not None:
            # transformers decides whether a mask is needed, which costs its one read from the device
            mask = self.masked(create_causal_mask, x, positions, attention_mask)
        return run_blocks(self.layers._modules.values(), self.norm, x, rope, mask, self.step)

    def window(self) -> int | None:
        """Up to what length all layers are plainly causal and get one mask, by what the config says now; None for any."""
        window = getattr(self.config, "sliding_window", None)
        if window is None or WINDOWED in (getattr(self.config, "layer_types", None) or (WINDOWED,)):
            return window
        of_some = any("sliding_window" in vars(layer.self_attn) for layer in self.layers._modules.values())
        return None if of_some else window  # Mistral's and Phi-3's layers have it whatever their types

    def masked(self, make: Callable, x: Tensor, positions: Tensor | None, attention_mask: Tensor | None) -> Any:
        given = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask, "position_ids": positions}
        return make(**given, **{OF_MASKS: None})

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        """Why this call must take the original forward; None when the loop computes the same."""
        config = self.config
        if why := self.patched():
            return why
        for name, value in kwargs.items():
            if value is not None and name not in TAKEN and not (name in HARMLESS and value is HARMLESS[name]):
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
            return "the config lets tokens see what comes behind them"
        if isinstance(kwargs.get("attention_mask"), dict):
            return "attention_mask is a dict"
        return "torch.compile traces it" if torch.compiler.is_compiling() else self.stepped_on()

    def stepped_on(self) -> str | None:
        """The loop steps past the blocks and their parts without calling them: is each still ours, and did nobody hook one?"""
        if nn.modules.module._has_any_global_hook() or hooked(self.norm):
            return "hooks on the final norm or on every module"
        if not isinstance(self.norm, HFNorm):
            return "the final norm was replaced"
        kind = type(self.rotary_emb)
        if (
            self.rotary_emb is not self.rotary
            or hooked(self.rotary)
            or (kind, written(kind)) != (self.turns, as_seen(self.turns))
        ):
            return "hooks on rotary_emb, or another than when it was placed"
        if len(self.layers) != self.config.num_hidden_layers:
            return "the config counts other layers than there are"
        layers = self.layers._modules.values()
        if not {written(kind) for kind in set(map(type, layers))} <= set(map(as_seen, self.blocks)):
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


def written(kind: Any) -> Any:
    """Its forward as it was written: FSDP2 gives a layer another class, for which transformers wraps the same one anew."""
    return unwrap(kind.forward)


@cache
def as_seen(kind: Any) -> Any:
    """What `written` said first: when a model with such modules was placed."""
    return written(kind)


def stack(module: Any, _: Any, part: type[HFStack] = HFStack) -> Swap:
    changing = sorted(set(rope_types(module.rotary_emb)) - set(FIXED))
    refusal = f"rope_type {changing[0]!r} changes its frequencies as it reads" if changing else ""
    attributes: dict[str, Any] = {
        "table": RopeTable(HFAngles(module.rotary_emb)),
        "rotary": module.rotary_emb,
        "turns": type(module.rotary_emb),
        "blocks": tuple({type(layer) for layer in module.layers}),
        "implementation": module.config._attn_implementation,
        "delegated": Counter(),
    }
    for kind in (attributes["turns"], *attributes["blocks"]):
        as_seen(kind)
    calls = (("add_rms_norm", tuple(module.norm.weight.shape)),)
    return Swap(part, calls, attributes, refusal=refusal or unswapped(module, part))


def unswapped(module: Any, part: type[HFStack]) -> str:
    """Which of the modules that the loop steps past is not the part that the loop needs; empty when all are."""
    for i, layer in enumerate(module.layers):
        for child, wanted in part.PARTS.items():
            if not isinstance(getattr(layer, child), wanted):
                return f"layers.{i}.{child} was not swapped"
    return "" if isinstance(module.norm, RMSNorm) else "norm was not swapped"


# What the loss reads; the rest goes to the decoder.
READ = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")


class HFCausalLM(Delegating):
    """In training with labels: the loss straight from the hidden states. The output's logits are then None, for they never
    existed.

    Without labels, or in eval mode, the original forward and its logits.
    """

    base_model_prefix: str
    scales: tuple  # what its config said of its logits when it was placed, which was shown to leave them as they are
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
        outputs = getattr(self, self.base_model_prefix)(**{k: v for k, v in kwargs.items() if k not in READ})
        x, head = outputs.last_hidden_state, self.lm_head
        loss = lm_loss(
            x,
            head.weight,
            labels.to(x.device),
            head.bias,
            shifted=shifted is not None,
            total=total.to(x.device) if isinstance(total, Tensor) else total,
            ignore_index=-100 if ignored is None else ignored,
        )
        rest = {name: outputs.get(name) for name in ("hidden_states", "attentions")}
        rest[OF_OUTPUTS] = cache_in(outputs)
        return CausalLMOutputWithPast(loss=loss, logits=None, **rest)

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        if why := self.patched():
            return why
        keep = kwargs.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 0):
            return "logits_to_keep was given"
        if kwargs.get("return_dict") is False or not self.config.return_dict:
            return "return_dict=False"
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            return "the model has a loss function of its own"
        if scales_of(self.config) != self.scales:
            return "the config scales or caps the logits otherwise than when it was placed"
        return None if bare(self.lm_head) else f"lm_head: {describe(self.lm_head)}"

    def fused_kernels(self) -> Kernels:
        return LOSS


def causal_lm(module: Any, stack: Any) -> Swap:
    """For a family whose logits are known to be lm_head's product with the hidden states."""
    head = getattr(module, "lm_head", None)
    calls: Any = () if head is None else (("linear_cross_entropy", (*loss_shape(head.weight.shape[0]), False, False)),)
    return Swap(HFCausalLM, calls, {"delegated": Counter(), "scales": scales_of(module.config)})


def scales_of(config: Any) -> tuple:
    """What Gemma, Cohere and Granite do to their logits, by their configs."""
    return tuple(getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"))


def tried_causal_lm(module: Any, stack: Any) -> Swap:
    """For any other: the swap is refused where a trial shows that the model does more to its logits."""
    return replace(causal_lm(module, stack), trial=partial(_why_not_head, module))


def _why_not_head(module: Any) -> str | None:
    """Whether its logits are its head's product with the hidden states and nothing more."""
    trunk = getattr(module, module.base_model_prefix, module)
    if trunk is module:
        return f"it has no {module.base_model_prefix!r} to take hidden states from"
    ids = made_up(module)
    with mode(module, training=False):
        return why_whole(
            module.lm_head,
            lambda: module(input_ids=ids, use_cache=False).logits,
            lambda: trunk(input_ids=ids, use_cache=False).last_hidden_state,
        )
