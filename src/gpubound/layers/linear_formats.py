"""Parts of a linear product: the format of its weights, and the adapters that add to it.

A weight's record (kernels/tensor_state.py) holds both. A new format or adapter is a class with the methods of `Format` or
`Adapter`, in a file of its own; linear_product.py runs them.

Legend: N tokens, O outputs (a weight's rows), K inputs (its columns).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.accumulate import weight_gradients
from ..kernels.adapter_routing import OwnRanks
from ..kernels.hash_dropout import Drop
from ..kernels.tensor_state import record_of


class Joined(NamedTuple):
    """Operands of a product: parameters, and tensors over all of their memory, which have no gradient."""

    weight: Tensor
    bias: Tensor | None
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    extra: Sequence[Sequence["Adapter"]] = ()  # beside what the records say, of this call alone: some for each weight

    @property
    def adapted(self) -> bool:
        return any(self.extra) or any(map(adapted, self.weights))


class Format:
    """Format of weights: how they are stored and multiplied. This one is dense, in x's dtype."""

    reads_input = True  # its weight gradients need the unchanged x, which is saved for backward then
    coded = False  # the weight's elements are codes, not its numbers

    def taking(self, x: Tensor, weights: Sequence[Tensor]) -> "Format":
        """The format for this very product: itself, or another where it cannot take x or all of the weights."""
        return self

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        """Return the shape (O, K) of the dequantised weight."""
        return tuple(weight.shape)

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y in differentiable torch: for torch.compile and torch.func, which see into no Function of ours."""
        return F.linear(x, weight, bias)

    def evaluate(self, x: Tensor, joined: Joined) -> Tensor:
        """y alone, without gradients."""
        bias = joined.bias
        return F.linear(x, joined.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def forward(self, x: Tensor, joined: Joined) -> tuple[Tensor, Sequence[Tensor]]:
        """(y, what `backward` finds at the beginning of `kept`)."""
        return self.evaluate(x, joined), ()

    def backward(
        self, g: Tensor, x: Tensor | None, kept: Sequence[Tensor], joined: Joined, wants_dx: bool, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """(dx, the gradient of each weight that is wanted, None where it was delivered), of g (N, O).

        x (N, K) is there if `reads_input` and a weight is trained.
        """
        dx = g @ joined.weight.to(g.dtype) if wants_dx else None
        return dx, [None] * len(wanted) if x is None else _weight_gradients(joined.weights, wanted, g, x)

    def gated(self, x: Tensor, gates: Joined, down: Joined) -> Tensor | None:
        """down(silu(gate) · up) as one function, asked of down's format, where nothing is added; None: part by part."""
        return None


AS_IT_IS = Format()


class Factors(NamedTuple):
    """Something that is added to a product: drop(h bᵀ), of h (N, R) and b (columns, R); the rest as in kernels/lora.py."""

    h: Tensor
    b: Tensor
    drop: Drop | None = None
    blocks: Sequence[int] | None = None
    rows: OwnRanks | None = None


class Adapter:
    """Adapter that adds to a product, with its own parameters. `forward` and `backward` run where autograd is off.

    It hangs in the record of the weight whose product it adds to; x and g are 16-bit or fp32, as the product has them. One that
    is switched off or merged is taken out of the record, and costs nothing.
    """

    parameters: Sequence[Tensor] = ()
    of_layer = False  # True of what a layer's own adapters put there: they do so anew when the layer gets another weight

    @property
    def identity(self) -> tuple:
        """Equal for adapters that add the same, whatever their parameters hold."""
        return tuple(map(id, self.parameters))

    @classmethod
    def join(cls, members: Sequence["Spanning"]) -> Sequence["Spanning"]:
        """Adapters of this class on weights that are multiplied as one. Here they may become one that reads x once."""
        return members

    def plain(self, x: Tensor) -> Tensor:
        """Compute the adapter's part of y in differentiable torch, as `Format.plain`."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Add to y, in place; what `backward` finds as `kept`."""
        raise NotImplementedError

    def backward(self, g: Tensor, x: Tensor, kept: Sequence[Tensor], dx: Tensor | None) -> Sequence[Tensor | None]:
        """Add to dx (N, K), in place; the gradients of `parameters`, of g (N, O) and x (N, K).

        None where one is not wanted or was delivered (kernels/accumulate.py).
        """
        raise NotImplementedError

    def factors(self, x: Tensor) -> tuple[Factors, Sequence[Tensor]] | None:
        """Instead of `forward`: what a product adds as it writes y, and `kept`. None: `forward` adds."""
        return None

    def share(self, g: Tensor, kept: Sequence[Tensor]) -> Factors | None:
        """Return the adapter's part of dx, likewise. `backward` gets it then, and does not change dx."""
        return None


class Spanning(NamedTuple):
    """An adapter and the columns of y that it adds to."""

    adapter: Adapter
    start: int
    stop: int

    def of(self, y: Tensor) -> Tensor:
        return y[..., self.start : self.stop]


def format_of(weight: Tensor) -> Format:
    record = record_of(weight)
    return AS_IT_IS if record is None or record.format is None else record.format


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """Its own, or where it is in codes that of its numbers."""
    return format_of(weight).shape(weight)


def size_of(weight: Tensor) -> int:
    """Return the number of values of the weight; a quantised one has fewer elements."""
    return math.prod(shape_of(weight))


def adapters_of(weight: Tensor) -> tuple[Adapter, ...]:
    record = record_of(weight)
    return () if record is None else record.adapters


def adapted(weight: Tensor) -> bool:
    """Return whether an adapter adds to this weight's products."""
    return len(adapters_of(weight)) > 0


ADAPTERS = "lora"  # name of an adapted layer's child module that has its adapters (lora/pairs.py)


def weight_of(layer: Any) -> Any:
    """The layer's weight, whose record has the layer's adapters: where another one was put in its place, they follow."""
    weight = layer._parameters.get("weight")
    if weight is None:  # a hook or a parametrization computes it
        weight = layer.weight
    adapters = layer._modules.get(ADAPTERS) if layer._modules else None
    if adapters is not None and hasattr(adapters, "follow") and not torch.compiler.is_compiling():
        adapters.follow(weight)
    return weight


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, a shard of rows on each rank (parallel/sharded.py)."""
    return hasattr(tensor, "__create_chunk_list__")


def whole(weight: Tensor) -> Tensor:
    """All of it. Of a sharded one all ranks must call this, and each gets it."""
    return weight.full_tensor() if is_sharded(weight) else weight  # type: ignore[attr-defined]


def rows_of(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def _weight_gradients(weights: Sequence[Tensor], wanted: Sequence[bool], g: Tensor, x: Tensor) -> Sequence[Tensor | None]:
    """One product when every weight trains; else only the rows of those that do."""
    if all(wanted):
        return weight_gradients(weights, g, x)
    if not any(wanted):  # x is there for an adapter
        return [None] * len(weights)
    parts = g.split([w.shape[0] for w in weights], 1)
    return [weight_gradients([w], part, x)[0] if want else None for w, part, want in zip(weights, parts, wanted)]
