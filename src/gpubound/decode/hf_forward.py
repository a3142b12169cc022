"""Runner of any causal language model of transformers: its own forward over a static cache. Slow, but general.

`step(token_B, position_B)` returns logits of rows that have different positions. transformers' StaticCache has one position for
all rows, and its masks are built from values that it reads back to the host. So every row has its own position in
`RowCache`: `aim` sets a range of a prompt, or one position in each row, before a forward, and every attention layer calls
`update`, which writes there and returns the keys and values that the attention reads. The runner builds the masks on the device
from the positions: 4-D ones, which models take unchanged, and one for each kind of layer where full and sliding attention mix.

`check_static_cache` refuses what no mask can correct, as far as a model's build shows it. The rest is tried when the runner is
built: logits of rows at different positions must be those of the model's own forward, and a step must not make the host wait.

A masked position enters the product with the values with a weight of zero, and zero times NaN is NaN. So buffers begin as
zeros, and a prefill clears the positions after its prompts: beyond a row's live length, all values are finite and have no
effect.

Shapes: B rows, T prompt tokens, L max_length, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..device import without_autocast
from ..errors import StallError
from ..layers.linear_product import multiply_by_records
from ..models.reader import has_field
from ..models.registry import NAMES, cache_in, cache_name, cache_word
from ..watch.guard import no_stall
from .model_watch import TensorWatch
from .runner import ModelRunner, RunnerConfig, check_room, config_value, own_forward, random_ids, summary

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
    if not hasattr(config, "vocab_size"):
        return "whose config has no vocab_size, wanted a language model, which returns logits of tokens; call its own methods"
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


CHUNK = 1024  # prompt tokens that one forward of a prefill takes: its mask is CHUNK x L bytes
SCORED = 256  # tokens whose full logits are in memory at a time while a text is scored

# Largest error of logits against the model's own, as a fraction of the largest: products of other shapes round differently (in
# fp32 by TF32, where the user allows it). A mask that does not reach the attention, or a position off by one, is far above.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class ListsAsSlices(TorchFunctionMode):
    """x[..., [-2]] makes an index tensor from the list and uploads it in every call; x[..., -2:-1] has the same values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            lists = [isinstance(part, list) and len(part) == 1 and isinstance(part[0], int) for part in args[1]]
            plain = all(known or part is None or isinstance(part, slice | type(...)) for known, part in zip(lists, args[1]))
            if plain and sum(lists) == 1:
                index = (slice(part[0], part[0] + 1 or None) if known else part for known, part in zip(lists, args[1]))
                args = args[0], tuple(index)
        return func(*args, **(kwargs or {}))


class StaticCacheRunner(ModelRunner):
    """Run a model's own forward over a static cache, from its live weights.

    of  the caller's model, where `model` is a transformers model over its weights
    """

    refills = True

    def __init__(self, model: PreTrainedModel, build: RunnerConfig, path: str = "", of: nn.Module | None = None):
        max_batch, max_length = build.max_batch, build.max_length
        self.of: nn.Module = model if of is None else of
        self.calls = self.of is model
        config, likes = check_static_cache(model, max_length, self.of)
        self.model, self.config, self.path = model, config, path
        self.kernels = f"the model's own forward: {path}"
        self.max_batch, self.max_length, self.tokens = max_batch, max_length, build.tokens
        weight = cast(Tensor, model.get_input_embeddings().weight)
        self.device, self.dtype = weight.device, weight.dtype
        self.attention = config._attn_implementation
        self.windows = windows(model, config, likes)
        self.experts, self.routing = routing(model, self.device, self.dtype)
        check_room(cache_bytes(config, len(likes), max_batch, max_length, self.dtype), self.device, build)
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
        self.cache = RowCache(likes, max_batch, max_length)
        self.cached = {cache_word(model.forward): self.cache}
        self.place_L = torch.arange(max_length, device=self.device)
        self.row_B = torch.arange(max_batch, device=self.device)
        self.slices = False
        self.rebind()
        self.error = self._try(weight.shape[0])

    def buffers(self) -> list[Tensor]:
        """Return the keys and values of every layer that has some, each (max_batch, heads, max_length, width)."""
        return [buffer for layer in self.cache.own() for buffer in layer.buffers()]

    def prefill(self, ids_BT: Tensor, lengths_B: Tensor | None = None) -> None:
        """Fill positions 0 to T-1 of the first rows. Values beyond a row's length are overwritten before they are read."""
        for buffer in self.buffers():
            buffer[: len(ids_BT), :, ids_BT.shape[1] :].zero_()  # a NaN of an earlier sequence would pass through the mask
        self._prompt(ids_BT, len(ids_BT))

    def refill(self, ids_BT: Tensor, lengths_B: Tensor, rows_BC: Tensor, start: int = 0) -> None:
        for buffer in self.buffers():
            buffer[:, :, start + ids_BT.shape[1] :].index_fill_(0, rows_BC.flatten(), 0)
        self._prompt(ids_BT, rows_BC, start)

    def _prompt(self, ids_BT: Tensor, targets: int | Tensor, begin: int = 0) -> None:
        rows, tokens = ids_BT.shape
        for at in range(0, tokens, CHUNK):
            start, end = begin + at, begin + min(at + CHUNK, tokens)
            self.cache.aim(Prompt(targets, start, end))
            self._forward(ids_BT[:, at : at + CHUNK].long(), self.place_L[None, start:end].expand(rows, -1), end)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for buffer in self.buffers():
            buffer[targets, :, :length] = buffer[sources, :, :length]
            buffer[:, :, length:].index_fill_(0, targets, 0)

    def cache_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def step(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        """Return the logits (B, V) after one token of each of the first rows; (B T, V) after T tokens, both (B, T).

        A full row writes its last position again, and its logits are not used.
        """
        rows = len(token_B)
        token_BT, place_BT = token_B.long().view(rows, -1), position_B.long().clamp(max=self.max_length - 1).view(rows, -1)
        self.cache.aim(StepTarget(self.row_B[:rows, None], place_BT))
        with self._routed(), ListsAsSlices() if self.slices else nullcontext():
            logits_BTV = self._forward(token_BT, place_BT, self.max_length, every=place_BT.shape[1] > 1)
        count = place_BT.numel()
        return self.logits[:count].copy_(logits_BTV[:, -place_BT.shape[1] :].reshape(count, -1))

    def logits_after(self, ids_T: Tensor) -> Iterator[Tensor]:
        for start in range(0, len(ids_T), SCORED):
            end = min(start + SCORED, len(ids_T))
            self.cache.aim(Prompt(1, start, end))
            yield self._forward(ids_T[None, start:end].long(), self.place_L[None, start:end], end, every=True)[0]

    def moved(self) -> str | None:
        return self.weights.moved()

    def rebind(self) -> None:
        multiply_by_records(self.model, everywhere=True)  # a model over another model's parameters has different forwards
        self.weights = TensorWatch(self.model, "_parameters", "_buffers")

    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes of the weights, of experts those for one token, and of the keys and values that layers attend to."""
        read = bytes_read(self.model, self.config)
        for layer in self.cache.own():
            place = sum(buffer[0, :, 0].nbytes for buffer in layer.buffers())
            read += place * sum(min(length, layer.window or length) for length in live)
        return read

    def locate(self, ids_T: Tensor) -> str:
        return first_not_finite(self.model, ids_T)

    def _forward(self, ids_BT: Tensor, place_BT: Tensor, end: int, every: bool = False) -> Tensor:
        if self.of.training:
            raise ValueError(in_training(self.of))
        with torch.no_grad(), without_autocast(self.device):
            return self.model(
                input_ids=ids_BT,
                attention_mask=self._masks(place_BT, end),
                position_ids=place_BT,
                use_cache=True,
                return_dict=True,
                **self.cached,
                **({} if every else self.last_only),
            ).logits

    def _masks(self, place_BT: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Return masks (B, 1, T, end) in the attention's format: one, or one for each kind of layer."""
        query, key = place_BT[:, None, :, None], self.place_L[:end]
        masks = {}
        for kind, window in self.windows.items():
            sees = key <= query
            if window is not None:
                sees = sees & (key // window == query // window if kind == CHUNKED else key > query - window)
            if self.attention == "eager":  # which adds its mask to the scores
                sees = torch.zeros_like(sees, dtype=self.dtype).masked_fill_(~sees, torch.finfo(self.dtype).min)
            masks[kind] = sees
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @contextmanager
    def _routed(self) -> Iterator[None]:
        """Compute experts by the implementation that a step needs, and restore the model's setting."""
        if self.routing is None:
            yield
            return
        self.model.set_experts_implementation(self.routing)
        try:
            yield
        finally:
            self.model.set_experts_implementation(self.experts)

    def _try(self, ids: int) -> float:
        """Return the error of the logits against the model's own forward, for rows at two positions.

        Eight tokens are tried, or a few more than a short window has. A step runs under the guard for stalls.
        """
        short = [window + 4 for window in self.windows.values() if window is not None and window <= 64]
        tokens = min(max([8, *short]), self.max_length)
        ids_T = random_ids(ids, tokens, self.device)
        own_TV = self._own_logits(ids_T)
        self.vocab = own_TV.shape[-1]
        self.logits = torch.zeros(self.max_batch * self.tokens, self.vocab, device=self.device, dtype=torch.float32)
        place_B = (tokens - 1 - self.row_B % 2).clamp(min=0)
        last_BT = self.place_L[max(0, tokens - self.tokens) : tokens].expand(self.max_batch, -1)
        last_BT = last_BT if self.tokens > 1 else last_BT[:, 0]
        with self._refusing(ids_T):
            self.prefill(ids_T[:-1].expand(self.max_batch, -1))
            first = self.step(ids_T[place_B], place_B) - own_TV[place_B]
            self._guarded(ids_T[last_BT], last_BT)
        last = self.logits[: last_BT.numel()] - own_TV[last_BT].view(-1, self.vocab)
        off = torch.cat([first, last]).nan_to_num().abs().max() / own_TV.nan_to_num().abs().max()
        error, limit = off.item(), TOLERANCE.get(self.dtype, 1e-1)
        if not error <= limit:
            why = "its attention does not follow the mask and the positions that it is given"
            if self.of is not self.model:
                name = type(self.model).__name__
                why = f"transformers' {name} over its weights runs none of its hooks, and no replaced forward; take them off"
            raise ValueError(
                f"decoder: model: got {type(self.of).__name__}, whose logits with a static cache differ from its own by "
                f"{error:.2g} of the largest, wanted at most {limit:g}: {why}."
            )
        for buffer in self.buffers():
            buffer.zero_()
        return error

    def _own_logits(self, ids_T: Tensor) -> Tensor:
        """Return the logits (T, V) of the caller's model, without a cache."""
        with torch.no_grad(), without_autocast(self.device), own_forward(self.of):
            if self.of is self.model:
                return self.model(input_ids=ids_T[None], use_cache=False, return_dict=True).logits[0].float()
            own_TV = self.of(ids_T[None])[0].float()
        self.rebind()  # a first forward of ours joins weights into one buffer, and so moves them
        return own_TV

    def _guarded(self, token_B: Tensor, position_B: Tensor) -> None:
        """Run a step that must not wait for the device; where a list index makes it wait, read lists as slices."""
        stalls = []
        for slices in (False, True):
            self.slices = slices
            try:
                with no_stall():
                    self.step(token_B, position_B)
                return
            except StallError as stall:
                stalls.append(stall)
        raise stalls[0]

    @contextmanager
    def _refusing(self, ids_T: Tensor) -> Iterator[None]:
        name = type(self.of).__name__
        try:
            yield
        except StallError as stall:
            raise ValueError(
                f"decoder: model: got {name}, whose forward makes the host wait in every token, wanted one that a CUDA "
                f"graph can hold: {stall}"
            ) from stall
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            # With the cache that it makes itself, too?
            with torch.no_grad(), without_autocast(self.device), own_forward(self.of, " with its own cache"):
                output = self.model(input_ids=ids_T[None, :-1], use_cache=True, return_dict=True)
                cached = {cache_word(self.model.forward): cache_in(output)}
                self.model(input_ids=ids_T[None, -1:], use_cache=True, return_dict=True, **cached)
            raise ValueError(
                f"decoder: model: got {name}, whose forward fails with a static cache ({summary(failure)}), wanted one that "
                f"takes a mask and a position for every row."
            ) from failure

    def report(self) -> list[tuple[str, str, str]]:
        buffers = self.buffers()
        size = sum(buffer.nbytes for buffer in buffers) / 2**20
        local = "".join(f"; {kind} of {window} by its mask" for kind, window in self.windows.items() if window is not None)
        named = f"{type(self.model).__name__}.forward, static cache"
        why = "the model's own modules run as they are; a graph takes their launches from the host"
        cost = f"rows stand at their own positions; cost follows max_length, not the live length{local}"
        rows = [
            ("forward", named, why),
            ("attention", f"{self.attention}, masked, over all {self.max_length} places", cost),
            ("cache", f"{len(buffers) // 2} layers, {size:.1f} MiB, {_short(buffers[0].dtype)}", "a device index for each row"),
        ]
        if self.experts:
            rows.append(self._experts_row())
        if self.slices:
            rows.append(("list indices", "read as slices", "a list index is uploaded in every call, and makes the host wait"))
        watched = (
            "on a CPU nothing waits: stalls not watched for" if self.device.type == "cpu" else "no stall in a guarded step"
        )
        return [*rows, ("trial", f"logits within {self.error:.1e} of the model's own", f"rows at two positions; {watched}")]

    def _experts_row(self) -> tuple[str, str, str]:
        own = ", ".join(sorted({name for name in self.experts.values() if name}))
        if self.routing is None:
            where = "a CPU has no host to wait for" if self.device.type == "cpu" else "it takes the routing on the device"
            return "experts", own, f"the model's own setting; {where}"
        step = ", ".join(sorted({name for name in self.routing.values() if name}))
        why = f"{own} in {_short(self.dtype)} reads the routing back to the host; {step} copies the chosen experts' weights"
        return "experts", f"{step} in steps, {own} in prefill", why


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
