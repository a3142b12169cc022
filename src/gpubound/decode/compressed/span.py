"""Some of the layers, in a row on one device.

Legend: B rows, T tokens, N = B T, n streams.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...device import entered
from ...models.deepseek_v4.family import CompressedReader
from ...models.deepseek_v4.weights import HyperWeights
from ..contract import Build
from ..stages.plan import LayerStage, described
from .attention import LatentAttention
from .mixture import Mixture
from .state import Moment, Stretch
from .streams import streams_of

META = torch.device("meta")

Attend = Callable[[LatentAttention, Tensor, Any], Tensor]
"""LatentAttention.step or its prompt"""


class StreamedLayer(NamedTuple):
    attention_streams: HyperWeights
    attention: LatentAttention
    mixture_streams: HyperWeights
    mixture: Mixture

    def part(self, rows: slice) -> "StreamedLayer":
        """For these rows alone, over the same memory."""
        return self._replace(attention=self.attention.part(rows))


class StreamedSpan:
    """The layers of a stage with their state, and the angles of all places."""

    def __init__(self, reader: CompressedReader, build: Build, stage: LayerStage) -> None:
        self.numbers, self.device, self.build = stage.layers, stage.device, build
        home = reader.model.lm_head.weight.device
        self.tables = [(cos.to(self.device), sin.to(self.device)) for cos, sin in reader.tables(build.max_length, home)]
        self.layers: list[StreamedLayer] = []

    def take(self, layers: list[Any], dtype: torch.dtype) -> None:
        """Take the weights as they are now. What was there is free before new state is made: a request begins with none."""
        self.layers, self._parts = [], dict[tuple[int, int], list[StreamedLayer]]()
        for number in self.numbers:
            attention_streams, attention, mixture_streams, mixture = layers[number]
            latent = LatentAttention(attention, self.build, dtype, self.device)
            self.layers.append(StreamedLayer(attention_streams, latent, mixture_streams, Mixture(mixture, number)))

    def part(self, first: int, count: int) -> list[StreamedLayer]:
        """The layers for some rows, which stand at `first`."""
        if (first, count) not in self._parts:
            self._parts[first, count] = [layer.part(slice(first, first + count)) for layer in self.layers]
        return self._parts[first, count]

    def moment(self, position_BT: Tensor) -> Moment:
        """Of a step. A row that is full writes its last place again: what comes of that is nobody's."""
        return Moment(position_BT.to(self.device).long().clamp(max=self.build.max_length - 1), self.tables)

    def stretch(self, start: int, end: int, lengths_B: Tensor) -> Stretch:
        """Of a piece of a prompt."""
        return Stretch(start, end, lengths_B.to(self.device), self.tables)

    def stages(
        self, x: Tensor, token_BT: Tensor, now: Moment | Stretch, attend: Attend, layers: list[StreamedLayer] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, the streams behind it) of every part, from the streams x (B, T, n, hidden)."""
        streams, token_N = streams_of(x.to(self.device)), token_BT.to(self.device).flatten()
        layers = self.layers if layers is None else layers
        own = [w for layer in layers for w in (layer.attention_streams, layer.mixture_streams)]
        after = iter([*own[1:], None])
        for number, layer in zip(self.numbers, layers):
            with entered(self.device):
                u = streams.read(layer.attention_streams)
                streams.write(attend(layer.attention, u, now), layer.attention_streams, next(after))
            yield f"model.layers.{number}.self_attn", streams.x
            with entered(self.device):
                u = streams.read(layer.mixture_streams)
                y, more = layer.mixture(u.flatten(0, 1), token_N)
                streams.write(y.view_as(u), layer.mixture_streams, next(after), more)
            yield f"model.layers.{number}.mlp", streams.x

    def report(self, number: int) -> tuple[str, str, str]:
        """(stage, where, what lies there) for the decoder's table."""
        weights = {t.data_ptr(): t.nbytes for layer in self.layers for part in weights_of(layer) for t in part.tensors()}
        kept = sum(t.nbytes for layer in self.layers for t in layer.attention.tensors())
        return f"stage {number}", str(self.device), described(self.numbers, sum(weights.values()), kept)


def weights_of(layer: StreamedLayer) -> tuple[Any, ...]:
    return layer.attention_streams, layer.attention.weights, layer.mixture_streams, layer.mixture.weights


def bytes_kept(reader: CompressedReader, build: Build, dtype: torch.dtype) -> list[int]:
    """The state of each layer."""
    states = (LatentAttention(one.attention, build, dtype, META) for one in reader.layers())
    return [sum(t.nbytes for t in state.tensors()) for state in states]
