"""Static KV cache for transformers' models, checks whether it serves a model, and facts about a model's layers and weights.

transformers' StaticCache has one position for all rows. In `RowCache`, every row has its own: `aim` sets a range of a prompt,
or one position in each row, before a forward. Every attention layer calls `update`, which writes there and returns the keys
and values that the attention reads.

`check_static_cache` refuses what a model's build shows. StaticCacheRunner finds the rest when it tries the model.
"""

from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..device import without_autocast
from ..models.reader import has_field
from ..models.registry import NAMES, cache_name
from .runner import config_value

CHUNKED = "chunked_attention"


def in_training(model: nn.Module) -> str:
    return (
        f"decoder: model: got {type(model).__name__} in training mode, wanted eval mode, where dropout is off; call "
        f"model.eval() first."
    )


def check_static_cache(model: PreTrainedModel, max_length: int, of: nn.Module) -> tuple[Any, list[Any]]:
    """Return the text model's config and transformers' cache layers for it. Raise ValueError where no static cache serves it.

    of  the caller's model, which errors name
    """
    name = type(of).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"decoder: model: got {name}, wanted a transformers PreTrainedModel with a language-model head; of a PEFT model "
            f"pass model.get_base_model()."
        )
    config = model.config.get_text_config(decoder=True)
    if unfit := _build(model, config) or _rotary(config, max_length):
        raise ValueError(f"decoder: model: got {name}, {unfit}.")
    if (most := config_value(config, "max_position_embeddings")) and max_length > most:
        raise ValueError(
            f"decoder: max_length: got {max_length}, wanted at most {most}, the positions that {name} is made for "
            f"(config.max_position_embeddings); pass a smaller max_length."
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            f"decoder: model: got {name} on {' and '.join(devices)}, wanted all of it on one device; move it there."
        )
    if of.training:
        raise ValueError(in_training(of))
    return config, _layers(name, config)


def _build(model: PreTrainedModel, config: Any) -> str | None:
    """Return why the model's build excludes a static cache, as '<which ...>, wanted <...>'; None if it does not."""
    takes = signature(model.forward).parameters
    missing = [key for key in ("attention_mask", "position_ids") if key not in takes]
    missing += [] if cache_name(model.forward) else [NAMES[0]]
    if model.config.is_encoder_decoder:
        return "an encoder-decoder, wanted a decoder alone"
    if getattr(model, "_is_stateful", False):
        return "which carries a recurrent state from token to token, wanted attention over keys and values alone"
    if missing:
        return f"whose forward takes no {' and no '.join(missing)}, wanted one that is given its positions, mask and cache"
    if getattr(config, "alibi", False):
        return "whose alibi bias comes from a 2-D mask of one length for all rows, wanted rotary or learned positions"
    if config.model_type == "gpt_neo":
        return "which cuts its causal mask out of a table by the cache's length, wanted one that uses the mask it is given"
    if config._attn_implementation not in ("sdpa", "eager"):
        return (
            f"whose attention is {config._attn_implementation}, wanted sdpa or eager, which take a mask for every row; call "
            f"model.set_attn_implementation('sdpa')"
        )
    if getattr(model, "quantization_method", None) == "bitsandbytes":  # an enum of strings
        return "quantised by bitsandbytes, wanted weights in 16 or 32 bits: no capture of its kernels has been proven"
    return None


def _rotary(config: Any, max_length: int) -> str | None:
    """Return how one row's length would change another row's tokens by the rotary table; None if it would not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        most = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if rope.get("rope_type") == "dynamic":
            return "whose rotary table grows with the longest row ('dynamic'), wanted a table that stays"
        if rope.get("rope_type") == "longrope" and most and max_length > most:
            return (
                f"whose rotary table changes for all rows when one passes {most} tokens ('longrope'), wanted a max_length "
                f"of at most {most}, got {max_length}"
            )
    return None


def _layers(name: str, config: Any) -> list[Any]:
    """Return transformers' cache layers for `config`, which show what each layer caches."""
    wanted = "wanted keys and values of full or sliding attention alone."
    typed = has_field(config, "sliding_window") or getattr(config, "layer_types", None)
    if not typed and getattr(config, "sliding_window", None):
        config = copy(config)  # the family ignores the window, and transformers' cache would not
        config.sliding_window = None
    try:
        likes = DynamicCache(config=config).layers
    except KeyError as kind:
        raise ValueError(f"decoder: model: got {name} with layers of the kind {kind}, {wanted}") from kind
    for like in likes:
        if type(like) not in (DynamicLayer, DynamicSlidingWindowLayer) and type(like).__name__ != "DummyLayer":
            raise ValueError(f"decoder: model: got {name} with a {type(like).__name__} in its cache, {wanted}")
    return likes


def cache_bytes(config: Any, layers: int, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys, values and logits, by the names of most configs; a lower bound for others."""
    heads = config_value(config, "num_attention_heads") or 1
    kv_heads = config_value(config, "num_key_value_heads") or heads
    width = config_value(config, "head_dim") or (config_value(config, "hidden_size") or heads) // heads
    return rows * (2 * layers * kv_heads * width * length * dtype.itemsize + 4 * (config_value(config, "vocab_size") or 0))


def windows(model: PreTrainedModel, config: Any, likes: list[Any]) -> dict[str, int | None]:
    """Return the window of each kind of layer, by its name in the model's dict of masks. None: full attention."""
    local = "sliding_attention" if config_value(config, "sliding_window") else CHUNKED
    types = getattr(config, "layer_types", None) or [local if like.is_sliding else "full_attention" for like in likes]
    result: dict[str, int | None] = {}
    for kind, like in zip(types, likes):
        if isinstance(like, DynamicLayer):
            window = getattr(like, "sliding_window", None)
            if result.setdefault(kind, window) != window:
                raise ValueError(
                    f"decoder: model: got {type(model).__name__} with windows of {result[kind]} and {window} in layers of "
                    f"the kind {kind}, wanted one window for each kind."
                )
    return result


def routing(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return how the model computes its experts ({} without any), and how a step must compute them (None: the same way).

    'eager' reads the chosen experts back to the host, and so does 'grouped_mm', except for bf16 on sm_90 and later, where torch
    has a kernel that takes the counts on the device. 'batched_mm' does not: it copies the chosen experts' weights.
    """
    if not any(hasattr(module, "is_concatenated") for module in model.modules()):  # set by @use_experts_implementation
        return {}, None
    own = model.get_experts_implementation()
    if device.type == "cpu":
        return own, None
    kernel = dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    waits = {"eager"} if kernel else {"eager", "grouped_mm"}
    if not waits & set(own.values()):
        return own, None
    return own, {part: "batched_mm" if name in waits else name for part, name in own.items()}


def bytes_read(model: nn.Module, config: Any) -> int:
    """Return the least bytes of weights that a step reads: all except embeddings, and of experts those that one token uses."""
    read: dict[int, int] = {}
    chosen: Any = config_value(config, "num_experts_per_tok")
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            routed: Any = module if chosen and hasattr(module, "is_concatenated") else None  # Hugging Face's expert modules
            for weight in module._parameters.values():
                if weight is not None:
                    read[weight.data_ptr()] = weight.nbytes * chosen // routed.num_experts if routed else weight.nbytes
    return sum(read.values())


def first_not_finite(model: nn.Module, ids: Tensor) -> str:
    """Return the module that first returns a NaN or infinity for the sequence ids (T,). Synchronises after every module."""
    names = {module: name for name, module in model.named_modules() if name}
    modules: list[str] = []

    def look(module, inputs, output) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        bad = any(isinstance(t, Tensor) and t.is_floating_point() and not t.isfinite().all() for t in tensors)
        if bad and module in names:
            modules.append(names[module])

    with register_module_forward_hook(look), torch.no_grad(), without_autocast(ids.device):
        model(input_ids=ids[None], use_cache=False)
    return modules[0] if modules else "none of its modules in a pass without a cache"


@dataclass(frozen=True)
class Prompt:
    """Target of a prefill: positions start to end of the first `rows` rows, which attention reads up to `end`.

    rows  or a tensor (B, C): of rows that get C copies of each prompt
    """

    rows: int | Tensor
    start: int
    end: int

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        if isinstance(self.rows, Tensor):
            buffer[self.rows, :, self.start : self.end] = new[:, None]
            return buffer[self.rows[:, 0], :, : self.end]
        buffer[: self.rows, :, self.start : self.end] = new
        return buffer[: self.rows, :, : self.end]


@dataclass(frozen=True)
class StepTarget:
    """Target of a step: positions of each row, in tensors on the device. Attention reads the complete buffer."""

    row_B1: Tensor
    place_BT: Tensor

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        # Under use_deterministic_algorithms, index_put_ reads the largest index back to the host; unsafe=True omits that check.
        # The positions are clamped before, and no two rows share one.
        index, new = (self.row_B1, self.place_BT), new.transpose(1, 2).to(buffer.dtype)
        torch._index_put_impl_(buffer.transpose(1, 2), index, new, accumulate=False, unsafe=True)
        return buffer[: len(self.row_B1)]


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, allocated by the first forward, which shows their shape."""

    def __init__(self, rows: int, length: int, window: int | None):
        super().__init__()
        self.rows, self.length, self.window = rows, length, window
        self.target: Prompt | StepTarget | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(self.rows, new.shape[1], self.length, new.shape[3], dtype=new.dtype, device=new.device)
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def buffers(self) -> list[Tensor]:
        """Return keys and values; nothing before the first forward."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.target is not None and self.keys is not None and self.values is not None
        return self.target.write(self.keys, key_states), self.target.write(self.values, value_states)

    def get_seq_length(self) -> int:
        """Return the length for models that derive positions from it. Positions are passed, so it has no effect."""
        return self.target.start if isinstance(self.target, Prompt) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.target.end if isinstance(self.target, Prompt) else self.length), 0

    def get_max_length(self) -> int:
        return self.length


class RowCache(Cache):
    """A RowLayer for each layer with keys and values; layers of `likes` without any stay unchanged."""

    def __init__(self, likes: list[Any], rows: int, length: int):
        super().__init__(
            layers=[
                RowLayer(rows, length, getattr(like, "sliding_window", None)) if isinstance(like, DynamicLayer) else like
                for like in likes
            ]
        )

    def own(self) -> list[RowLayer]:
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    def aim(self, where: Prompt | StepTarget) -> None:
        for layer in self.own():
            layer.target = where
