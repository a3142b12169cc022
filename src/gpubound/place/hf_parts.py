"""Parts for Hugging Face decoders of the Llama kind. Each computes what its module computes, or calls the module's own forward.

A call that a part cannot take (a keyword it does not know, another attention implementation) goes to the original forward,
whose children are still the fast ones. Such calls are counted, with their reason, in `delegated`: the placement's table
shows them.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import rms_norm
from ..layers.attention import Attention, attend
from ..layers.block import run_blocks
from ..layers.embedding import look_up
from ..layers.head import lm_loss
from ..layers.mlp import MLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope, RopeTable
from ..layers.stacked import describe, hooked, plain
from ..trace import count
from .fused import Fused


class HFNorm(Fused, RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


class HFShiftedNorm(Fused, RMSNorm):
    """Gemma's: the gain is 1 + weight, added in fp32, or a 16-bit weight would lose its last bits."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        return rms_norm(hidden_states, 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32)), self.eps)


class HFMLP(Fused, MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


# Keywords that reach an attention module and change nothing in what SDPA computes; any other that is given goes to the
# original forward.
IDLE = {
    "position_ids",
    "use_cache",
    "cache_position",
    "num_items_in_batch",
    "labels",
    "output_attentions",
    "output_hidden_states",
}


class HFAttention(Fused, Attention):
    config: Any
    turns: bool  # SmolLM3 leaves some layers without positions
    delegated: Counter[str]

    def forward(  # type: ignore[override]  # the module's own signature, not the part's
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        if why := self._unable(kwargs):
            return delegate(
                self,
                why,
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        q, k, v = (t.transpose(1, 2) for t in self.project(hidden_states, halves(position_embeddings)))
        dropout = self.dropout if self.training else 0.0
        if past_key_values is None:
            y = attend(q, k, v, attention_mask, self.scaling, dropout)
        else:
            k, v = past_key_values.update(k, v, self.layer_idx)
            y, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling)
        return self.output(y.flatten(-2)), None

    def project(self, x: Tensor, turn: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        return Attention.project(self, x, turn if self.turns else None)

    def _unable(self, kwargs: dict[str, Any]) -> str | None:
        if self.config._attn_implementation != "sdpa":
            return f"the config asks for {self.config._attn_implementation!r} attention"
        for name, value in kwargs.items():
            if value is not None and name not in IDLE and not (name == "is_causal" and value is True):
                return f"{name} was given"
        return None


_halved: tuple[Tensor, Rope] | None = None


def halves(embeddings: tuple[Tensor, Tensor]) -> Rope:
    """Hugging Face's cos and sin (B or 1, T, D), each angle twice and in the model's dtype, as the kernels take them.

    Every layer of a forward is handed the same pair, so the last one converted is kept.
    """
    global _halved
    kept = _halved
    if kept is None or kept[0] is not embeddings[0]:
        cos, sin = ((t[0] if t.shape[0] == 1 else t)[..., : t.shape[-1] // 2].float().contiguous() for t in embeddings)
        _halved = kept = embeddings[0], (cos, sin)
    return kept[1]


class HFAngles:
    """Positions -> cos and sin, by the model's own rotary module but in fp32: its frequencies, scaling and all."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary

    def __call__(self, positions: Tensor) -> Rope:
        like = torch.empty(0, device=positions.device, dtype=torch.float32)  # read for its dtype and device alone
        cos, sin = self.rotary(like, positions.reshape(-1, positions.shape[-1]))
        shape = (*positions.shape, cos.shape[-1] // 2)
        return cos[..., : shape[-1]].reshape(shape), sin[..., : shape[-1]].reshape(shape)

    def stamp(self) -> tuple[int, int]:
        frequencies: Tensor = self.rotary.inv_freq
        return frequencies.data_ptr(), frequencies._version


# What a decoder's keyword must be for the fused loop to be the same computation. Without an entry it must not be given at all.
HARMLESS = {
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "is_causal": True,
}
TAKEN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "num_items_in_batch"}


class HFDecoder(Fused):
    """The stack of blocks, with each residual add inside the next norm."""

    table: RopeTable
    window: int | None  # the narrowest sliding window of any layer
    delegated: Counter[str]
    config: Any
    embed_tokens: Any
    layers: Any
    norm: Any
    training: bool

    def forward(self, *args, **kwargs):
        if args:
            kwargs = by_name(self, args, kwargs)
        if why := self._unable(kwargs):
            return delegate(self, why, **kwargs)
        x = kwargs.get("inputs_embeds")
        if x is None:
            x = look_up(self.embed_tokens, kwargs["input_ids"])
        if self.window is not None and x.shape[1] > self.window:
            return delegate(self, f"the sequence is longer than the sliding window of {self.window}", **kwargs)
        rope, mask = self._positions(x, kwargs.get("position_ids"), kwargs.get("attention_mask"))
        x = run_blocks(self.layers._modules.values(), self.norm, x, rope, mask)
        return BaseModelOutputWithPast(last_hidden_state=x)

    def _positions(self, x: Tensor, positions: Tensor | None, attention_mask: Tensor | None) -> tuple[Rope, Any]:
        """Angles and mask. Without positions or a mask both are known on the host; with either, transformers decides
        whether a mask is needed, which costs its one read from the device."""
        if positions is None and attention_mask is None:
            return self.table.first(x.shape[1], x.device), None
        where = positions if positions is not None else torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None, position_ids=where
        )
        if positions is None:
            return self.table.first(x.shape[1], x.device), mask
        return self.table.at(positions[0] if positions.shape[0] == 1 else positions), mask

    def _unable(self, kwargs: dict[str, Any]) -> str | None:
        """Why this call must take the original forward; None when the loop computes the same."""
        config = self.config
        for name, value in kwargs.items():
            if value is not None and name not in TAKEN and not (name in HARMLESS and value is HARMLESS[name]):
                return f"{name}={value}" if isinstance(value, bool) else f"{name} was given"
        if kwargs.get("use_cache") is None and config.use_cache and not self.training:
            return "use_cache=True is the config's default"
        if (kwargs.get("input_ids") is None) == (kwargs.get("inputs_embeds") is None):
            return "not one of input_ids and inputs_embeds"
        if config._attn_implementation != "sdpa":
            return f"the config asks for {config._attn_implementation!r} attention"
        if config.output_hidden_states or config.output_attentions or not config.return_dict:
            return "the config asks for more than the last hidden state"
        if isinstance(kwargs.get("attention_mask"), dict):
            return "attention_mask is a dict"
        return "torch.compile traces it" if torch.compiler.is_compiling() else self._stepped_on()

    def _stepped_on(self) -> str | None:
        """The loop steps past the blocks and their parts without calling them: is each still ours, and did nobody hook one?"""
        if nn.modules.module._has_any_global_hook() or hooked(self.norm):
            return "hooks on the final norm or on every module"
        if len(self.layers) != self.config.num_hidden_layers:
            return "the config counts other layers than there are"
        for layer in self.layers._modules.values():
            if hooked(layer):
                return "hooks on a layer"
            for name, part in PARTS.items():
                module = layer._modules[name]
                if not isinstance(module, part):
                    return f"{name} was replaced"
                if hooked(module):
                    return f"hooks on {name}"
        return None


PARTS = {"input_layernorm": HFNorm, "self_attn": HFAttention, "post_attention_layernorm": HFNorm, "mlp": HFMLP}


# What the loss reads; the rest goes to the decoder.
LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")


class HFCausalLM(Fused):
    """In training with labels: the loss straight from the hidden states. The output's logits are then None, for they never
    existed.

    Without labels, or in eval mode, the original forward and its logits.
    """

    delegated: Counter[str]
    base_model_prefix: str
    config: Any
    lm_head: Any
    loss_function: Any
    training: bool

    def forward(self, *args, **kwargs):
        if args:
            kwargs = by_name(self, args, kwargs)
        if kwargs.get("labels") is None or not self.training:
            return self.original.forward(self, **kwargs)
        if why := self._unable(kwargs):
            return delegate(self, why, **kwargs)
        shifted, total, ignored = (kwargs.get(name) for name in ("shift_labels", "num_items_in_batch", "ignore_index"))
        labels = kwargs["labels"] if shifted is None else shifted
        outputs = getattr(self, self.base_model_prefix)(**{k: v for k, v in kwargs.items() if k not in LOSS})
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
        return CausalLMOutputWithPast(
            loss=loss,
            logits=None,
            past_key_values=outputs.get("past_key_values"),
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
        )

    def _unable(self, kwargs: dict[str, Any]) -> str | None:
        keep = kwargs.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 0):
            return "logits_to_keep was given"
        if kwargs.get("return_dict") is False or not self.config.return_dict:
            return "return_dict=False"
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            return "the model has a loss function of its own"
        return None if plain(self.lm_head) else f"lm_head: {describe(self.lm_head)}"


def delegate(module: Any, why: str, **kwargs):
    """The original forward, counted: same result, fewer fusions."""
    module.delegated[why] += 1
    count("place.delegated")
    return module.original.forward(module, **kwargs)


def by_name(module: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under the names that the original forward gives them."""
    return dict(zip(_names(module.original.forward), args)) | kwargs


@cache
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(name for name in signature(forward).parameters if name != "self")
