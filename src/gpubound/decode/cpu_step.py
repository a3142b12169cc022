"""A decoding step on a CPU, in plain torch.

The kernels' references serve comparison: they convert every weight to fp32 and attend to all positions of the cache. This step
multiplies in the weights' dtype, computes layers with the same input as one product where their weights are neighbours in
memory, and attends to live positions alone.

Legend: B rows, H query heads, K key and value heads, D width of a head, L positions that any row has reached.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.accumulate import join_rows
from ..kernels.decode_product import ACTIVATIONS
from ..kernels.dispatch import can_launch
from ..kernels.rope import rotate
from ..kernels.row_ops import ACTIVATED, LayerNorm
from ..models.decoding import AnyNorm, DenseWeights, LayerWeights
from .layer import capped_attend

if TYPE_CHECKING:
    from .transformer import FusedRunner


def fits(device: torch.device) -> bool:
    """Return whether steps run here: on a CPU, unless Triton's interpreter runs the kernels."""
    return device.type == "cpu" and not can_launch(device)


class CpuLinear:
    """A product of a weight format: one GEMM where its weights are neighbours in memory, else one for each weight."""

    def __init__(self, product: Any) -> None:
        weights, biases = ([t.detach() for t in tensors] for tensors in (product.matrices(), product.biases))
        self.sizes, self.added = [len(weight) for weight in weights], product.added
        joined, bias = join_rows(weights), join_rows(biases) if biases else None
        if joined is not None and (bias is not None or not biases):
            weights, biases = [joined], [] if bias is None else [bias]
        self.parts: list[tuple[Tensor, Tensor | None]] = list(zip(weights, biases or [None] * len(weights)))

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(self.parts) == 1:
            results: Sequence[Tensor] = F.linear(x, *self.parts[0]).split(self.sizes, -1)
        else:
            results = [F.linear(x, weight, bias) for weight, bias in self.parts]
        if self.added is not None:
            self.added.add(x, *results)
        return results


class CpuLayer(NamedTuple):
    weights: LayerWeights
    recurrent: Any  # the part in the place of attention; None: it is attention
    inputs: list[CpuLinear]  # of attention q, k and v together
    o: CpuLinear
    up: CpuLinear | None  # of DenseWeights the gate, too; None: there is no MLP
    down: CpuLinear | None
    extra: list[CpuLinear]  # of a part after the MLP


class CpuStep:
    """`step` of a runner with dense layers and a plain cache, one token a row."""

    def __init__(self, body: "FusedRunner") -> None:
        self.body = body
        self.finite = 0  # earlier positions are finite in every row: NaN would pass through a mask
        self.largest = torch.zeros(body.max_batch, 1, dtype=torch.int64, device=body.device)
        self.layers: list[CpuLayer] = []
        self.windows: set[int] = set()

    def read_weights(self) -> None:
        """Read the runner's current weights."""
        self.layers = []
        for weights, (part, mlp, extra) in zip(self.body.live.layers, self.body.layers):
            *inputs, output = map(CpuLinear, part.products)
            up, down = map(CpuLinear, mlp.products) if mlp.products else (None, None)
            after = [CpuLinear(product) for product in (extra.products if extra else ())]
            recurrent = None if weights.attention.state() is None else part
            self.layers.append(CpuLayer(weights, recurrent, inputs, output, up, down, after))
        self.windows = {layer.weights.attention.window for layer in self.layers if layer.recurrent is None}

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        body, rows = self.body, len(token)
        low, high = map(int, position.aminmax())
        end = high + 1
        if end > self.finite and low < high:
            for cache in (t for store in body.cache.stores for t in store.tensors):
                cache[:, :rows, :, self.finite : end] = 0
        self.finite = max(self.finite, end)
        visible = {window: _visible(position, low, end, window) for window in self.windows}
        index = position.long()
        # Most often all rows write new keys and values at one position, which a slice does faster.
        row, target = (slice(None), high) if low == high else (torch.arange(rows, device="cpu"), index)
        tables = body.workspace.tables
        angles = [(cos[index][:, None].to(body.live.dtype), sin[index][:, None].to(body.live.dtype)) for cos, sin in tables]
        x = body.embedded(token)
        if body.positions is not None:
            x = x + body.positions[index]
        before, joined = x, False
        own_inputs = None if body.inputs is None else body.inputs.of_prompt(token, x)
        for number, (weights, recurrent, inputs, o, up, down, extra) in enumerate(self.layers):
            attention, mlp = weights.attention, weights.mlp
            h = _normed(before if joined else x, attention.norm)
            if recurrent is not None:
                mixed = recurrent.mix([torch.cat([*linear(h)], -1).float() for linear in inputs], position, 0)
            else:
                gates, split = attention.apart(inputs[0](h))
                q, *own = attention.heads(split, _normed)
                if attention.table is not None:
                    cos, sin = angles[attention.table]
                    q = rotate(q, cos, sin)
                    if own:
                        own[0] = rotate(own[0], cos, sin)
                keys, values = body.cache.keys_values(number)
                if own:
                    keys[:rows][row, :, target], values[:rows][row, :, target] = own
                start, mask = visible[attention.window]
                keys, values, scale = keys[:rows, :, start:end], values[:rows, :, start:end], attention.scale
                if attention.cap or attention.sinks is not None:
                    mixed = capped_attend(q[:, :, None], keys, values, mask, scale, attention.cap, attention.sinks).flatten(1)
                else:  # a group's query heads as queries of its one key head: no keys are repeated, as enable_gqa would
                    grouped = q.unflatten(1, (keys.shape[1], -1))
                    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).flatten(1)
                mixed = mixed if gates is None else mixed * gates.sigmoid()
            y = o(mixed)[0]
            before, x, joined = x, x + _normed(y, attention.post_norm), attention.joined
            if up is not None and down is not None:
                first = up(_normed(before if mlp.parallel else x, mlp.norm))
                if isinstance(mlp, DenseWeights):
                    h = ACTIVATIONS[mlp.activation](first[0]).mul_(first[1])
                else:
                    h = ACTIVATED[mlp.activation](first[0])
                x = x + _normed(down(h)[0], mlp.post_norm)
            if weights.extra is not None and own_inputs is not None:
                gate, out = extra
                h = ACTIVATIONS[weights.extra.activation](gate(x)[0]) * own_inputs[:, number]
                x = x + _normed(out(h)[0], weights.extra.post_norm)
            if weights.factor is not None:
                x = x * weights.factor
        logits = body.logits_of(_normed(x, body.live.norm))
        torch.max(logits, 1, keepdim=True, out=(body.best[:rows], self.largest[:rows]))
        body.arg[:rows] = self.largest[:rows]
        return logits


def _normed(x: Tensor, norm: AnyNorm) -> Tensor:
    if norm is None:
        return x
    if isinstance(norm, LayerNorm):
        weight = norm.weight + norm.offset if norm.offset else norm.weight
        return F.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.eps)
    if norm.offset or norm.weight.dtype != x.dtype:
        return F.rms_norm(x.float(), x.shape[-1:], norm.weight.float() + norm.offset, norm.eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _visible(position: Tensor, low: int, end: int, window: int) -> tuple[int, Tensor | None]:
    """Return the first position that a row sees, and a mask (B, 1, 1, L) from there on where rows differ."""
    start = max(0, low + 1 - window) if window else 0
    if low + 1 == end:
        return start, None
    key, query = torch.arange(start, end, device="cpu"), position[:, None].long()
    mask = key <= query
    if window:
        mask &= key > query - window
    return start, mask[:, None, None]
