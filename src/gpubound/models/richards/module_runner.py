"""Model runner of RichardsDecoder where the fused kernels do not support its parts: the model's own layers in a CUDA graph.

A mixer's state is in buffers with fixed addresses. It is a class in STATES, created for a batch size and a length; it reads
prompts as a whole, and then one token of each sequence at a time, and computes what the mixer computes in training. When the
runner is built, its logits are checked against the model's forward: sequences at two positions, against the logits of the
whole text.

Legend: B sequences, T tokens of a prompt, L positions, H query heads, K key and value heads, D width of a head.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...decode.model_watch import TensorWatch
from ...decode.runner import ModelRunner, RunnerConfig, check_room, random_ids
from ...layers.attention import Rope
from ...layers.fused_weights import Projecting
from ...layers.moe import MoE
from .model import RichardsDecoder

TRIED = 8  # tokens of the text with which a new runner is checked
SCORED = 256  # tokens whose full logits are in memory at a time while a text is scored

# Largest relative error of the logits, in the norm: rounding, of one GEMM over a text against one per token.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-5}

Observer = Callable[[str, Tensor], None]
"""called with the name and the output of each module"""


class KeysValues:
    """KV cache (B, L, K, D) of softmax attention, which reads all positions with a mask."""

    def __init__(self, mixer: Any, rows: int, length: int, like: Tensor) -> None:
        self.mixer = mixer
        self.k, self.v = like.new_zeros(2, rows, length, mixer.kv_heads, mixer.head_dim)
        self.row = torch.arange(rows, device=like.device, dtype=torch.int32)
        self.position = torch.arange(length, device=like.device)

    def tensors(self) -> list[Tensor]:
        return [self.k, self.v]

    def carried(self) -> list[Tensor]:
        """Return the state that a repeated step would change: none, since a step overwrites the key at its position."""
        return []

    def prompt(self, x: Tensor, rope: Rope | None, lengths: Tensor) -> Tensor:
        """Read x (B, T, hidden) at positions 0 to T - 1. The first `lengths` (B,) tokens of a row are its prompt."""
        rows, tokens = x.shape[:2]
        q, k, v = self.mixer.project(x, rope)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[:rows, :tokens] = new
            cache[:rows, tokens:] = 0  # a NaN of an earlier text would pass the mask
        return self._attended(q, k, v, None)

    def step(self, x: Tensor, rope: Rope | None, position: Tensor) -> Tensor:
        """Read x (B, 1, hidden) at `position` (B,) int32."""
        rows = len(x)
        q, k, v = self.mixer.project(x, rope)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[self.row[:rows], position] = new[:, 0]
        return self._attended(q, self.k[:rows], self.v[:rows], (self.position <= position[:, None])[:, None, None])

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.mixer.output(self.mixer.attended(q, k, v, mask)[0].flatten(-2))


class PolyKeysValues(KeysValues):
    """KV cache of polynomial attention, whose step does not read later positions."""

    def prompt(self, x: Tensor, rope: Rope | None, lengths: Tensor) -> Tensor:
        rows, tokens = x.shape[:2]
        q, k, v = self.mixer.project(x, rope)
        self.k[:rows, :tokens], self.v[:rows, :tokens] = k, v
        return self.mixer.weighted(q, k, v, self.mixer.gates(x))

    def step(self, x: Tensor, rope: Rope | None, position: Tensor) -> Tensor:
        return self.mixer.step(x, rope, position, self.k[: len(x)], self.v[: len(x)])


class State:
    """State (B, width) of a recurrence after each sequence's last token."""

    def __init__(self, mixer: Any, rows: int, length: int, like: Tensor) -> None:
        self.mixer = mixer
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.h = like.new_zeros(rows, len(mixer.decay), dtype=dtype)

    def tensors(self) -> list[Tensor]:
        return [self.h]

    carried = tensors

    def prompt(self, x: Tensor, rope: Rope | None, lengths: Tensor) -> Tensor:
        y, state = self.mixer.step(x, None, lengths)
        self.h[: len(x)] = state
        return y

    def step(self, x: Tensor, rope: Rope | None, position: Tensor) -> Tensor:
        y, state = self.mixer.step(x, self.h[: len(x)])
        self.h[: len(x)] = state
        return y


STATES: dict[str, Any] = {"softmax": KeysValues, "poly": PolyKeysValues, "rg_lru": State}  # by the config's `attention`


class CachedModel:
    """A model with its mixers' state. `prompt` fills the state, `step` returns the logits after one more token per sequence."""

    def __init__(self, model: RichardsDecoder, rows: int, length: int) -> None:
        self.model, self.trunk, self.length = model, model.model, length
        weight, kind = self.trunk.embed_tokens.weight, STATES[model.config.attention]
        self.mixers = [kind(block.self_attn, rows, length, weight) for block in self.trunk.layers]

    def tensors(self) -> list[Tensor]:
        return [tensor for mixer in self.mixers for tensor in mixer.tensors()]

    def carried(self) -> list[Tensor]:
        """Return the tensors that a repeated step would change."""
        return [tensor for mixer in self.mixers for tensor in mixer.carried()]

    def prompt(self, ids: Tensor, lengths: Tensor, observer: Observer | None = None) -> Tensor:
        """Return the last hidden state (B, T, hidden) of ids (B, T)."""
        position = torch.arange(ids.shape[1], device=ids.device)
        return self._run(ids, position, lambda mixer, x, rope: mixer.prompt(x, rope, lengths), observer)

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits (B, V) after `token` (B,) at `position` (B,). A full sequence overwrites its last position."""
        position = position.clamp(max=self.length - 1)
        x = self._run(token[:, None], position[:, None], lambda mixer, x, rope: mixer.step(x, rope, position))
        return self.model.lm_head(x[:, 0])

    def _run(
        self, ids: Tensor, place: Tensor, mix: Callable[[Any, Tensor, Rope | None], Tensor], observer: Observer | None = None
    ) -> Tensor:
        """Run the trunk, with each mixer's part by `mix`."""
        trunk, pending = self.trunk, None
        observe = observer or (lambda name, x: None)
        x, rope = trunk.embed(ids), None if trunk.rope is None else trunk.rope.at(place)
        observe("embed_tokens", x)
        for number, (block, mixer) in enumerate(zip(trunk.layers, self.mixers)):
            y, x = block.input_layernorm.add(x, pending)
            mixed = mix(mixer, y, rope)
            observe(f"layers.{number}.self_attn", mixed)
            y, x = block.post_attention_layernorm.add(x, mixed)
            pending = block.mlp.mix(y)
            observe(f"layers.{number}.mlp", pending)
        return trunk.norm.add(x, pending)[0]


class ModuleRunner(ModelRunner):
    """Model runner of a RichardsDecoder, which reads the model's current weights. path: reason for the report."""

    def __init__(self, model: RichardsDecoder, build: RunnerConfig, path: str = "") -> None:
        name = type(model).__name__
        if build.tokens > 1:
            raise ValueError(f"decoder: speculate: {name} is decoded by its own layers, a token a step; leave speculate out.")
        if why := model.undecoded():
            raise ValueError(f"decoder: model: got a {name} that is not decoded token by token: {why}.")
        self.model, self.path, self.kernels = model, path, f"the model's own layers: {path}"
        self.max_batch, self.max_length, self.vocab = build.max_batch, build.max_length, model.config.vocabulary
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        one = CachedModel(model, 1, 1)
        state = sum(t.nbytes for t in one.carried())
        self.place_bytes = sum(t.nbytes for t in one.tensors()) - state  # per position
        check_room(build.max_batch * (state + self.place_bytes * build.max_length + 4 * self.vocab), self.device, build)
        self.cached = CachedModel(model, build.max_batch, build.max_length)
        self.logits = torch.zeros(build.max_batch, self.vocab, device=self.device, dtype=torch.float32)
        self.rebind()
        self.error = self._try()

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        if ids.shape[1]:
            self.cached.prompt(ids.long(), lengths)
        else:
            self._clear()

    def _clear(self) -> None:
        for tensor in self.cached.tensors():
            tensor.zero_()

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        return self.logits[: len(token)].copy_(self.cached.step(token.long(), position))

    def carried(self) -> list[Tensor]:
        return self.cached.carried()

    def moved(self) -> str | None:
        return self.weights.moved()

    def rebind(self) -> None:
        for module in self.model.modules():  # a first forward would move weights into one buffer
            if isinstance(module, Projecting):
                module.stacked.joined(module.projections())
        self.weights = TensorWatch(self.model, "_parameters", "_buffers")

    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes that a step reads: weights except the embedding, chosen experts, the KV cache of `live` tokens."""
        table = self.model.model.embed_tokens.weight
        read = {p.data_ptr(): p.nbytes for p in self.model.parameters() if p is not table or self.model.config.tied}
        left = sum(part.unread(len(live)) for part in self.model.modules() if isinstance(part, MoE))
        return sum(read.values()) - left + self.place_bytes * sum(live)

    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for hidden in self.model.model(ids[None].long())[0].split(SCORED):
            yield self.model.lm_head(hidden).float()

    def locate(self, ids: Tensor) -> str:
        bad: list[str] = []

        def check(name: str, x: Tensor) -> None:
            if not x.isfinite().all():
                bad.append(f"model.{name}")

        self.cached.prompt(ids[None].long(), torch.full((1,), len(ids), device=ids.device), check)
        return bad[0] if bad else "lm_head"

    def _try(self) -> float:
        """Return the relative error of the logits after a prompt and a step, for the first two sequences."""
        tokens, rows = min(TRIED, self.max_length), min(2, self.max_batch)
        ids = random_ids(self.vocab, tokens, self.device)
        last = torch.tensor([tokens - 1, tokens - 2], device=self.device, dtype=torch.int32)[:rows]
        expected = self.model(ids[None])[0].float()
        self.prefill(ids[:-1].expand(rows, -1), last)
        error = ((self.step(ids[last], last) - expected[last]).norm() / expected[last].norm()).item()
        if not error <= TOLERANCE[self.dtype] and expected.isfinite().all():
            raise ValueError(
                f"decoder: model: got {type(self.model).__name__}, whose logits token by token differ from its own forward's "
                f"by {error:.1e}, wanted at most {TOLERANCE[self.dtype]:g}; is it in eval mode, without hooks?"
            )
        self._clear()
        return error

    def report(self) -> list[tuple[str, str, str]]:
        size = sum(t.nbytes for t in self.cached.tensors()) / 2**20
        c = self.model.config
        why = "no fused step has all of these parts; a graph takes their launches from the host"
        return [
            (f"{c.layers} layers, head", "its own layers", why),
            ("kept", f"{size:.1f} MiB for {self.max_batch} rows of {self.max_length} tokens", "cost follows max_length"),
            ("trial", f"logits within {self.error:.1e} of the whole text's at once", "rows at two positions"),
        ]
