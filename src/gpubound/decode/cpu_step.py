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
from ..kernels.decode_attention import turn
from ..kernels.decode_product import ACTIVATIONS, Norm
from ..models.decoding import AttentionWeights, DenseWeights, Linear
from .layer import capped_attend
from .lora import LoraDelta

if TYPE_CHECKING:
    from .transformer import FusedRunner


def fits(device: torch.device) -> bool:
    """Whether this is where a step runs: a CPU, unless Triton's interpreter is to run the kernels there."""
    return device.type == "cpu" and not can_launch(device)


class CpuLayer(NamedTuple):
    """The products of an input are one where their weights are neighbours, else one each."""

    attention: AttentionWeights
    mlp: DenseWeights
    qkv: "CpuLinear"
    o: "CpuLinear"
    gate_up: "CpuLinear"
    down: "CpuLinear"


class CpuLinear(NamedTuple):
    parts: list[Linear]
    sizes: list[int]  # of the results
    added: LoraDelta | None

    def of(self, x: Tensor) -> Sequence[Tensor]:
        found: Sequence[Tensor] = [F.linear(x, weight, bias) for weight, bias, _ in self.parts]
        found = found[0].split(self.sizes, -1) if len(found) < len(self.sizes) else found
        if self.added is not None:
            self.added.add(x, *found)
        return found


class CpuStep:
    """`step` of a body with dense layers and a plain cache, a token a row."""

    def __init__(self, body: "FusedRunner") -> None:
        self.body = body
        self.finite = 0  # places before this hold numbers in every row: NaN would come through a mask
        self.found = torch.zeros(body.max_batch, 1, dtype=torch.int64, device=body.device)
        self.layers: list[CpuLayer] = []

    def take(self) -> None:
        """Take the body's weights as they are now."""
        self.layers = [
            CpuLayer(attention.weights, mlp.weights, *map(_product, (*attention.products, *mlp.products)))
            for attention, mlp in self.body.layers
        ]

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        body, s, rows = self.body, self.body.live.shape, len(token)
        low, high = (int(place) for place in position.aminmax())
        end = high + 1
        if end > self.finite and low < high:
            for cache in (body.cache.k, body.cache.v):
                cache[:, :rows, :, self.finite : end] = 0
        self.finite = max(self.finite, end)
        seen = {w: _seen(position, low, end, w) for w in {layer.attention.window for layer in self.layers}}
        place = position.long()
        # Where the new keys and values go. Most often that is one place for all rows, which a slice writes faster.
        row, there = (slice(None), high) if low == high else (torch.arange(rows, device="cpu"), place)
        angles = [[table[place][:, None].to(body.live.dtype) for table in tables] for tables in body.bench.tables]
        x = body.embedded(token)
        for number, (attention, mlp, qkv, o, gate_up, down) in enumerate(self.layers):
            q, k, v = attention.heads(qkv.of(_normed(x, attention.norm)), s.head_dim, _normed)
            if attention.table is not None:
                q, k = (turn(x, *angles[attention.table]) for x in (q, k))
            keys, values = body.cache.k[number, :rows], body.cache.v[number, :rows]
            keys[row, :, there], values[row, :, there] = k, v
            start, mask = seen[attention.window]
            mixed = _attended(q, keys[:, :, start:end], values[:, :, start:end], mask, s.scale, attention.cap)
            x = x + _normed(o.of(mixed)[0], attention.post_norm)
            gate, up = gate_up.of(_normed(x, mlp.norm))
            gate = ACTIVATIONS[mlp.activation](gate).mul_(up)
            x = x + _normed(down.of(gate)[0], mlp.post_norm)
        logits = body.logits_of(_normed(x, body.live.norm))
        torch.max(logits, 1, keepdim=True, out=(body.best[:rows], self.found[:rows]))
        body.arg[:rows] = self.found[:rows]
        return logits


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    if norm.offset:
        return F.rms_norm(x.float(), x.shape[-1:], norm.weight.float() + norm.offset, norm.eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """(B, H D) for q (B, H, D), k and v (B, K, L, D)."""
    if cap:
        return capped_attend(q[:, :, None], k, v, mask, scale, cap).flatten(1)
    # The query heads of a group stand as so many queries of its one key head: nothing is repeated, as enable_gqa would.
    q = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).flatten(1)


def _seen(position: Tensor, low: int, end: int, window: int) -> tuple[int, Tensor | None]:
    """The first place that a row sees, and a mask (B, 1, 1, L) from there on where rows differ."""
    start = max(0, low + 1 - window) if window else 0
    if low + 1 == end:
        return start, None
    place, at = torch.arange(start, end, device="cpu"), position[:, None].long()
    sees = place <= at
    if window:
        sees &= place > at - window
    return start, sees[:, None, None]


def _product(product: Any) -> CpuLinear:
    return CpuLinear(_joined(product), [len(weight) for weight in product.matrices()], product.added)


def _joined(product: Any) -> list[Linear]:
    weights, biases = ([t.detach() for t in tensors] for tensors in (product.matrices(), product.biases))
    whole, bias = join_rows(weights), join_rows(biases) if biases else None
    if whole is None or (biases and bias is None):
        return list(map(Linear, weights, biases)) if biases else list(map(Linear, weights))
    return [Linear(whole, bias)]
