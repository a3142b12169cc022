"""What a DeepSeek-V4 layer is made of: weights and the numbers beside them. decode/compressed/ computes with them.

A token's keys and values are one vector, `kv`, that all heads share. A token sees the last `window` of them. Behind these it
sees compressed entries: every `rate` tokens are pooled to one. Where a layer has an indexer, it sees the `top` of its entries
whose scores are highest; otherwise all.

Between layers the stream is several streams (`HyperWeights`): a part reads a mix of them, and what it gives is spread over a
mix of them again.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.decode_product import Norm
from ...kernels.packed_weights import Packed
from .kernels.fp8_blocks import Fp8Blocks


class LinearWeights(NamedTuple):
    """A linear layer, whose weight may be in fp8."""

    weight: Any  # Tensor or Fp8Blocks
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


class CompressedWeights:
    """Records of tensors, and of records."""

    def tensors(self) -> list[Tensor]:
        """All of them, in their order."""
        return [t for field in fields(self) for t in _tensors(getattr(self, field.name))]  # type: ignore[arg-type]


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Norm):
        return [value.weight]
    if isinstance(value, CompressedWeights):
        return value.tensors()
    if isinstance(value, LinearWeights):
        return [t for part in value for t in _tensors(part)]
    if isinstance(value, Fp8Blocks):
        return [value.codes, value.scale]
    if isinstance(value, Packed):
        return [value.words, value.scale]
    return [value] if isinstance(value, Tensor) else []


@dataclass(frozen=True)
class HyperWeights(CompressedWeights):
    """How a part of a layer reads n streams and writes to them."""

    product: Tensor  # ((2 + n) n, n · hidden): the scores of reading, of writing, and of mixing streams
    base: Tensor
    scale: Tensor  # (3,)
    rounds: int  # of Sinkhorn's normalisation
    eps: float  # added where something is divided by a sum
    norm_eps: float


@dataclass(frozen=True)
class CollapseWeights(CompressedWeights):
    """How the head reads n streams."""

    product: Tensor  # (n, n · hidden)
    base: Tensor
    scale: Tensor  # (1,)
    eps: float
    norm_eps: float


@dataclass(frozen=True)
class EntryWeights(CompressedWeights):
    """How `rate` tokens become an entry. `overlapping`: an entry also pools the tokens before, by products of their own."""

    kv: LinearWeights
    gate: LinearWeights
    bias: Tensor  # (rate, width): of a gate, by the place in its stretch
    norm: Norm
    rate: int
    overlapping: bool

    @property
    def span(self) -> int:
        """The tokens that an entry pools."""
        return self.rate * (1 + self.overlapping)


@dataclass(frozen=True)
class IndexWeights(CompressedWeights):
    entries: EntryWeights
    q: LinearWeights
    share: LinearWeights  # (heads, hidden): of each head in a token's scores
    heads: int
    top: int


@dataclass(frozen=True)
class LatentWeights(CompressedWeights):
    """Attention over one key and value head."""

    norm: Norm
    q_a: LinearWeights
    q_a_norm: Norm
    q_b: LinearWeights
    kv: LinearWeights
    kv_norm: Norm
    o_a: LinearWeights  # (groups · rank, heads · width / groups): each group of heads has rows of its own
    o_b: LinearWeights
    sinks: Tensor  # (heads,): a score that counts in the softmax and brings nothing
    heads: int
    groups: int
    window: int
    table: int  # of the angles: 0 those of layers with a window alone, 1 of those with entries
    scale: float  # of the scores
    eps: float  # of the norm of a query's heads, which has no gain
    entries: EntryWeights | None
    index: IndexWeights | None


@dataclass(frozen=True)
class MixtureWeights(CompressedWeights):
    """Experts of which a token has some, and one that all share."""

    norm: Norm
    router: LinearWeights  # (E, hidden)
    correction: Tensor | None  # (E,): added to the scores to choose by, not to the shares
    table: Tensor | None  # (vocabulary, slots): the experts of each token, where they do not follow from its scores
    score: Callable[[Tensor], Tensor]
    slots: int
    scale: float  # of the shares
    gate_up: Tensor | Packed  # (E, 2 I, hidden)
    down: Tensor | Packed  # (E, hidden, I)
    gate: LinearWeights  # of the shared expert, as the next two
    up: LinearWeights
    shared_down: LinearWeights
    limit: float  # gate is at most this, up within it: before their product


class StreamedLayerWeights(NamedTuple):
    attention_streams: HyperWeights
    attention: LatentWeights
    mixture_streams: HyperWeights
    mixture: MixtureWeights

    def tensors(self) -> list[Tensor]:
        return [t for part in self for t in part.tensors()]
