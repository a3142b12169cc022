"""Runner of any causal language model of transformers: its own forward over a static cache. Slow, but general.

`step(token_B, position_B)` returns logits of rows that have different positions. transformers builds its masks from values that
it reads back to the host, for one position of all rows. So the runner builds the masks on the device from the positions: 4-D
ones, which models take unchanged, and one for each kind of layer where full and sliding attention mix.

`check_static_cache` refuses what no mask can correct. The rest is tried when the runner is built: logits of rows at different
positions must be those of the model's own forward, and a step must not make the host wait.

A masked position enters the product with the values with a weight of zero, and zero times NaN is NaN. So buffers begin as
zeros, and a prefill clears the positions after its prompts: beyond a row's live length, all values are finite and have no
effect.

Shapes: B rows, T prompt tokens, L max_length, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..device import without_autocast
from ..errors import StallError
from ..layers.linear_product import multiply_by_records
from ..models.registry import cache_in, cache_word
from ..watch.guard import no_stall
from .hf_cache import (
    CHUNKED,
    Prompt,
    RowCache,
    StepTarget,
    bytes_read,
    cache_bytes,
    check_static_cache,
    first_not_finite,
    in_training,
    routing,
    windows,
)
from .model_watch import TensorWatch
from .runner import ModelRunner, RunnerConfig, check_room, own_forward, random_ids, summary

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
            self._try_own_cache(ids_T)
            raise ValueError(
                f"decoder: model: got {name}, whose forward fails with a static cache ({summary(failure)}), wanted one that "
                f"takes a mask and a position for every row."
            ) from failure

    def _try_own_cache(self, ids_T: Tensor) -> None:
        """Raise a ValueError where the model's forward fails with the cache that it makes itself, too."""
        with torch.no_grad(), without_autocast(self.device), own_forward(self.of, " with its own cache"):
            output = self.model(input_ids=ids_T[None, :-1], use_cache=True, return_dict=True)
            cached = {cache_word(self.model.forward): cache_in(output)}
            self.model(input_ids=ids_T[None, -1:], use_cache=True, return_dict=True, **cached)

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
