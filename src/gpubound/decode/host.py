"""A decoding step on a CPU, in plain torch.

The kernels' references are written to judge by: they widen every weight to fp32 and attend to all places of the cache. Here a
step is what a CPU does best: products in the weights' own dtype, weights of one input as one product where they lie side by
side, and attention over the live places alone.

Legend: B rows, H query heads, K key and value heads, D width of a head, L places that any row has reached.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import can_launch
from ..kernels.accumulate import join_rows

if TYPE_CHECKING:
    from .fused import FusedBody


def fits(device: torch.device) -> bool:
    """Whether this is where a step runs: a CPU, unless Triton's interpreter is to run the kernels there."""
    return device.type == "cpu" and not can_launch(device)


class HostLayer(NamedTuple):
    layer: Any  # a Layer
    qkv: list[tuple[Tensor, Tensor | None]]  # (weight, bias): one of all three where they are neighbours, else each
    gate_up: list[tuple[Tensor, Tensor | None]]


class HostStep:
    """`step` of a body with dense layers and a plain cache, a token a row."""

    def __init__(self, body: "FusedBody") -> None:
        self.body = body
        self.finite = 0  # places before this hold numbers in every row: NaN would come through a mask
        self.found = torch.zeros(body.max_batch, 1, dtype=torch.int64, device=body.device)
        self.layers: list[HostLayer] | None = None

    def forget(self) -> None:
        """The weights are others now: the next step takes those."""
        self.layers = None

    def _read(self) -> list[HostLayer]:
        return [
            HostLayer(
                layer,
                _joined([(layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)]),
                _joined([(layer.gate, layer.gate_bias), (layer.up, layer.up_bias)]),
            )
            for layer in self.body.live.layers
        ]

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        body, s, rows = self.body, self.body.live.shape, len(token)
        if self.layers is None:
            self.layers = self._read()
        low, high = (int(place) for place in position.aminmax())
        end = high + 1
        if end > self.finite and low < high:
            for cache in (body.cache.k, body.cache.v):
                cache[:, :rows, :, self.finite : end] = 0
        self.finite = max(self.finite, end)
        seen = {w: _seen(position, low, end, w) for w in {layer.layer.window for layer in self.layers}}
        place = position.long()
        cos, sin = (table[place][:, None].to(body.live.dtype) for table in (body.cos, body.sin))
        x = F.embedding(token, body.live.embed)
        for number, (layer, qkv, gate_up) in enumerate(self.layers):
            h = F.rms_norm(x, (s.hidden,), layer.norm, s.eps)
            q, k, v = self._heads(layer, _products(h, qkv, layer.q, layer.k, layer.v), cos, sin)
            mixed = self._attend(number, place, q, k, v, low == high, end, *seen[layer.window])
            x = x + F.linear(mixed, layer.o, layer.o_bias)
            gate, up = _products(F.rms_norm(x, (s.hidden,), layer.mlp_norm, s.eps), gate_up, layer.gate, layer.up)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
        h, logits = F.rms_norm(x, (s.hidden,), body.live.norm, s.eps), body.logits[:rows]
        if h.dtype == logits.dtype:
            torch.mm(h, body.live.head.detach().t(), out=logits)
        else:
            logits.copy_(F.linear(h, body.live.head))
        torch.max(logits, 1, keepdim=True, out=(body.best[:rows], self.found[:rows]))
        body.arg[:rows] = self.found[:rows]
        return logits

    def _heads(self, layer: Any, qkv: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, D), k and v (B, K, D), normed and turned."""
        s = self.body.live.shape
        q, k, v = (part.unflatten(-1, (-1, s.head_dim)) for part in qkv)
        if layer.q_norm is not None:
            q = F.rms_norm(q, (s.head_dim,), layer.q_norm, s.head_eps)
            k = F.rms_norm(k, (s.head_dim,), layer.k_norm, s.head_eps)
        if layer.turned:
            q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        return q, k, v

    def _attend(
        self, number: int, place: Tensor, q: Tensor, k: Tensor, v: Tensor, even: bool, end: int, start: int, mask: Tensor | None
    ) -> Tensor:
        """(B, H D) of a step whose keys and values are written at `place`; `even`: the same place in all rows."""
        s, rows = self.body.live.shape, len(q)
        caches = self.body.cache.k[number, :rows], self.body.cache.v[number, :rows]
        for cache, new in zip(caches, (k, v)):
            if even:
                cache[:, :, end - 1] = new
            else:
                cache[torch.arange(rows), :, place] = new
        keys, values = (cache[:, :, start:end] for cache in caches)
        # The query heads of a group stand as so many queries of its one key head: nothing is repeated, as enable_gqa would.
        q = q.reshape(rows, s.kv_heads, -1, s.head_dim)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=s.scale).reshape(rows, -1)


def _seen(position: Tensor, low: int, end: int, window: int) -> tuple[int, Tensor | None]:
    """The first place that a row sees, and a mask (B, 1, 1, L) from there on where rows differ."""
    start = max(0, low + 1 - window) if window else 0
    if low + 1 == end:
        return start, None
    place, at = torch.arange(start, end), position[:, None].long()
    sees = place <= at
    if window:
        sees &= place > at - window
    return start, sees[:, None, None]


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
    weights, biases = [w.detach() for w, _ in parts], [b.detach() for _, b in parts if b is not None]
    whole = join_rows(weights)
    bias = join_rows(biases) if biases else None
    if whole is None or (biases and bias is None):
        return [(w.detach(), None if b is None else b.detach()) for w, b in parts]
    return [(whole, bias)]


def _products(x: Tensor, parts: list[tuple[Tensor, Tensor | None]], *weights: Tensor) -> Sequence[Tensor]:
    """x times each of the weights, which `parts` holds joined or one by one."""
    found = [F.linear(x, weight, bias) for weight, bias in parts]
    return found[0].split([len(weight) for weight in weights], -1) if len(found) < len(weights) else found


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
