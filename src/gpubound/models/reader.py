"""Readers of causal language models for decoding: which tensor of a model is which weight, and why a model cannot be read."""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..kernels.decode_product import ACTIVATIONS, Norm
from ..kernels.row_ops import ACTIVATED, LayerNorm
from ..layers.attention import Angles, Rope
from ..layers.fused_weights import site_of
from ..layers.quantized_base import some_rows
from .decoding import (
    FULL,
    WINDOWED,
    AttentionWeights,
    DenseWeights,
    LayerInputs,
    LayerWeights,
    Linear,
    Shape,
    UngatedWeights,
)

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
    if base is None:  # a config of this library
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
            if key not in ROTARY and key not in read and not isinstance(value, dict):
                return f"rope_parameters.{key}={value!r}"
    return None


# Rope types with fixed frequencies; others change them with the length of the text.
FIXED = ("default", "linear", "llama3", "proportional", "yarn")
# transformers' names of activations, and the kernels' names.
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

UNGATED_NAMES = ACTIVATION_NAMES | {"relu": "relu", "relu2": "relu2", "gelu_fast": "gelu_tanh"}


def activation_name(config: Any) -> str:
    """Return a transformers config's name of the activation."""
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    return str(next((value for name in names if (value := getattr(config, name, None))), ""))


def rope_types(rotary: Any) -> list[str]:
    """Return the rope types of a transformers rotary module: one, or for Gemma 3 one per type of layer."""
    types = getattr(rotary, "rope_type", "default")
    return list(types.values()) if isinstance(types, dict) else [types]


def angle_types(rotary: Any) -> list[str]:
    """Return the types of layers that a transformers rotary module has separate frequencies for; empty if it has one set."""
    types = getattr(rotary, "rope_type", None)
    return sorted(types) if isinstance(types, dict) else []


def layer_type(attention: Any) -> str:
    """Return the type of a layer: an attribute for most, another one for OLMo 3, and a flag for EXAONE 4."""
    if hasattr(attention, "is_sliding"):
        return WINDOWED if attention.is_sliding else FULL
    for name in ("layer_type", "attention_type"):
        if hasattr(attention, name):
            return getattr(attention, name)
    return attention.config.layer_types[attention.layer_idx]


def has_field(config: Any, name: str) -> bool:
    """Return whether the class of a config has a field. A class that is not transformers' may set its fields in __init__."""
    kind = type(config)
    return hasattr(kind, name) or (not kind.__module__.startswith("transformers.") and hasattr(config, name))


def config_window(config: Any) -> int | None:
    """Return the window that a config gives all layers, as Mistral's and Phi-3's do whatever their types; None: it gives none.

    Families without windows ignore a sliding_window, which a converted checkpoint may have. Others have the types of layers.
    """
    return config.sliding_window if has_field(config, "sliding_window") and not has_field(config, "layer_types") else None


def layer_window(attention: Any) -> int | None:
    """Return the window of a layer; None: it sees all. Qwen2-MoE's layers have the attribute where they have a window."""
    return getattr(attention, "sliding_window", config_window(getattr(attention, "config", None))) or None


class HFAngles:
    """cos and sin of positions in fp32, computed by a transformers rotary module, with its frequencies and scaling."""

    AXES = 0  # of the positions that the module takes, where it takes a grid's: those of a text are the same on all

    def __init__(self, rotary: Any, layer_type: str | None = None) -> None:
        self.rotary = rotary
        prefix = f"{layer_type}_" if layer_type else ""  # Gemma 3 has frequencies for each type of layer
        self.frequencies, self.scaling = f"{prefix}inv_freq", f"{prefix}attention_scaling"
        self.options = {"layer_type": layer_type} if layer_type else {}

    def __call__(self, positions: Tensor) -> Rope:
        like = torch.empty(0, device=positions.device, dtype=torch.float32)  # only its dtype and device are read
        rows = positions.reshape(-1, positions.shape[-1])
        embeddings = self.rotary(like, rows.expand(self.AXES, *rows.shape) if self.AXES else rows, **self.options)
        cos, sin = (t[..., self.columns(t.shape[-1])].reshape(*positions.shape, -1) for t in embeddings)
        return cos, sin

    def columns(self, width: int) -> slice:
        """Return where the module's cos and sin have the angle of each pair; the rest repeats it."""
        return slice(width // 2)

    def stamp(self) -> object:
        frequencies: Tensor = getattr(self.rotary, self.frequencies)
        return frequencies.data_ptr(), frequencies._version, getattr(self.rotary, self.scaling, None)


class SingleAngles(HFAngles):
    """Angles of a rotary module that has each of a pair's once."""

    def columns(self, width: int) -> slice:
        return slice(width)


class InterleavedAngles(HFAngles):
    """Angles of a rotary module that has both of a pair next to each other."""

    def columns(self, width: int) -> slice:
        return slice(0, width, 2)


class NoAngles:
    """Angles of a model without rotation: zeros."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs

    def __call__(self, positions: Tensor) -> Rope:
        zeros = torch.zeros(*positions.shape, self.pairs, device=positions.device, dtype=torch.float32)
        return torch.ones_like(zeros), zeros

    def stamp(self) -> object:
        return self.pairs


class ChangingAngles(HFAngles):
    """Angles of a rotary module whose frequencies depend on the length of the text (longrope): computed for every batch."""

    def stamp(self) -> object:
        return object()


_halved: tuple[Tensor, Rope] | None = None


def halves(embeddings: tuple[Tensor, Tensor], interleaved: bool = False) -> Rope:
    """Convert Hugging Face's cos and sin (B or 1, T, D), each angle twice and in the model's dtype, to the kernels' layout.

    Every layer of a forward gets the same pair, so the last conversion is cached.
    interleaved: an angle's two places are next to each other, and not D/2 apart
    """
    global _halved
    cached = _halved
    if cached is None or cached[0] is not embeddings[0]:
        first = slice(None, None, 2) if interleaved else slice(embeddings[0].shape[-1] // 2)
        cos, sin = ((t[0] if t.shape[0] == 1 else t)[..., first].float().contiguous() for t in embeddings)
        _halved = cached = embeddings[0], (cos, sin)
    return cached[1]


def text_stack(model: Any) -> Any:
    """Return the decoder stack of a causal language model, or of the text model inside one of images and text."""
    stack = model.model if hasattr(model, "model") else getattr(model, model.base_model_prefix)
    return next((inside for name in ("language_model", "text_model") if (inside := stack._modules.get(name))), stack)


class ArrangedCopies:
    """Copies of weights that the kernels cannot read in place, in their layout."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def of(self, weight: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the copy of a weight. It is made by the first call."""
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight, arrange, arrange(weight.detach()).contiguous().clone()
        return self._copies[id(weight)][2]

    def refresh(self) -> None:
        """Copy the weights' current values, to the same addresses."""
        for weight, arrange, copy in self._copies.values():
            copy.copy_(arrange(weight.detach()))


class Reader:
    """Reader of a causal language model of the Llama kind: its weights, without copies. A family overrides what differs.

    The model may be one of images and text, whose text model is read.
    """

    # A block's norms: before and after attention, before and after the MLP.
    NORMS: ClassVar[tuple[str | None, ...]] = ("input_layernorm", None, "post_attention_layernorm", None)
    OFFSET = 0.0  # of all norms
    READS: ClassVar[frozenset[str]] = frozenset()  # config fields that the family reads besides READ
    # Names in the stack: its blocks, embedding and last norm. Names in a block: attention, and its output projection.
    BLOCKS, EMBEDDING, FINAL, ATTENTION, OUTPUT = "layers", "embed_tokens", "norm", "self_attn", "o_proj"
    MLP, ROTARY = "mlp", "rotary_emb"  # in a block, and in the stack
    HEAD_NORMS = "q_norm", "k_norm"  # in attention
    GATED = "gate_proj", "up_proj", "down_proj"  # in an MLP
    ANGLES: ClassVar[type[HFAngles]] = HFAngles
    INTERLEAVED = False  # whether pairs (2i, 2i + 1) are rotated, which the cache has in another order than the model
    ROTATES = True  # whether any layer has rotary angles
    PARALLEL = False  # whether an MLP reads the stream before attention's update, in all blocks
    ADJACENT = False  # whether a step of one row, too, reads weights that are adjacent in memory as one
    image_positions = True  # whether an image's tokens have positions like a text's

    def __init__(self, model: Any) -> None:
        self.model, self.trunk = model, text_stack(model)
        self.config = model.config if self.trunk is getattr(model, "model", self.trunk) else self.trunk.config
        self.copies = ArrangedCopies()

    @property
    def factor(self) -> float:
        """The factor of what each part adds to the stream, by which a step divides the stream instead."""
        return 1.0

    @property
    def blocks(self) -> Any:
        return getattr(self.trunk, self.BLOCKS)

    @property
    def embedding(self) -> Any:
        return getattr(self.trunk, self.EMBEDDING)

    def attention_of(self, block: Any) -> Any:
        return getattr(block, self.ATTENTION)

    def first_attention(self) -> Any:
        """Return the first block's attention, whose heads are like those of all others."""
        return self.attention_of(self.blocks[0])

    def mlp_of(self, block: Any) -> Any:
        return block._modules.get(self.MLP)

    def projects(self, module: nn.Module) -> bool:
        """Return whether a module that is no nn.Linear is a projection that the reader reads."""
        return False

    def positions(self) -> Tensor | None:
        """Return learnt vectors (L, hidden) that are added to the embeddings of the first L positions."""
        return None

    def pairs(self) -> int:
        """Return the number of pairs of a head that are rotated."""
        return len(self.trunk.rotary_emb.inv_freq)

    def refusal(self, max_length: int) -> str | None:
        """Return why the kernels cannot decode the model for texts of that length; None if they can."""
        if (learnt := self.positions()) is not None and max_length > len(learnt):
            return f"it has {len(learnt)} positions, and max_length is {max_length}"
        rotary = getattr(self.trunk, self.ROTARY, None)
        if any(not frequencies.numel() for frequencies in getattr(rotary, "_buffers", {}).values()):
            width = self.head_dim(self.first_attention())
            return f"partial_rotary_factor of its config rotates less than a pair of its heads' {width} numbers"
        for kind in rope_types(rotary):
            longest = self.longest() if kind == "longrope" else 0
            if kind not in FIXED and not 0 < max_length <= longest:
                beyond = f" beyond {longest} tokens, and max_length is {max_length}" if longest else ""
                return f"its rotary angles ({kind!r}) change with the length of what is read{beyond}"
        if self.activation() is None:
            known = ", ".join(ACTIVATED if isinstance(self, UngatedReader) else ACTIVATIONS)
            return f"its activation is {activation_name(self.config)!r}, the kernels' are {known}"
        if self.head_dim(self.first_attention()) % 2:
            return "its heads have an odd width, and rotation works on pairs"
        if getattr(self.config, "use_bidirectional_attention", False) in (True, "all"):  # "vision": within images alone
            return "its tokens attend to later tokens"
        if why := self.windowless():
            return why
        if option := unread_option(self.config, READ | self.READS):
            return f"its config has {option}, an option that its reader does not know"
        return None

    def windowless(self) -> str | None:
        """Return why the windows of the config are not those of the layers; None if they are.

        Masks of transformers go by the config's types of layers, whatever window a layer has. One of 0 hides every token.
        """
        types = list(getattr(self.config, "layer_types", None) or ())
        if len(types) != len(self.blocks):
            return "its sliding_window is 0" if config_window(self.config) == 0 else None
        for number, (kind, block) in enumerate(zip(types, self.blocks)):
            if kind == WINDOWED and not self.window(self.attention_of(block)):
                return f"layer {number} is of type {kind!r}, and its attention has no window"
        return None

    def longest(self) -> int:
        """Return the length up to which longrope's frequencies are fixed."""
        length = (self.config.rope_parameters or {}).get("original_max_position_embeddings")
        return length or getattr(self.config, "original_max_position_embeddings", 0) or 0

    def activation(self) -> str | None:
        return ACTIVATION_NAMES.get(activation_name(self.config))

    def shape(self) -> Shape:
        c = self.config
        scale = getattr(self.embedding, "embed_scale", None)  # rounded to the weights' dtype when used
        embedded = 1.0 if scale is None else float(scale.to(self.embedding.weight.dtype))
        return Shape(
            hidden=c.hidden_size,
            vocab=self.model.lm_head.weight.shape[0],
            embedded=embedded / self.factor,
            logit_cap=getattr(c, "final_logit_softcapping", None) or 0.0,
        )

    def heads(self, attention: Any) -> tuple[int, int]:
        """Return the numbers of query heads and of key and value heads by the config."""
        return self.config.num_attention_heads, self.kv_heads(attention)

    def kv_heads(self, attention: Any) -> int:
        return getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads

    def scale(self, attention: Any) -> float:
        """Return the factor of the scores."""
        return attention.scaling

    def head_dim(self, attention: Any) -> int:
        return attention.head_dim if hasattr(attention, "head_dim") else attention.head_size

    def angles(self) -> list[Angles]:
        """Return the rotary angles of the model, which a layer's `table` indexes."""
        if not self.ROTATES:
            return [NoAngles(self.head_dim(self.first_attention()) // 2)]
        rotary = getattr(self.trunk, self.ROTARY)
        return [self.ANGLES(rotary, kind) for kind in angle_types(rotary)] or [self.ANGLES(rotary)]

    def layers(self) -> list[LayerWeights]:
        return [LayerWeights(self.attention(block), self.mlp(block)) for block in self.blocks]

    def norm(self, module: Any) -> Any:
        """Return the weights of a norm, a Norm or a LayerNorm."""
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon  # Hugging Face has both names
        return Norm(weight_of(module), float(eps) / self.factor**2, self.OFFSET)

    def final_norm(self) -> Any:
        return self.norm(getattr(self.trunk, self.FINAL))

    def norms(self, parent: Any, names: Sequence[str | None]) -> list[Any]:
        modules = [name and getattr(parent, name, None) for name in names]
        return [None if module is None else self.norm(module) for module in modules]

    def attention(self, block: Any) -> AttentionWeights:
        attention, (before, after) = self.attention_of(block), self.norms(block, self.NORMS[:2])
        q_norm, k_norm = self.norms(attention, self.HEAD_NORMS)
        q, k, v = self.projections(attention)
        return AttentionWeights(
            norm=before,
            q=q,
            k=k,
            v=v,
            o=self.linear(getattr(attention, self.OUTPUT)),
            head_dim=self.head_dim(attention),
            scale=self.scale(attention),
            q_norm=q_norm,
            k_norm=k_norm,
            window=self.window(attention),
            table=self.table(attention),
            cap=self.cap(attention),
            post_norm=after,
            interleaved=self.pairs() if self.INTERLEAVED else 0,
        )

    def linear(self, layer: Any) -> Linear:
        return linear_of(layer)

    def projections(self, attention: Any) -> list[Linear]:
        """Return the weights of q, k and v, which may share one parameter."""
        if "qkv_proj" not in attention._modules:
            return [linear_of(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        c = self.config
        heads = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
        return parts_of(attention.qkv_proj, [count * attention.head_dim for count in heads])

    def window(self, attention: Any) -> int:
        return layer_window(attention) or 0

    def table(self, attention: Any) -> int | None:
        if not self.ROTATES or not getattr(attention, "use_rope", True):
            return None
        kinds = angle_types(getattr(self.trunk, self.ROTARY, None))  # our own trunk has its angles elsewhere
        return kinds.index(layer_type(attention)) if kinds else 0

    def cap(self, attention: Any) -> float:
        return 0.0

    def parallel(self, block: Any) -> bool:
        return self.PARALLEL or getattr(block, "use_parallel_residual", False)

    def mlp_norms(self, block: Any) -> list[Any]:
        """Return the norms before and after the MLP. A parallel block without one before it shares attention's."""
        before, after = self.norms(block, self.NORMS[2:])
        if before is None and self.parallel(block):
            (before,) = self.norms(block, self.NORMS[:1])
        return [before, after]

    def mlp(self, block: Any) -> Any:
        (before, after), mlp = self.mlp_norms(block), self.mlp_of(block)
        gate, up = self.gate_up(mlp)
        activation = self.activation()
        assert activation is not None
        down = linear_of(getattr(mlp, self.GATED[2]))
        return DenseWeights(before, gate, up, down, activation, after, self.parallel(block))

    def gate_up(self, mlp: Any) -> list[Linear]:
        """Return the weights of gate and up, which may share one parameter."""
        if "gate_up_proj" in mlp._modules:
            return parts_of(mlp.gate_up_proj, [self.config.intermediate_size] * 2)
        return [linear_of(getattr(mlp, name)) for name in self.GATED[:2]]

    def together(self, block: Any) -> list[list[Any]]:
        """Return the linear layers of a block that read the same input, which are one GEMM if their weights are contiguous."""
        parts = (self.attention_of(block), ("q_proj", "k_proj", "v_proj")), (self.mlp_of(block), self.GATED[:2])
        groups = [[getattr(part, name, None) for name in names] for part, names in parts if hasattr(part, names[0])]
        return [[layer for layer in group if layer is not None] for group in groups]

    def layer_inputs(self) -> LayerInputs | None:
        """Return what computes the layers' separate inputs from a token; None if they have none."""
        return None

    def routers(self) -> dict[int, nn.Module]:
        """Return the router modules by layer."""
        return {}


class LayerNormReader(Reader):
    """Reader of models whose norms of the stream are LayerNorms."""

    def norm(self, module: Any) -> LayerNorm:
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        return LayerNorm(weight_of(module), module._parameters.get("bias"), float(eps))


class UngatedReader(LayerNormReader):
    """Reader of models whose MLPs have no gate besides. LAYERS: names of its two layers."""

    LAYERS: ClassVar[tuple[str, str]] = ("c_fc", "c_proj")

    def activation(self) -> str | None:
        return UNGATED_NAMES.get(activation_name(self.config))

    def mlp(self, block: Any) -> UngatedWeights:
        before, after = self.mlp_norms(block)
        up, down = (self.linear(getattr(self.mlp_of(block), name)) for name in self.LAYERS)
        activation = self.activation()
        assert activation is not None
        return UngatedWeights(before, up, down, activation, after, self.parallel(block))


class LearntReader(UngatedReader):
    """Reader of models with learnt positions and no rotation. POSITIONS: their table's name. SKIPPED: rows before the first"""

    POSITIONS, SKIPPED = "wpe", 0
    ROTATES = False

    def positions(self) -> Tensor:
        return weight_of(getattr(self.trunk, self.POSITIONS)).detach()[self.SKIPPED :]


def weight_of(module: Any) -> Tensor:
    return getattr(module, "base_layer", module)._parameters["weight"]  # that of a PEFT layer is in the one that it adapts


def linear_of(layer: Any) -> Linear:
    """Return the current weights of a projection, which may be a PEFT layer."""
    site = site_of(layer)
    if site.why is not None:  # decode/weight_view.py refuses layers that a step cannot read
        return Linear(weight_of(layer), layer.bias)
    return Linear(site.weight, site.bias, tuple(site.adapters))


def parts_of(layer: Any, counts: list[int]) -> list[Linear]:
    """Return the weights of several layers that share one parameter, and their adapters, as views."""
    weight, bias, adapters = linear_of(layer)
    layers, start = [], 0
    for count in counts:
        part = slice(start, start + count)
        start = part.stop
        lows = tuple(type(low)(low.a, low.b.detach()[part], low.scale) for low in adapters)
        layers.append(Linear(some_rows(weight, part), None if bias is None else bias.detach()[part], lows))
    return layers
