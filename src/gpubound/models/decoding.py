"""The interface between decoding and a model family: the weights of its layers and their definition.

A family's module has a table DECODING, {role: Reader}: how the decoder reads a model of that class (reader.py). The weights'
`define` computes a layer in plain fp32, as the reference; decode/ has the fast implementations.

Legend: T tokens, H query heads, K key and value heads, D width of a head, S experts per token (its slots), E experts in all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.decode_product import ACTIVATIONS, Norm, capped_, rms_normed
from ..kernels.experts import ExpertRouting, chosen_columns, clamped_unit, selection, shares_of
from ..kernels.packed_weights import Packed, round_inputs
from ..kernels.rope import apart, rotate
from ..kernels.row_ops import ACTIVATED, LayerNorm, layer_normed
from ..layers.linear_product import format_of
from ..layers.quantized_base import dequantised

AT_ONCE = 1 << 26  # numbers of a weight that are copied from host memory, or unpacked, at a time

FULL, WINDOWED = "full_attention", "sliding_attention"  # types of layers
Rounding = Callable[[Tensor], Tensor] | None  # of keys (T, K, D) with RoPE, and of values
AnyNorm = Norm | LayerNorm | None
Normed = Callable[[Tensor, Any], Tensor]


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None = None
    adapters: Sequence[Any] = ()  # low-rank: each adds scale · x aᵀ bᵀ

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight, self.bias) if t is not None] + [t for low in self.adapters for t in (low.a, low.b)]


@dataclass(frozen=True)
class Shape:
    """Dimensions and constants that all layers of a model share. Those of attention are in each layer's weights."""

    hidden: int
    vocab: int
    embedded: float = 1.0  # factor of the embeddings
    logit_scale: float = 1.0  # factor of the logits
    logit_cap: float = 0.0  # logits are cap · tanh(logit / cap); 0: not capped


class StateShape(NamedTuple):
    """State that a layer keeps of a row instead of keys and values: last inputs of a convolution, a recurrence's matrix."""

    channels: int  # of the convolution
    taps: int
    matrix: tuple[int, ...] = ()  # in fp32; (): none


class PartWeights:
    """Base class of the weights of a layer's parts. Norms and biases may be None."""

    joined = False  # whether the next layer's attention reads the stream before the update of this one, which has no MLP

    def norms(self) -> list[Tensor]:
        return [t for value in vars(self).values() if isinstance(value, Norm | LayerNorm) for t in norm_tensors(value)]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a decoding step reads in full."""
        return self.norms() + [tensor for layer in self.linears() for tensor in layer.tensors()]

    def linears(self) -> list[Linear]:
        return [value for value in vars(self).values() if isinstance(value, Linear)]

    def groups(self) -> list[tuple[Linear, ...]]:
        """Return the linear layers that are multiplied together. The last is the output; without one there are none."""
        return []

    def mapped(self, change: Callable[[Any], Any]) -> Any:
        """Return the weights with `change` of each norm and linear layer."""
        parts = {name: value for name, value in vars(self).items() if isinstance(value, Norm | LayerNorm | Linear)}
        return replace(self, **{name: change(value) for name, value in parts.items()})  # type: ignore[type-var]


@dataclass(frozen=True)
class AttentionWeights(PartWeights):
    """Weights of a layer's attention, with the number and size of its heads.

    A layer without k and v reads the keys and values of the layer `source`.
    """

    norm: AnyNorm
    q: Linear
    k: Linear | None
    v: Linear | None  # without it, k before its norm and rotation is v
    o: Linear
    head_dim: int
    scale: float  # of the scores
    q_norm: Norm | None  # of each head, or of all heads together, by its width
    k_norm: Norm | None
    window: int  # number of last keys that a token attends to; 0: all
    table: int | None = 0  # index of the model's angles; None: a layer without positions
    cap: float = 0.0  # scores are cap · tanh(score / cap); 0: not capped
    post_norm: Norm | None = None  # of the update, before it is added to the residual stream
    interleaved: int = 0  # pairs (2i, 2i + 1) that are rotated; 0: pairs (i, i + P)
    sinks: Tensor | None = None  # (H,): a further score of each head's softmax, without a value
    gated: bool = False  # q has a gate after each head, whose sigmoid multiplies the head's output
    v_eps: float = 0.0  # of a norm of each head's values, which has no weights; 0: there is none
    source: int | None = None

    def state(self) -> StateShape | None:
        """Return what the layer keeps instead of keys and values; None: it keeps these."""
        return None

    def groups(self) -> list[tuple[Linear, ...]]:
        return [tuple(self.inputs.values()), (self.o,)]

    @property
    def query_heads(self) -> int:
        return len(self.q.weight) // (self.head_dim * (2 if self.gated else 1))

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys, in a layer that has them."""
        assert self.k is not None
        return len(self.k.weight) // self.head_dim

    @property
    def inputs(self) -> dict[str, Linear]:
        """The layers that read the normed stream, by name."""
        return {name: layer for name in ("q", "k", "v") if (layer := getattr(self, name)) is not None}

    def apart(self, rows: Iterable[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gates (..., H D) of q, or None, and rows (..., H D) of the inputs without them."""
        q, *rest = rows
        if not self.gated:
            return None, [q, *rest]
        q, gate = q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        return gate.flatten(-2), [q.flatten(-2), *rest]

    def heads(self, rows: Iterable[Tensor], normed: Normed) -> list[Tensor]:
        """Split rows (..., H D) of the inputs into heads (..., H, D) of q, k and v, and apply their norms. A norm of all heads
        comes first. A layer without keys has q alone.

        Interleaved pairs of q and k are put apart, as the cache has them.
        """
        plain = [x.unflatten(-1, (-1, self.head_dim)) for x in rows]
        split = []
        for heads, norm in zip(plain, (self.q_norm, self.k_norm)):
            if norm is not None and len(norm.weight) > self.head_dim:
                heads = normed(heads.flatten(-2), norm).view_as(heads)
            elif norm is not None:
                heads = normed(heads, norm)
            split.append(apart(heads, self.interleaved) if self.interleaved else heads)
        if len(plain) > 1:
            v = plain[-1]
            split.append(normed(v, Norm(v.new_ones(self.head_dim), self.v_eps)) if self.v_eps else v)
        return split

    def define(self, x: Tensor, tables: list[tuple[Tensor, Tensor]], rounded: Rounding, cached: dict, number: int) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32.

        cached: keys and values (T, K, D) by the layer's number, of earlier layers; those of this one are added
        """
        gate, rows = self.apart(plain_linear(plain_norm(x, self.norm), layer) for layer in self.inputs.values())
        q, *own = self.heads(rows, plain_norm)
        if self.table is not None:
            cos, sin = (table[:, None] for table in tables[self.table])
            q, *own[:1] = (rotate(heads, cos, sin) for heads in (q, *own[:1]))
        if own:
            cached[number] = tuple(own if rounded is None else map(rounded, own))
        k, v = (t.to(x.device) for t in cached[number if self.source is None else self.source])
        y = plain_attention(q, k, v, self.scale, self.window, self.cap, self.sinks)
        return plain_norm(plain_linear(y if gate is None else y * gate.sigmoid(), self.o), self.post_norm)


@dataclass(frozen=True)
class LatentAttentionWeights(PartWeights):
    """Multi-head latent attention: keys and values of all heads are products of one latent a token.

    A head's key is [latent W_K, a rotated part that all heads share], and its value latent W_V.
    """

    norm: AnyNorm
    q: Linear  # (H · width of a head, hidden); with q_down, of its normed result
    latent: Linear  # (width of a latent + 2 · rotated pairs, hidden): the latent, and the rotated part of keys
    latent_norm: Norm
    up: Linear  # (H (D + V), width of a latent): W_K and W_V of each head
    o: Linear  # (hidden, H V)
    head_dim: int  # of queries and keys
    scale: float  # of the scores
    interleaved: bool = False  # whether pairs (2i, 2i + 1) are rotated, instead of (i, i + P)
    q_down: Linear | None = None
    q_norm: Norm | None = None
    table: int = 0  # index of the model's angles
    post_norm: ClassVar[None] = None
    window: ClassVar[int] = 0

    @property
    def rotated(self) -> int:
        """Return the dimensions of a head that are rotated, which are its last."""
        return len(self.latent.weight) - len(self.latent_norm.weight)

    def state(self) -> None:
        """Return None, since the layer keeps a latent of each token."""

    @property
    def query_heads(self) -> int:
        return len(self.q.weight) // self.head_dim

    @property
    def value(self) -> int:
        """The width of a value."""
        return self.o.weight.shape[1] // self.query_heads

    def groups(self) -> list[tuple[Linear, ...]]:
        own: list[tuple[Linear, ...]] = [] if self.q_down is None else [(self.q,)]
        return [(self.q if self.q_down is None else self.q_down, self.latent), *own, (self.o,)]

    def define(self, x: Tensor, tables: list[tuple[Tensor, Tensor]], rounded: Rounding, cached: dict, number: int) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32, by keys and values."""
        h, width, heads = plain_norm(x, self.norm), self.rotated, self.query_heads
        low = h if self.q_down is None else plain_norm(plain_linear(h, self.q_down), self.q_norm)
        q = plain_linear(low, self.q).unflatten(-1, (heads, -1))
        latent, key = plain_linear(h, self.latent).split([len(self.latent_norm.weight), width], -1)
        turning = [q[..., -width:], key[:, None]]
        if self.interleaved:
            turning = [apart(t, width // 2) for t in turning]
        cos, sin = (table[:, None] for table in tables[self.table])
        q_turned, key = (rotate(t, cos, sin) for t in turning)
        expanded = plain_linear(plain_norm(latent, self.latent_norm), self.up).unflatten(-1, (heads, -1))
        k, v = expanded.split([expanded.shape[-1] - self.value, self.value], -1)
        k, q = torch.cat([k, key.expand(-1, heads, -1)], -1), torch.cat([q[..., :-width], q_turned], -1)
        return plain_linear(plain_attention(q, k, v, self.scale), self.o)


@dataclass(frozen=True)
class DenseWeights(PartWeights):
    norm: AnyNorm
    gate: Linear
    up: Linear
    down: Linear
    activation: str = "silu"
    post_norm: Norm | None = None
    parallel: bool = False  # it reads the stream before attention's update

    def groups(self) -> list[tuple[Linear, ...]]:
        return [(self.gate, self.up), (self.down,)]

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        h = plain_norm(x, self.norm)
        gated = ACTIVATIONS[self.activation](plain_linear(h, self.gate)) * plain_linear(h, self.up)
        return plain_norm(plain_linear(gated, self.down), self.post_norm)


@dataclass(frozen=True)
class UngatedWeights(PartWeights):
    norm: AnyNorm
    up: Linear
    down: Linear
    activation: str  # one of kernels.row_ops.ACTIVATED
    post_norm: Norm | None = None
    parallel: bool = False  # as of DenseWeights

    def groups(self) -> list[tuple[Linear, ...]]:
        return [(self.up,), (self.down,)]

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        h = ACTIVATED[self.activation](plain_linear(plain_norm(x, self.norm), self.up))
        return plain_norm(plain_linear(h, self.down), self.post_norm)


@dataclass(frozen=True)
class NoWeights(PartWeights):
    """No MLP, of a layer that another one with attention or a state follows at once."""

    norm: ClassVar[None] = None
    post_norm: ClassVar[None] = None
    parallel: ClassVar[bool] = False

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class ExpertWeights(PartWeights):
    """Experts after a norm without an offset: the kernels support no others."""

    norm: Norm
    router: Linear  # (E, hidden)
    gate_up: Any  # (E, 2 I, hidden)
    down: Any  # (E, hidden, I)
    slots: int
    normalise: bool  # divide the chosen experts' shares by their sum
    post_norm: Norm | None = None
    routing: ExpertRouting | None = None  # None: by a softmax
    shared: DenseWeights | None = None  # an expert of every token, which reads the normed stream
    shared_gate: Tensor | None = None  # (1, hidden): its output times sigmoid(gate of the token)
    activation: str = "silu"
    router_norm: Norm | None = None  # of the router's input; None: the experts'
    factors: Tensor | None = None  # (E,): of each expert's share
    parallel: ClassVar[bool] = False

    def tensors(self) -> list[Tensor]:
        shared = [] if self.shared is None else self.shared.tensors()
        return [*super().tensors(), *shared, *([] if self.shared_gate is None else [self.shared_gate])]

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32. Only the experts of one token at a time are converted to fp32.

        With `choices` (a RoutingTrace), use its recorded experts, and record how far their scores are below the best.
        """
        h = plain_norm(x, self.norm)
        scores = plain_linear(h if self.router_norm is None else plain_norm(x, self.router_norm), self.router)
        values = scores if self.routing is None else selection(scores, self.routing)
        ids = choices.judged(number, values) if choices else values.topk(self.slots).indices
        if self.routing is None:
            shares = scores.softmax(-1).gather(-1, ids)
            shares = shares / shares.sum(-1, keepdim=True) if self.normalise else shares
        else:
            shares = shares_of(scores, ids, self.routing)
        shares = shares if self.factors is None else shares * self.factors.float()[ids]
        updates = []
        for row, chosen, share in zip(h, ids, shares):
            gate, up = (self.gate_up.index_select(0, chosen).float() @ row).chunk(2, -1)
            products = torch.bmm(
                self.down.index_select(0, chosen).float(), (ACTIVATIONS[self.activation](gate) * up)[..., None]
            )
            updates.append(share @ products[..., 0])
        y = torch.stack(updates)
        if self.shared is not None:
            also = self.shared.define(h, number, choices)
            y = y + (also if self.shared_gate is None else also * (h @ self.shared_gate.float().t()).sigmoid())
        return plain_norm(y, self.post_norm)


@dataclass(frozen=True)
class DenseAndExpertWeights(PartWeights):
    """A dense MLP and experts that read the same stream, each by its norms, and whose sum is normed."""

    dense: DenseWeights
    experts: ExpertWeights
    post_norm: Norm
    norm: ClassVar[None] = None
    parallel: ClassVar[bool] = False

    def norms(self) -> list[Tensor]:
        return [*super().norms(), *self.dense.norms(), *self.experts.norms()]

    def tensors(self) -> list[Tensor]:
        return [*super().norms(), *self.dense.tensors(), *self.experts.tensors()]

    def linears(self) -> list[Linear]:
        return [*self.dense.linears(), *self.experts.linears()]

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        return plain_norm(self.dense.define(x, number, choices) + self.experts.define(x, number, choices), self.post_norm)


@dataclass(frozen=True)
class ColumnExpertWeights(PartWeights):
    """Experts with biases, whose weights are stored by column or packed, and whose gated unit is clamped.

    A unit is (up + 1) · gate · sigmoid(alpha · gate), of gate at most `limit` and up within it.
    """

    norm: Norm
    router: Linear  # (E, hidden)
    gate_up: Tensor | Packed  # (E, hidden, 2 I): a unit's gate, then its up; packed by row, (E 2 I, hidden)
    gate_up_bias: Tensor  # (E, 2 I)
    down: Tensor | Packed  # (E, I, hidden); packed by row, (E hidden, I)
    down_bias: Tensor  # (E, hidden)
    slots: int
    alpha: float
    limit: float
    post_norm: Norm | None = None
    parallel: ClassVar[bool] = False
    router_norm: ClassVar[None] = None
    factors: ClassVar[None] = None
    shared_gate: ClassVar[None] = None

    @property
    def routing(self) -> ExpertRouting:
        return ExpertRouting(None, True)

    def define(self, x: Tensor, number: int, choices: Any) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32."""
        h = plain_norm(x, self.norm)
        scores = plain_linear(h, self.router)
        ids = choices.judged(number, scores) if choices else scores.topk(self.slots).indices
        updates = []
        for row, chosen, share in zip(h, ids, shares_of(scores, ids, self.routing)):
            gate_up = chosen_columns(self.gate_up, chosen, self.gate_up_bias.shape[1]).float()
            both = torch.einsum("k,ekn->en", row, gate_up) + self.gate_up_bias[chosen].float()
            down = chosen_columns(self.down, chosen, len(row)).float()
            y = torch.einsum("ei,ein->en", clamped_unit(both, self.alpha, self.limit), down) + self.down_bias[chosen].float()
            updates.append(share @ y)
        return plain_norm(torch.stack(updates), self.post_norm)


@dataclass(frozen=True)
class LayerInputWeights(PartWeights):
    """Weights of a layer's part with a separate input: a vector of each token, times the gate of the stream."""

    up: Linear  # the gate
    down: Linear
    activation: str
    post_norm: Norm
    norm: ClassVar[None] = None
    parallel: ClassVar[bool] = False

    def define(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the update of x (T, hidden) in plain fp32, for inputs (T, width)."""
        gated = ACTIVATIONS[self.activation](plain_linear(x, self.up)) * inputs
        return plain_norm(plain_linear(gated, self.down), self.post_norm)


class LayerInputs(NamedTuple):
    """Separate inputs of the layers (LayerInputWeights), computed from a token and its embedding.

    They are (norm(embedding · projection) + row of the table · embedded) · scale, where each layer's part is normed.
    """

    table: Tensor  # (V, layers width)
    embedded: float  # factor of its rows
    projection: Linear  # (layers width, hidden), without a bias
    norm: Norm  # (width,)
    scale: float

    @property
    def width(self) -> int:
        return len(self.norm.weight)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a decoding step reads in full."""
        return [*self.projection.tensors(), self.norm.weight]

    def of(self, ids: Tensor, parts: Tensor) -> Tensor:
        """Return the inputs (..., layers, width) of tokens (...), from the normed parts of the product."""
        rows = F.embedding(ids, self.table).unflatten(-1, (-1, self.width))
        return torch.add(parts.view_as(rows), rows, alpha=self.embedded).mul_(self.scale)

    def define(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return the inputs (T, layers, width) of tokens with embeddings x (T, hidden), in plain fp32."""
        return self.of(ids, plain_norm(plain_linear(x, self.projection).unflatten(-1, (-1, self.width)), self.norm))


class LayerWeights(NamedTuple):
    attention: Any  # AttentionWeights, LatentAttentionWeights, or a record with their methods whose state() is not None
    mlp: Any  # DenseWeights, UngatedWeights, ExpertWeights, or another record with their methods
    extra: LayerInputWeights | None = None
    factor: Tensor | None = None  # (1,): the stream is multiplied by it after the layer

    @property
    def parts(self) -> list[Any]:
        return [part for part in self[:3] if part is not None]

    def mapped(self, change: Callable[[Any], Any]) -> "LayerWeights":
        """Return the layer with `change` of each norm and linear layer."""
        return self._replace(**{name: part.mapped(change) for name, part in zip(self._fields, self[:3]) if part is not None})


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Return the causal attention (T, H D) of q (T, H, D) to k and v (T, K, D) in plain fp32."""
    T = len(q)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = capped_(torch.einsum("thd,shd->hts", q, k) * scale, cap)
    age = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    scores = scores.masked_fill((age < 0) | (age >= (window or T)), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, T, 1)], -1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :T], v).flatten(1)


@dataclass(frozen=True)
class RowParts:
    """A packed weight of that kind, whose values exist only where they are asked for: `rows(begin, end)` returns some of its
    rows in fp32."""

    shape: tuple[int, int]
    rows: Callable[[int, int], Tensor]
    kind: str
    order: ClassVar[None] = None

    def __len__(self) -> int:
        return self.shape[0]

    def split(self, rows: int) -> Iterator[Tensor]:
        return (self.rows(begin, min(begin + rows, self.shape[0])) for begin in range(0, self.shape[0], rows))


_inputs_rounded: ContextVar[bool] = ContextVar("gpubound_inputs_rounded", default=False)


@contextmanager
def inputs_rounded() -> Iterator[None]:
    """Let `plain_linear` round what it multiplies packed weights by as a decoding step's kernels do."""
    before = _inputs_rounded.set(True)
    try:
        yield
    finally:
        _inputs_rounded.reset(before)


def plain_linear(x: Tensor, layer: Linear) -> Tensor:
    """Return the product in fp32, of a weight in any format, which may be in host memory: AT_ONCE numbers of it at a time."""
    weight: Any = layer.weight
    format: Any = format_of(weight)
    if _inputs_rounded.get() and (format.coded or isinstance(weight, RowParts)):
        packed = format.packed(weight.detach()) if format.coded else weight
        x = round_inputs(x, packed.kind, packed.order)
    weight = dequantised([weight], torch.float32) if format.coded else weight
    parts = weight.split(max(1, AT_ONCE // weight.shape[1]))
    y = torch.cat([F.linear(x, part.to(x.device).float()) for part in parts], -1)
    y = y if layer.bias is None else y + layer.bias.to(x.device).float()
    for low in layer.adapters:
        y = y + low.scale * F.linear(F.linear(x, low.a.float()), low.b.float())
    return y


def plain_norm(x: Tensor, norm: AnyNorm) -> Tensor:
    return layer_normed(x, norm) if isinstance(norm, LayerNorm) else rms_normed(x, norm)


def norm_tensors(norm: Norm | LayerNorm) -> list[Tensor]:
    return [norm.weight] if isinstance(norm, Norm) or norm.bias is None else [norm.weight, norm.bias]


def ends_of(generation: dict[str, Any]) -> list[int]:
    """Return the tokens that end a text, by the fields of a generation_config.json."""
    tokens = generation.get("eos_token_id")
    return [] if tokens is None else list(tokens) if isinstance(tokens, list | tuple) else [tokens]
