"""Consecutive layers on one device: residual streams, which attention and MLP read and write, embedding and output head.

Legend: B rows, T tokens, N = B T, n streams.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....decode.placement.plan import LayerStage
from ....decode.placement.tensor_parallel import Peer
from ....decode.runner import RunnerConfig
from ....device import entered
from ....kernels import norm_product, send_words
from ....kernels.decode_product import Norm
from ...reader import weight_of
from ..family import CollapseWeights, CompressedReader, HyperWeights, LinearWeights, tensors_of
from ..kernels import hc_head, hc_post, hc_pre, hc_read, hc_sums, hc_write, send_products
from .attention import LatentAttention, Moment, PlaceTable, Stretch
from .mixture import GEMV_ROWS, Mixture, normed, product, products


class Streams:
    """Residual streams x (B, T, n, hidden).

    Attention or MLP calls `read`, then `give` with its output; `spread` adds the output to the streams.
    """

    output: Tensor

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._give, self._mix = x, x  # hc_post's weights, from the last read

    def read(self, w: HyperWeights) -> Tensor:
        """Return the input (B, T, hidden) of the next attention or MLP."""
        u, self._give, self._mix = hc_pre(self.x, w.product, w.scale, w.base, w.eps, w.norm_eps, w.rounds)
        return u

    def give(self, y: Tensor, more: Tensor | None = None) -> None:
        """Store the output y (B, T, hidden) of attention or MLP. more: (B T, some, hidden) terms, which are added to y."""
        self.output = y if more is None else y + more.sum(1).view_as(y)

    def give_product(self, low: Tensor, layer: LinearWeights) -> None:
        """Multiply low (B T, channels) by a layer and store the product as the output."""
        y = products(low, None, layer)[0] if len(low) <= GEMV_ROWS else product(low, layer)
        self.give(y.view(*self.x.shape[:2], -1))

    def term(self) -> Tensor:
        """Return the stored output (B, T, hidden)."""
        return self.output

    def spread(self, w: HyperWeights, following: HyperWeights | None) -> None:
        """Add the stored output to the streams. following: weights of the next attention or MLP, or None after the last."""
        self.x = hc_post(self.x, self.output, self._give, self._mix)


class FewStreams(Streams):
    """fp32 streams of few tokens. `spread` also computes the sums that the next `read` needs."""

    _sums: Tensor | None = None
    _more: Tensor | None = None

    def read(self, w: HyperWeights) -> Tensor:
        x = self.x.flatten(0, 1)
        self._now = hc_sums(x, w.product) if self._sums is None else self._sums
        return hc_read(x, self._now, w.scale, w.base, w.eps, w.norm_eps).unflatten(0, self.x.shape[:2])

    def give(self, y: Tensor, more: Tensor | None = None) -> None:
        self.output, self._more = y, more

    def term(self) -> Tensor:
        return self.output if self._more is None else self.output + self._more.sum(1).view_as(self.output)

    def spread(self, w: HyperWeights, following: HyperWeights | None) -> None:
        self._written(self.output.flatten(0, 1), w, following)

    def _written(self, y: object, w: HyperWeights, following: HyperWeights | None) -> None:
        weight = None if following is None else following.product
        arguments = self.x.flatten(0, 1), y, self._now, w.scale, w.base, w.eps, w.norm_eps, w.rounds
        x, self._sums = hc_write(*arguments, self._more, weight)  # type: ignore[arg-type]
        self.x = x.unflatten(0, self.x.shape[:2])


class SharedStreams(FewStreams):
    """Streams that are bitwise equal on several devices. A device's output is one term of a sum over all devices."""

    def __init__(self, x: Tensor, peer: Peer) -> None:
        super().__init__(x)
        self.peer = peer

    def give(self, y: Tensor, more: Tensor | None = None) -> None:
        send_words(y.flatten(0, 1), self.peer.sum(), 0, more)

    def give_product(self, low: Tensor, layer: LinearWeights) -> None:
        if layer.bias is not None:
            return super().give_product(low, layer)
        send_products(low, layer.weight, self.peer.sum())

    def spread(self, w: HyperWeights, following: HyperWeights | None) -> None:
        self._written(self.peer.sum(), w, following)
        self.peer.summed()


def streams_of(x: Tensor) -> Streams:
    return (FewStreams if x.shape[0] * x.shape[1] <= GEMV_ROWS else Streams)(x)


class Ends(NamedTuple):
    """Weights of the embedding and the head. `head` has the rows of all tokens, or of a slice of the vocabulary."""

    embed: Tensor
    collapse: CollapseWeights
    norm: Norm
    head: Tensor

    @property
    def streams(self) -> int:
        return self.collapse.product.shape[0]

    def enter(self, token_BT: Tensor) -> Tensor:
        """Return the fp32 streams (B, T, n, hidden) before the first layer."""
        x = F.embedding(token_BT, self.embed)[:, :, None]
        return x.expand(-1, -1, self.streams, -1).to(torch.float32).contiguous()  # one launch, in 16 bits and in 32

    def collapsed(self, x: Tensor) -> Tensor:
        """Collapse streams x (N, n, hidden) to (N, hidden)."""
        w = self.collapse
        return hc_head(x, w.product, w.scale, w.base, w.eps, w.norm_eps)

    def leave(self, x: Tensor, out: Tensor, best: Tensor, arg: Tensor) -> Tensor:
        """Write the logits of streams x (N, n, hidden) to out (N, vocabulary).

        For up to GEMV_ROWS tokens, also write partial maxima to `best` and `arg` (see `norm_product`).
        """
        h = self.collapsed(x)
        if len(h) <= GEMV_ROWS:
            return norm_product(h, self.norm, self.head, out=out, best=best, arg=arg)
        return out.copy_(self.logits(h))

    def logits(self, h: Tensor) -> Tensor:
        """Return the fp32 logits of collapsed streams h (N, hidden)."""
        return F.linear(normed(h, self.norm).to(self.head.dtype), self.head).float()

    def read(self) -> list[Tensor]:
        """Return the tensors that a step reads in full: all except the embedding."""
        return [*tensors_of(self.collapse), self.norm.weight, self.head]

    @property
    def nbytes(self) -> int:
        shared = self.head.data_ptr() == self.embed.data_ptr() and not self.head.is_meta
        return sum(t.nbytes for t in self.read()) + (0 if shared else self.embed.nbytes)


def ends_of(reader: CompressedReader) -> Ends:
    """Return the model's current embedding and head weights."""
    trunk = reader.trunk
    return Ends(weight_of(trunk.embed_tokens), reader.collapse(), reader.norm(trunk.norm), weight_of(reader.model.lm_head))


META = torch.device("meta")

When = Moment | Stretch
"""positions of the tokens"""

Attend = Callable[[LatentAttention, Tensor, Any], Tensor]
"""LatentAttention.step or LatentAttention.prompt"""


class StreamedLayer(NamedTuple):
    attention_streams: HyperWeights
    attention: LatentAttention
    mixture_streams: HyperWeights
    mixture: Mixture

    def part(self, rows: slice) -> "StreamedLayer":
        """Return the layer for a slice of batch entries, over the same memory."""
        return self._replace(attention=self.attention.part(rows))


class StreamedSpan:
    """Layers of a stage with their state, and the rotary angles of all positions."""

    def __init__(self, reader: CompressedReader, build: RunnerConfig, stage: LayerStage) -> None:
        self.numbers, self.device, self.build = stage.layers, stage.device, build
        home = reader.model.lm_head.weight.device
        self.tables = [(cos.to(self.device), sin.to(self.device)) for cos, sin in reader.tables(build.max_length, home)]
        self.clear()

    def clear(self) -> None:
        """Drop the layers, so that their state is freed before new state is allocated."""
        self.layers: list[StreamedLayer] = []
        self._parts: dict[tuple[int, int], list[StreamedLayer]] = {}

    def take(self, layers: list[Any], dtype: torch.dtype) -> None:
        """Build the layers from the current weights, with empty state. Call `clear` first."""
        for number in self.numbers:
            attention_streams, attention, mixture_streams, mixture = layers[number]
            latent = LatentAttention(attention, self.build, dtype, self.device)
            self.layers.append(StreamedLayer(attention_streams, latent, mixture_streams, Mixture(mixture, number)))
        attentions = [layer.attention for layer in self.layers]
        rates, sizes = (
            {one.entries.weights.rate for one in attentions if one.entries is not None},
            {one.window.size for one in attentions},
        )
        self.place_table = PlaceTable(self.build.max_length, rates, sizes, self.device)

    def part(self, rows: slice) -> list[StreamedLayer]:
        """Return the layers for a slice of batch entries."""
        key = rows.start, rows.stop
        if key not in self._parts:
            self._parts[key] = [layer.part(rows) for layer in self.layers]
        return self._parts[key]

    def moment(self, position_BT: Tensor) -> Moment:
        """Return the positions of a step. A full sequence overwrites its last position, and its output is not used."""
        positions = position_BT.to(self.device, torch.int32).clamp(0, self.build.max_length - 1)
        return Moment(positions, self.tables, self.place_table)

    def stretch(self, start: int, end: int, lengths_B: Tensor) -> Stretch:
        """Return the positions of a prefill chunk."""
        return Stretch(start, end, lengths_B.to(self.device), self.tables)

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of the weights and of the state."""
        weights = {t.data_ptr(): t.nbytes for layer in self.layers for t in tensors_of(weights_of(layer))}
        return sum(weights.values()), sum(t.nbytes for layer in self.layers for t in layer.attention.tensors())


class SpanPass:
    """Forward pass of some tokens through the layers of a span: attention and MLP alternate as its parts."""

    def __init__(
        self,
        span: StreamedSpan,
        streams: Streams,
        token_N: Tensor,
        now: Moment | Stretch,
        attend: Attend,
        rows: slice | None = None,
    ) -> None:
        """rows: the tokens' batch entries in the span's state; None: the first ones."""
        self.span, self.streams, self.token_N, self.now, self.attend = span, streams, token_N, now, attend
        self.layers = span.layers if rows is None else span.part(rows)
        self._mixing = [w for layer in self.layers for w in (layer.attention_streams, layer.mixture_streams)]

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{number}.{part}" for number in self.span.numbers for part in ("self_attn", "mlp")]

    def give(self, number: int) -> None:
        """Compute the output of part `number` from the streams."""
        layer, streams = self.layers[number // 2], self.streams
        with entered(self.span.device):
            u = streams.read(self._mixing[number])
            if number % 2 == 0:
                streams.give_product(self.attend(layer.attention, u, self.now), layer.attention.weights.o_b)
            else:
                y, more = layer.mixture(u.flatten(0, 1), self.token_N)
                streams.give(y.view_as(u), more)

    def spread(self, number: int) -> None:
        """Add the output of part `number` to the streams."""
        following = self._mixing[number + 1] if number + 1 < len(self._mixing) else None
        with entered(self.span.device):
            self.streams.spread(self._mixing[number], following)

    def run(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each part and the streams after the part."""
        for number, name in enumerate(self.names):
            self.give(number)
            self.spread(number)
            yield name, self.streams.x


def weights_of(layer: StreamedLayer) -> tuple[Any, ...]:
    return layer.attention_streams, layer.attention.weights, layer.mixture_streams, layer.mixture.weights


def bytes_kept(reader: CompressedReader, build: RunnerConfig, dtype: torch.dtype) -> list[int]:
    """Return the bytes of each layer's state."""
    states = (LatentAttention(one.attention, build, dtype, META) for one in reader.layers())
    return [sum(t.nbytes for t in state.tensors()) for state in states]
