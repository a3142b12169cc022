"""What the general body reads off a Hugging Face model: whether a static cache can hold it, what its layers need there, and
its weights.

What is refused here is what shows in the model's build. The rest shows when StaticCacheRunner tries the model.

And the static cache itself, in the shape that Hugging Face's models call. transformers' StaticCache has one position for all
its rows. Here rows stand at positions of their own: a forward is aimed first, at a stretch of a prompt or at one place in each
row; `update`, which every attention layer calls, writes there and hands back what the attention shall read.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..device import without_autocast
from ..models.placing import NAMES, cache_name
from .runner import config_value

CHUNKED = "chunked_attention"


def in_training(model: nn.Module) -> str:
    return (
        f"decoder: model: got {type(model).__name__} in training mode, wanted eval mode, where dropout is off; call "
        f"model.eval() first."
    )


def check_static_cache(model: PreTrainedModel, max_length: int, of: nn.Module) -> tuple[Any, list[Any]]:
    """(the text model's config, Hugging Face's own cache layers for it), or the reason why no static cache can hold it.

    `of` is the model that the user has given, by whose name it is refused.
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
    """What in the model's build keeps it from a static cache, as '<which ...>, wanted <...>'."""
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
    """What in the rotary table would let one row's length change another row's tokens."""
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
    """Hugging Face's cache layers for `config`: its word on which layers keep what."""
    wanted = "wanted keys and values of full or sliding attention alone."
    try:
        likes = DynamicCache(config=config).layers
    except KeyError as kind:
        raise ValueError(f"decoder: model: got {name} with layers of the kind {kind}, {wanted}") from kind
    for like in likes:
        if type(like) not in (DynamicLayer, DynamicSlidingWindowLayer) and type(like).__name__ != "DummyLayer":
            raise ValueError(f"decoder: model: got {name} with a {type(like).__name__} in its cache, {wanted}")
    return likes


def cache_bytes(config: Any, layers: int, rows: int, length: int, dtype: torch.dtype) -> int:
    """Of keys, values and logits, by the names that most configs have; a lower bound for the others."""
    heads = config_value(config, "num_attention_heads") or 1
    kv_heads = config_value(config, "num_key_value_heads") or heads
    width = config_value(config, "head_dim") or (config_value(config, "hidden_size") or heads) // heads
    return rows * (2 * layers * kv_heads * width * length * dtype.itemsize + 4 * (config_value(config, "vocab_size") or 0))


def windows(model: PreTrainedModel, config: Any, likes: list[Any]) -> dict[str, int | None]:
    """The window of each kind of layer, by the name that the model's dict of masks has for it. None: it sees everything."""
    local = "sliding_attention" if config_value(config, "sliding_window") else CHUNKED
    kinds = getattr(config, "layer_types", None) or [local if like.is_sliding else "full_attention" for like in likes]
    found: dict[str, int | None] = {}
    for kind, like in zip(kinds, likes):
        if isinstance(like, DynamicLayer):
            window = getattr(like, "sliding_window", None)
            if found.setdefault(kind, window) != window:
                raise ValueError(
                    f"decoder: model: got {type(model).__name__} with windows of {found[kind]} and {window} in layers of "
                    f"the kind {kind}, wanted one window for each kind."
                )
    return found


def routing(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(how the model computes its experts: {} if it has none, how a step must instead: None where that will do).

    'eager' asks the host which experts were hit, and so does 'grouped_mm' but for bf16 on sm_90 and later, where torch has a
    kernel that takes the counts on the device. 'batched_mm' never does: it copies the chosen experts' weights.
    """
    if not any(hasattr(module, "is_concatenated") for module in model.modules()):  # set by @use_experts_implementation
        return {}, None
    held = model.get_experts_implementation()
    if device.type == "cpu":
        return held, None
    kernel = dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    waits = {"eager"} if kernel else {"eager", "grouped_mm"}
    if not waits & set(held.values()):
        return held, None
    return held, {part: "batched_mm" if name in waits else name for part, name in held.items()}


def bytes_read(model: nn.Module, config: Any) -> int:
    """Of weights in one step, at the least: each once, of an embedding single rows, of the experts what one token chooses."""
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
    """The module that first gives a NaN or infinity for the sequence ids (T,). Reads every module's output back."""
    names = {module: name for name, module in model.named_modules() if name}
    found: list[str] = []

    def look(module, inputs, output) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        bad = any(isinstance(t, Tensor) and t.is_floating_point() and not t.isfinite().all() for t in tensors)
        if bad and module in names:
            found.append(names[module])

    handle = register_module_forward_hook(look)
    try:
        with torch.no_grad(), without_autocast(ids.device):
            model(input_ids=ids[None], use_cache=False)
    finally:
        handle.remove()
    return found[0] if found else "none of its modules in a pass without a cache"


@dataclass(frozen=True)
class Prompt:
    """Where a prefill writes: places start to end of the first `rows` rows. What it reads ends there too."""

    rows: int
    start: int
    end: int

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[: self.rows, :, self.start : self.end] = new
        return buffer[: self.rows, :, : self.end]


@dataclass(frozen=True)
class StepTarget:
    """Where a step writes: each row at its own places, told by tensors on the device. It reads the whole buffer."""

    row_B1: Tensor
    place_BT: Tensor

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        # index_put_ itself reads the largest index back to the host under use_deterministic_algorithms; unsafe=True leaves
        # that check out. The places are clamped before, and no two rows share one.
        index, new = (self.row_B1, self.place_BT), new.transpose(1, 2).to(buffer.dtype)
        torch._index_put_impl_(buffer.transpose(1, 2), index, new, accumulate=False, unsafe=True)
        return buffer[: len(self.row_B1)]


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer. The first forward shows their shape; from then on they stay where they are."""

    def __init__(self, rows: int, length: int, window: int | None):
        super().__init__()
        self.rows, self.length, self.window = rows, length, window
        self.where: Prompt | StepTarget | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(self.rows, new.shape[1], self.length, new.shape[3], dtype=new.dtype, device=new.device)
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def buffers(self) -> list[Tensor]:
        """None before a forward has reached this layer."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.where is not None and self.keys is not None and self.values is not None
        return self.where.write(self.keys, key_states), self.where.write(self.values, value_states)

    def get_seq_length(self) -> int:
        """Asked by models that would count positions from here. They are given their positions, so it has no effect."""
        return self.where.start if isinstance(self.where, Prompt) else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.where.end if isinstance(self.where, Prompt) else self.length), 0

    def get_max_length(self) -> int:
        return self.length


class RowCache(Cache):
    """A RowLayer for each layer that keeps keys and values of its own; the empty ones of `likes` stay as they are."""

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
            layer.where = where
