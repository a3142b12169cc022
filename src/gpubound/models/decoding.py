"""The interface between decoding and a model family: the weights of its layers and their definition.

A family's file has a table DECODING, {role: Reader}: how the decoder reads a model of that class, or why it cannot. What its
weights compute is said here once, in plain fp32 (`define`), for the judge; decode/ has the fast forms.

Legend: T tokens, H query heads, K key and value heads, D width of a head, S experts a token (its slots), E experts in all.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.decode_attention import turn
from ..kernels.decode_product import ACTIVATIONS, Norm, capped_
from ..layers.attention import Angles
from ..layers.fused_weights import site_of
from .placing import ACTIVATIONS as NAMES, activation_name
from .rotary import FIXED, HFAngles, rope_types

Rounding = Callable[[Tensor], Tensor] | None  # of keys (T, K, D) in their places, and of values
Normed = Callable[[Tensor, Norm | None], Tensor]


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None = None
    adapters: Sequence[Any] = ()  # LowRank ones (lora/adapter.py), each of which adds scale · x aᵀ bᵀ

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight, self.bias) if t is not None] + [t for low in self.adapters for t in (low.a, low.b)]


@dataclass(frozen=True)
class Shape:
    """Dimensions and constants that all layers of a model share."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    scale: float  # of the scores
    embedded: float = 1.0  # what embeddings are multiplied by
    logit_cap: float = 0.0  # logits are cap · tanh(logit / cap); 0: as they are


class PartWeights:
    """Base class of the weights of a layer's parts. Norms and biases may be None."""

    def norms(self) -> list[Tensor]:
        return [value.weight for value in vars(self).values() if isinstance(value, Norm)]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a decoding step reads in full."""
        return self.norms() + [tensor for layer in self.linears() for tensor in layer.tensors()]

    def linears(self) -> list[Linear]:
        return [value for value in vars(self).values() if isinstance(value, Linear)]


@dataclass(frozen=True)
class AttentionWeights(PartWeights):
    norm: Norm | None
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None  # of a head, or of all heads in a row: its width tells
    k_norm: Norm | None
    window: int  # the nearest keys that a token sees; 0: all
    table: int | None = 0  # which of the model's angles; None: a layer without positions
    cap: float = 0.0  # scores are cap · tanh(score / cap); 0: as they are
    post_norm: Norm | None = None  # of what is added to the stream

    def heads(self, rows: Iterable[Tensor], width: int, normed: Normed) -> list[Tensor]:
        """Rows (..., H D) of q, k, v as heads (..., H, D), normed before they are split where the norm is as wide as a row."""
        found = []
        for x, norm in zip(rows, (self.q_norm, self.k_norm, None)):
            whole = norm is not None and len(norm.weight) > width
            heads = (normed(x, norm) if whole else x).unflatten(-1, (-1, width))
            found.append(heads if whole else normed(heads, norm))
        return found

    def define(self, shape: Shape, x: Tensor, tables: list[tuple[Tensor, Tensor]], rounded: Rounding) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        h = plain_norm(x, self.norm)
        rows = (plain_linear(h, layer) for layer in (self.q, self.k, self.v))
        q, k, v = self.heads(rows, shape.head_dim, plain_norm)
        if self.table is not None:
            cos, sin = (table[:, None] for table in tables[self.table])
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        if rounded is not None:
            k, v = rounded(k), rounded(v)
        groups, T = shape.heads // shape.kv_heads, len(x)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = capped_(torch.einsum("thd,shd->hts", q, k) * shape.scale, self.cap)
        age = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
        hidden = (age < 0) | (age >= (self.window or T))
        y = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        return plain_norm(plain_linear(y.flatten(1), self.o), self.post_norm)


@dataclass(frozen=True)
class DenseWeights(PartWeights):
    norm: Norm | None
    gate: Linear
    up: Linear
    down: Linear
    activation: str = "silu"
    post_norm: Norm | None = None

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        h = plain_norm(x, self.norm)
        gated = ACTIVATIONS[self.activation](plain_linear(h, self.gate)) * plain_linear(h, self.up)
        return plain_norm(plain_linear(gated, self.down), self.post_norm)


@dataclass(frozen=True)
class ExpertWeights(PartWeights):
    """Gated by silu, behind a norm without an offset: the kernels know no others."""

    norm: Norm
    router: Linear  # (E, hidden)
    gate_up: Any  # (E, 2 I, hidden)
    down: Any  # (E, hidden, I)
    slots: int
    normalise: bool  # shares of what was chosen, not of all
    post_norm: Norm | None = None

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32. Only the experts of one token at a time are converted to fp32.

        With `choices`, experts are those that were chosen there, which are judged.
        """
        h = plain_norm(x, self.norm)
        scores = plain_linear(h, self.router)
        shares, ids = scores.softmax(-1).topk(self.slots)
        if choices:
            ids = choices.judged(number, scores)
            shares = scores.softmax(-1).gather(-1, ids)
        if self.normalise:
            shares = shares / shares.sum(-1, keepdim=True)
        found = []
        for row, chosen, share in zip(h, ids, shares):
            gate, up = (self.gate_up.index_select(0, chosen).float() @ row).chunk(2, -1)
            products = torch.bmm(self.down.index_select(0, chosen).float(), (F.silu(gate) * up)[..., None])
            found.append(share @ products[..., 0])
        return plain_norm(torch.stack(found), self.post_norm)


class LayerWeights(NamedTuple):
    attention: AttentionWeights
    mlp: Any  # DenseWeights, ExpertWeights, or another record with their methods


def plain_linear(x: Tensor, layer: Linear) -> Tensor:
    y = F.linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())
    for low in layer.adapters:
        y = y + low.scale * F.linear(F.linear(x, low.a.float()), low.b.float())
    return y


def plain_norm(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight.float() + norm.offset)


# Fields of a config that every reader reads itself, that its modules and tensors show, or that change nothing in eval mode.
READ = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "attention_bias", "mlp_bias", "rope_parameters",
    "original_max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "use_bidirectional_attention", "max_position_embeddings", "tie_word_embeddings", "final_logit_softcapping",
    "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "use_cache", "pretraining_tp",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "no_rope_layers", "no_rope_layer_interval",
))  # fmt: skip
# Keys of rope_parameters that change the frequencies, which are taken from the model's rotary module.
ROTARY = frozenset((
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "short_factor", "long_factor", "max_position_embeddings", "low_freq_factor", "high_freq_factor",
))  # fmt: skip


@cache
def default_config(kind: Any) -> Any:
    """Return a config with the defaults of its class."""
    return kind()


def unread_option(config: Any, read: Collection[str]) -> str | None:
    """Return the first option of a transformers config that is not in `read` and not its class's default.

    The certificate compares a few random tokens: it cannot see an option that depends on a text's length or on the size of
    a value, such as a scale of queries beyond some length, or a clamp.
    """
    base = next((one for one in type(config).__mro__ if one.__name__ == "PreTrainedConfig"), None)
    if base is None:  # a config of ours
        return None
    declared = signature(type(config)).parameters.keys() - signature(base).parameters.keys()
    kind: Any = type(config)
    default = default_config(kind)
    for name in sorted(declared - set(read)):
        if getattr(config, name, None) != getattr(default, name, None):
            return f"{name}={getattr(config, name, None)!r}"
    tables = getattr(config, "rope_parameters", None) or {}
    for table in [tables, *(value for value in tables.values() if isinstance(value, dict))]:
        for key, value in table.items():
            if key not in ROTARY and not isinstance(value, dict):
                return f"rope_parameters.{key}={value!r}"
    return None


class Reader:
    """Reads a causal language model of Llama's kind, whose tensors are taken as they are. A family's own says what differs."""

    # A block's norms: before attention, behind it, before the MLP, behind it.
    NORMS: ClassVar[tuple[str | None, ...]] = ("input_layernorm", None, "post_attention_layernorm", None)
    OFFSET = 0.0  # of all norms
    READS: ClassVar[frozenset[str]] = frozenset()  # fields of the config that this family has besides READ

    def __init__(self, model: Any) -> None:
        self.model, self.trunk, self.config = model, model.model, model.config

    def refusal(self, max_length: int) -> str | None:
        """Why it is not decoded by the kernels for texts of that length: an option that they do not know."""
        for kind in rope_types(self.trunk.rotary_emb):
            longest = self.longest() if kind == "longrope" else 0
            if kind not in FIXED and not 0 < max_length <= longest:
                beyond = f" beyond {longest} tokens, and max_length is {max_length}" if longest else ""
                return f"its rotary angles ({kind!r}) change with the length of what is read{beyond}"
        if self.activation() is None:
            return f"its activation is {activation_name(self.config)!r}, the kernels' are {', '.join(ACTIVATIONS)}"
        if getattr(self.trunk.layers[0].self_attn, "head_dim", 0) % 2:
            return "its heads have an odd width, and rotation works on pairs"
        if getattr(self.config, "use_bidirectional_attention", False):
            return "its tokens see what comes behind them"
        if option := unread_option(self.config, READ | self.READS):
            return f"its config has {option}, an option that its reader does not know"
        return None

    def longest(self) -> int:
        """Up to how many tokens angles of the kind longrope stay as they are."""
        told = (self.config.rope_parameters or {}).get("original_max_position_embeddings")
        return told or getattr(self.config, "original_max_position_embeddings", 0) or 0

    def activation(self) -> str | None:
        return NAMES.get(activation_name(self.config))

    def shape(self) -> Shape:
        c, attention = self.config, self.trunk.layers[0].self_attn
        scale = getattr(self.trunk.embed_tokens, "embed_scale", None)  # rounded to the model's dtype where it is used
        return Shape(
            hidden=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=attention.head_dim,
            vocab=self.model.lm_head.weight.shape[0],
            scale=attention.scaling,
            embedded=1.0 if scale is None else float(scale.to(self.trunk.embed_tokens.weight.dtype)),
            logit_cap=getattr(c, "final_logit_softcapping", None) or 0.0,
        )

    def angles(self) -> list[Angles]:
        """A layer's `table` says which of them it takes."""
        return [HFAngles(self.trunk.rotary_emb)]

    def layers(self) -> list[LayerWeights]:
        return [LayerWeights(self.attention(block), self.mlp(block)) for block in self.trunk.layers]

    def norm(self, module: Any) -> Norm:
        """Ours call it eps, Hugging Face's variance_epsilon."""
        return Norm(weight_of(module), float(module.eps if hasattr(module, "eps") else module.variance_epsilon), self.OFFSET)

    def norms(self, parent: Any, names: Sequence[str | None]) -> list[Norm | None]:
        found = [name and getattr(parent, name, None) for name in names]
        return [None if module is None else self.norm(module) for module in found]

    def attention(self, block: Any) -> AttentionWeights:
        attention, (before, behind) = block.self_attn, self.norms(block, self.NORMS[:2])
        q_norm, k_norm = self.norms(attention, ("q_norm", "k_norm"))
        q, k, v = self.projections(attention)
        return AttentionWeights(
            norm=before,
            q=q,
            k=k,
            v=v,
            o=linear_of(attention.o_proj),
            q_norm=q_norm,
            k_norm=k_norm,
            window=self.window(attention),
            table=self.table(attention),
            cap=self.cap(attention),
            post_norm=behind,
        )

    def projections(self, attention: Any) -> list[Linear]:
        return [linear_of(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def window(self, attention: Any) -> int:
        """Qwen says it layer by layer, Mistral in its config for all of them."""
        whole = getattr(getattr(attention, "config", None), "sliding_window", None)
        return getattr(attention, "sliding_window", whole) or 0

    def table(self, attention: Any) -> int | None:
        return 0 if getattr(attention, "use_rope", True) else None

    def cap(self, attention: Any) -> float:
        return 0.0

    def mlp(self, block: Any) -> Any:
        before, behind = self.norms(block, self.NORMS[2:])
        gate, up = self.gate_up(block.mlp)
        activation = self.activation()
        assert activation is not None
        return DenseWeights(before, gate, up, linear_of(block.mlp.down_proj), activation, behind)

    def gate_up(self, mlp: Any) -> list[Linear]:
        return [linear_of(mlp.gate_proj), linear_of(mlp.up_proj)]

    def together(self, block: Any) -> list[list[Any]]:
        """The linear layers of a block that read the same input: side by side in memory they are one product."""
        attention, mlp = block.self_attn, block.mlp
        groups = [[attention.q_proj, attention.k_proj, attention.v_proj]]
        return [*groups, [mlp.gate_proj, mlp.up_proj]] if hasattr(mlp, "gate_proj") else groups

    def routers(self) -> dict[int, nn.Module]:
        """What chooses the experts, by the numbers of the layers that have some."""
        return {}


def weight_of(module: Any) -> Tensor:
    return module._parameters["weight"]


def linear_of(layer: Any) -> Linear:
    """A projection, PEFT's too, as it is now."""
    site = site_of(layer)
    if site.why is not None:  # decode/weight_view.py refuses those that a step may not read
        return Linear(weight_of(layer), layer.bias)
    return Linear(site.weight, site.bias, tuple(site.adapters))


def parts_of(layer: Any, counts: list[int]) -> list[Linear]:
    """Several layers whose weights are one parameter: views of it, and of what its adapters add."""
    weight, bias, adapters = linear_of(layer)
    found = []
    for rows in torch.arange(len(weight), device="cpu").split(counts):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        lows = tuple(type(low)(low.a, low.b.detach()[part], low.scale) for low in adapters)
        found.append(Linear(weight.detach()[part], None if bias is None else bias.detach()[part], lows))
    return found
