"""Parts that Hugging Face decoders of many families share: norms, the gated MLP, attention by SDPA; and how each is swapped in.

Each computes what its module computes, or calls the module's own forward. A call that a part cannot take (a keyword it does
not know, another attention implementation) goes there, and the module's children are still the fast ones. Such calls are
counted, with their reason, in `delegated`: the placement's table shows them.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import rms_norm
from ..layers.attention import Attention, Rope, attend, turn_calls
from ..layers.fused_weights import Kernels, Stacked, hooked
from ..layers.mlp import MLP, gated_calls
from ..layers.norm import RMSNorm
from .placing import ACTIVATIONS, BATCH, TOKENS, Case, Delegating, Swap, activation_name, random_case
from .rotary import halves


class HFNorm(Delegating, RMSNorm):
    @property
    def eps(self) -> float:  # type: ignore[override]  # that of its module, which somebody may set later
        return vars(self)[_eps_name(self)]

    @eps.setter
    def eps(self, eps: float) -> None:
        vars(self)[_eps_name(self)] = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        if why := self.patched():
            return self.delegate(why, hidden_states)
        return rms_norm(hidden_states, self.weight, self.eps, self.offset)


class HFShiftedNorm(HFNorm):
    """Gemma's: the gain is 1 + weight, added in fp32, or a 16-bit weight would lose its last bits."""

    offset = 1.0


def _eps_name(norm: Any) -> str:
    """Llama's kind calls it variance_epsilon, Gemma's eps."""
    return "variance_epsilon" if "variance_epsilon" in vars(norm) else "eps"


def norm(module: Any, stack: Any, part: type = HFNorm) -> Swap:
    shape = (BATCH, TOKENS, module.weight.shape[0])
    calls = (("rms_norm", shape[-1:]),)
    return Swap(part, calls, {"delegated": Counter()}, (random_case(module, shape),))


class HFMLP(Delegating, MLP):
    activates: type  # of its activation, when it was placed

    def forward(self, x: Tensor) -> Tensor:
        why = self.unable()
        return self.delegate(why, x) if why else self.mix(x)

    def unable(self) -> str | None:
        """Why the activation must be called, which the kernel computes without it, or another forward; None when neither."""
        if why := self.patched():
            return why
        found: Any = _activation(self)
        if type(found) is not self.activates:
            return "another activation than when it was placed"
        return "hooks on the activation" if found is not None and hooked(found) else None


def _activation(mlp: nn.Module) -> nn.Module | None:
    return mlp._modules.get("act_fn") or mlp._modules.get("activation_fn")


def mlp(module: Any, stack: Any, part: type[HFMLP] = HFMLP) -> Swap:
    named = activation_name(module.config)
    activation = ACTIVATIONS.get(named)
    return Swap(
        part,
        gated_calls(activation, module.down_proj.in_features),
        {"stacked": Stacked(), "activation": activation, "activates": type(_activation(module)), "delegated": Counter()},
        (random_case(module, (BATCH, TOKENS, module.config.hidden_size)),),
        "" if activation else f"no kernel for the activation {named!r}",
    )


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
    "output_router_logits",
}


class HFAttention(Delegating, Attention):
    IMPLEMENTATIONS = ("sdpa",)

    # What somebody may set later is the module's own, and read at each call.
    attention_dropout: float
    is_causal: bool

    def forward(  # type: ignore[override]  # the module's own signature, not the part's
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, *, cache=None, **kwargs
    ):
        cache = past_key_values if cache is None else cache  # by either name (keywords.py)
        if why := self.unable(kwargs):
            return self.delegate(why, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        q, k, v = (t.transpose(1, 2) for t in self.project(hidden_states, halves(position_embeddings)))
        cached = cache is not None
        if cached:
            k, v = cache.update(k, v, self.layer_idx)
        y, scores = self.attended(q, k, v, attention_mask, cached, **kwargs)
        return self.output(y.flatten(-2)), scores

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, cached: bool = False, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.attention_dropout if self.training else 0.0
        if not cached:
            return attend(q, k, v, mask, self.scaling, dropout, self.is_causal), None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, mask, dropout=dropout, scaling=self.scaling)

    def project(self, x: Tensor, turn: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        return Attention.project(self, x, turn if self.turns() else None)

    def turns(self) -> bool:
        """SmolLM3 leaves some layers without positions."""
        return bool(vars(self).get("use_rope", True))

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        """Why this call must take the original forward; None when SDPA computes the same."""
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


def attention(module: Any, stack: Any, part: type[HFAttention] = HFAttention, rotary: Any = None) -> Swap:
    """`rotary`: what gives position_embeddings, where it is not just the stack's rotary_emb."""
    config = module.config
    refusal = "" if stack is not None else "it lies outside a decoder stack with a rotary_emb"
    if config._attn_implementation not in part.IMPLEMENTATIONS:
        refusal = f"the config asks for {config._attn_implementation!r} attention; load with attn_implementation='sdpa'"
    attributes = {"stacked": Stacked(), "delegated": Counter()}
    rotary = rotary or getattr(stack, "rotary_emb", None)
    cases = tuple(attention_case(module, rotary, masked) for masked in (False, True))
    frequencies = getattr(rotary, "inv_freq", None)
    heads = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    calls = turn_calls(*heads, len(frequencies), hasattr(module, "q_norm")) if frequencies is not None else ()
    return Swap(part, calls, attributes, cases, refusal)


def attention_case(module: Any, rotary: Any, masked: bool) -> Case:
    """Random hidden states at positions 0, 1, ...; masked: causal, and the second row a few tokens shorter."""
    states = random_case(module, (BATCH, TOKENS, module.config.hidden_size))

    def case(dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        x, _ = states(dtype)
        positions = torch.arange(TOKENS, device=x.device)[None]
        mask = None
        if masked:
            mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
            mask[1, :, :, -TOKENS // 3 :] = False
            if module.config._attn_implementation == "eager":  # which adds it to the scores
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return x, {"position_embeddings": rotary(x, positions), "attention_mask": mask}

    return case
