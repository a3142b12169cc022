"""A model of this family token by token: what each mixer keeps of a text, in buffers that never move.

A mixer's line in KEEPS is a class: made for a number of rows and places, it reads prompts whole and then a token a row. What it
computes is what the mixer computes in training.

Legend: B rows, T tokens of a prompt, L places, H query heads, K key and value heads, D width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layers.attention import Rope


class KeysValues:
    """What softmax attention keeps: keys and values (B, L, K, D). Softmax reads all places under a mask."""

    def __init__(self, mixer: Any, rows: int, places: int, like: Tensor) -> None:
        self.mixer = mixer
        self.k, self.v = like.new_zeros(2, rows, places, mixer.kv_heads, mixer.head_dim)
        self.row, self.place = (
            torch.arange(rows, device=like.device, dtype=torch.int32),
            torch.arange(places, device=like.device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.k, self.v]

    def carried(self) -> list[Tensor]:
        """What a step changes for good: nothing, a key is written over by the next step at its place."""
        return []

    def prompt(self, x: Tensor, rope: Rope | None, lengths: Tensor) -> Tensor:
        """x (B, T, hidden) at places 0 to T - 1, of which the first `lengths` (B,) of a row count."""
        rows, tokens = x.shape[:2]
        q, k, v = self.mixer.project(x, rope)
        for kept, new in ((self.k, k), (self.v, v)):
            kept[:rows, :tokens] = new
            kept[:rows, tokens:] = 0  # a NaN that an earlier text left there would come through the mask
        return self._attended(q, k, v, None)

    def step(self, x: Tensor, rope: Rope | None, position: Tensor) -> Tensor:
        """x (B, 1, hidden) at the places `position` (B,), int32."""
        rows = len(x)
        q, k, v = self.mixer.project(x, rope)
        for kept, new in ((self.k, k), (self.v, v)):
            kept[self.row[:rows], position] = new[:, 0]
        return self._attended(q, self.k[:rows], self.v[:rows], (self.place <= position[:, None])[:, None, None])

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.mixer.output(self.mixer.attended(q, k, v, mask)[0].flatten(-2))


class PolyKeysValues(KeysValues):
    """The same for polynomial attention, whose step reads no place behind a row's own."""

    def prompt(self, x: Tensor, rope: Rope | None, lengths: Tensor) -> Tensor:
        rows, tokens = x.shape[:2]
        q, k, v = self.mixer.project(x, rope)
        self.k[:rows, :tokens], self.v[:rows, :tokens] = k, v
        return self.mixer.weighted(q, k, v, self.mixer.gates(x))

    def step(self, x: Tensor, rope: Rope | None, position: Tensor) -> Tensor:
        return self.mixer.step(x, rope, position, self.k[: len(x)], self.v[: len(x)])


class State:
    """What a recurrence keeps: the state (B, width) behind each row's last token. A step changes it for good."""

    def __init__(self, mixer: Any, rows: int, places: int, like: Tensor) -> None:
        self.mixer = mixer
        wide = torch.promote_types(like.dtype, torch.float32)
        self.h = like.new_zeros(rows, len(mixer.decay), dtype=wide)

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


KEEPS: dict[str, Any] = {"softmax": KeysValues, "poly": PolyKeysValues, "rg_lru": State}
"""By the config's `attention`."""

Seen = Callable[[str, Tensor], None]


def _unseen(name: str, x: Tensor) -> None:
    pass


class CachedModel:
    """`prompt` fills the buffers, `step` gives the logits after one more token of every row. The weights are the model's."""

    def __init__(self, model: Any, rows: int, places: int) -> None:
        self.model, self.trunk, self.places = model, model.model, places
        weight = self.trunk.embed_tokens.weight
        keep = KEEPS[model.config.attention]
        self.mixers = [keep(block.self_attn, rows, places, weight) for block in self.trunk.layers]

    def tensors(self) -> list[Tensor]:
        """What all rows keep."""
        return [tensor for mixer in self.mixers for tensor in mixer.tensors()]

    def carried(self) -> list[Tensor]:
        """Of these, what a step changes for good."""
        return [tensor for mixer in self.mixers for tensor in mixer.carried()]

    def prompt(self, ids: Tensor, lengths: Tensor, seen: Seen = _unseen) -> Tensor:
        """The last hidden state (B, T, hidden) of ids (B, T)."""
        place = torch.arange(ids.shape[1], device=ids.device)
        return self._run(ids, place, lambda mixer, x, rope: mixer.prompt(x, rope, lengths), seen)

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """The logits (B, V) after `token` (B,) at `position` (B,). A row that is full writes its last place again."""
        position = position.clamp(max=self.places - 1)
        x = self._run(token[:, None], position[:, None], lambda mixer, x, rope: mixer.step(x, rope, position))
        return self.model.lm_head(x[:, 0])

    def _run(
        self, ids: Tensor, place: Tensor, mix: Callable[[Any, Tensor, Rope | None], Tensor], seen: Seen = _unseen
    ) -> Tensor:
        """What the trunk does, each mixer's part of it done by `mix`. `seen` is told what each part adds."""
        trunk, pending = self.trunk, None
        x, rope = trunk.embed(ids), None if trunk.rope is None else trunk.rope.at(place)
        seen("embed_tokens", x)
        for number, (block, mixer) in enumerate(zip(trunk.layers, self.mixers)):
            y, x = block.input_layernorm.add(x, pending)
            mixed = mix(mixer, y, rope)
            seen(f"layers.{number}.self_attn", mixed)
            y, x = block.post_attention_layernorm.add(x, mixed)
            pending = block.mlp.mix(y)
            seen(f"layers.{number}.mlp", pending)
        return trunk.norm.add(x, pending)[0]
