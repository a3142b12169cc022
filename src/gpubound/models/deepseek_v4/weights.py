"""Weights and hyperparameters of a DeepSeek-V4 layer, for the runners in decode/.

A token's key and value are one vector, `kv`, that all heads share. A token attends to the last `window` vectors, and to
compressed entries of earlier tokens: every `rate` tokens are pooled to one entry. With an indexer, a token attends to the `top`
entries of the highest scores; otherwise to all.

The residual consists of several streams (`HyperWeights`). Attention and MLP read a mix of the streams, and their output is
added to a new mix of the streams.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.decode_product import Norm
from ...kernels.packed_weights import Packed
from .kernels.fp8_blocks import Fp8Blocks


class LinearWeights(NamedTuple):
    """Weight, which may be in fp8, and bias of a linear layer."""

    weight: Any  # Tensor or Fp8Blocks
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


class CompressedWeights:
    """Base class of dataclasses that hold tensors or nested dataclasses of tensors."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors in field order."""
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
    """Hyper-connection by which attention or MLP reads n streams and writes to them."""

    product: Tensor  # ((2 + n) n, n · hidden): the scores of reading, of writing, and of mixing streams
    base: Tensor
    scale: Tensor  # (3,)
    rounds: int  # Sinkhorn iterations
    eps: float  # added to divisors that are sums
    norm_eps: float


@dataclass(frozen=True)
class CollapseWeights(CompressedWeights):
    """Hyper-connection by which the head reads n streams."""

    product: Tensor  # (n, n · hidden)
    base: Tensor
    scale: Tensor  # (1,)
    eps: float
    norm_eps: float


@dataclass(frozen=True)
class EntryWeights(CompressedWeights):
    """Compressor of `rate` tokens to an entry. `overlapping`: an entry also pools the preceding `rate` tokens, with separate
    products."""

    kv: LinearWeights
    gate: LinearWeights
    bias: Tensor  # (rate, width): added to gates by the token's index in its window
    norm: Norm
    rate: int
    overlapping: bool

    @property
    def span(self) -> int:
        """Number of tokens that an entry pools."""
        return self.rate * (1 + self.overlapping)


@dataclass(frozen=True)
class IndexWeights(CompressedWeights):
    entries: EntryWeights
    q: LinearWeights
    share: LinearWeights  # (heads, hidden): weight of each head in a token's scores
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
    o_a: LinearWeights  # (groups · rank, heads · width / groups): each group of heads has separate rows
    o_b: LinearWeights
    sinks: Tensor  # (heads,): a softmax logit without a value
    heads: int
    groups: int
    window: int
    table: int  # of rotary angles: 0 for layers with only a window, 1 for layers with entries
    scale: float  # of the scores
    eps: float  # of the norm of a query's heads, which has no gain
    entries: EntryWeights | None
    index: IndexWeights | None


@dataclass(frozen=True)
class MixtureWeights(CompressedWeights):
    """Routed experts and one shared expert."""

    norm: Norm
    router: LinearWeights  # (E, hidden)
    correction: Tensor | None  # (E,): added to scores for routing only, not for shares
    table: Tensor | None  # (vocabulary, slots): experts of each token, if routing is by token
    score: Callable[[Tensor], Tensor]
    slots: int
    scale: float  # of the shares
    gate_up: Tensor | Packed  # (E, 2 I, hidden)
    down: Tensor | Packed  # (E, hidden, I)
    gate: LinearWeights  # shared expert's, like up and shared_down
    up: LinearWeights
    shared_down: LinearWeights
    limit: float  # gate is clamped to at most limit, up to ±limit, before their product


class StreamedLayerWeights(NamedTuple):
    attention_streams: HyperWeights
    attention: LatentWeights
    mixture_streams: HyperWeights
    mixture: MixtureWeights

    def tensors(self) -> list[Tensor]:
        return [t for part in self for t in part.tensors()]
