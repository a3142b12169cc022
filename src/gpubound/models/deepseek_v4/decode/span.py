"""Consecutive layers on one device.

Legend: B rows, T tokens, N = B T, n streams.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....decode.runner import RunnerConfig
from ....decode.stages.plan import LayerStage
from ....device import entered
from ..family import CompressedReader, HyperWeights
from .attention import LatentAttention
from .mixture import Mixture
from .state import Moment, PlaceTable, Stretch
from .streams import Streams

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
        kept = [layer.attention for layer in self.layers]
        rates, sizes = {one.entries.weights.rate for one in kept if one.entries is not None}, {one.window.size for one in kept}
        self.place_table = PlaceTable(self.build.max_length, rates, sizes, self.device)

    def part(self, rows: slice) -> list[StreamedLayer]:
        """Return the layers for a slice of batch entries."""
        key = rows.start, rows.stop
        if key not in self._parts:
            self._parts[key] = [layer.part(rows) for layer in self.layers]
        return self._parts[key]

    def moment(self, position_BT: Tensor) -> Moment:
        """Return the positions of a step. A full sequence overwrites its last position, and its output is not used."""
        places = position_BT.to(self.device, torch.int32).clamp(0, self.build.max_length - 1)
        return Moment(places, self.tables, self.place_table)

    def stretch(self, start: int, end: int, lengths_B: Tensor) -> Stretch:
        """Return the positions of a prefill chunk."""
        return Stretch(start, end, lengths_B.to(self.device), self.tables)

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of the weights and of the state."""
        weights = {t.data_ptr(): t.nbytes for layer in self.layers for part in weights_of(layer) for t in part.tensors()}
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
        """Names of the parts."""
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
