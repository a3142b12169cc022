"""Residual streams between layers: reads and writes by attention and MLP, for many tokens and for a decoding step."""

from torch import Tensor

from ....decode.tensors.peers import Peer
from ....kernels import send_words
from ..family import HyperWeights, LinearWeights
from ..kernels import hc_post, hc_pre, hc_read, hc_sums, hc_write, send_products
from .products import GEMV_ROWS, product, products


class Streams:
    """Residual streams x (B, T, n, hidden).

    Attention or MLP calls `read`, then `give` with its output; `spread` adds the output to the streams.
    """

    given: Tensor

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._give, self._mix = x, x  # hc_post's weights, from the last read

    def read(self, w: HyperWeights) -> Tensor:
        """Return the input (B, T, hidden) of the next attention or MLP."""
        u, self._give, self._mix = hc_pre(self.x, w.product, w.scale, w.base, w.eps, w.norm_eps, w.rounds)
        return u

    def give(self, y: Tensor, more: Tensor | None = None) -> None:
        """Store the output y (B, T, hidden) of attention or MLP. more: (B T, some, hidden) terms, which are added to y."""
        self.given = y if more is None else y + more.sum(1).view_as(y)

    def give_product(self, low: Tensor, layer: LinearWeights) -> None:
        """Multiply low (B T, channels) by a layer and store the product as the output."""
        y = products(low, None, layer)[0] if len(low) <= GEMV_ROWS else product(low, layer)
        self.give(y.view(*self.x.shape[:2], -1))

    def term(self) -> Tensor:
        """Return the stored output (B, T, hidden)."""
        return self.given

    def spread(self, w: HyperWeights, following: HyperWeights | None) -> None:
        """Add the stored output to the streams. following: weights of the next attention or MLP, or None after the last."""
        self.x = hc_post(self.x, self.given, self._give, self._mix)


class FewStreams(Streams):
    """fp32 streams of few tokens. `spread` also computes the sums that the next `read` needs."""

    _sums: Tensor | None = None
    _more: Tensor | None = None

    def read(self, w: HyperWeights) -> Tensor:
        x = self.x.flatten(0, 1)
        self._now = hc_sums(x, w.product) if self._sums is None else self._sums
        return hc_read(x, self._now, w.scale, w.base, w.eps, w.norm_eps).unflatten(0, self.x.shape[:2])

    def give(self, y: Tensor, more: Tensor | None = None) -> None:
        self.given, self._more = y, more

    def term(self) -> Tensor:
        return self.given if self._more is None else self.given + self._more.sum(1).view_as(self.given)

    def spread(self, w: HyperWeights, following: HyperWeights | None) -> None:
        self._written(self.given.flatten(0, 1), w, following)

    def _written(self, y: object, w: HyperWeights, following: HyperWeights | None) -> None:
        weight = None if following is None else following.product
        given = self.x.flatten(0, 1), y, self._now, w.scale, w.base, w.eps, w.norm_eps, w.rounds
        x, self._sums = hc_write(*given, self._more, weight)  # type: ignore[arg-type]
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
