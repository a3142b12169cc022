"""The streams between layers, as a part reads and writes them: of many tokens, and of a step's few."""

from torch import Tensor

from ...kernels import hc_post, hc_pre, hc_read, hc_sums, hc_write
from ...models.deepseek_v4.weights import HyperWeights
from .products import NARROW


class Streams:
    """x (B, T, n, hidden)."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._give, self._mix = x, x  # how hc_post spreads what the part gives that has read last

    def read(self, w: HyperWeights) -> Tensor:
        """What a part reads, (B, T, hidden)."""
        u, self._give, self._mix = hc_pre(self.x, w.product, w.scale, w.base, w.eps, w.norm_eps, w.rounds)
        return u

    def write(self, y: Tensor, w: HyperWeights, following: HyperWeights | None, more: Tensor | None = None) -> None:
        """Spread what it gives, (B, T, hidden). following: the part that reads next. more: see `FewStreams`."""
        self.x = hc_post(self.x, y, self._give, self._mix)


class FewStreams(Streams):
    """fp32. Each write leaves the sums that the next read wants."""

    _sums: Tensor | None = None

    def read(self, w: HyperWeights) -> Tensor:
        x = self.x.flatten(0, 1)
        self._now = hc_sums(x, w.product) if self._sums is None else self._sums
        return hc_read(x, self._now, w.scale, w.base, w.eps, w.norm_eps).unflatten(0, self.x.shape[:2])

    def write(self, y: Tensor, w: HyperWeights, following: HyperWeights | None, more: Tensor | None = None) -> None:
        """more: (B T, some, hidden), which are added to y."""
        weight = None if following is None else following.product
        given = self.x.flatten(0, 1), y.flatten(0, 1), self._now, w.scale, w.base, w.eps, w.norm_eps, w.rounds
        x, self._sums = hc_write(*given, more, weight)
        self.x = x.unflatten(0, self.x.shape[:2])


def streams_of(x: Tensor) -> Streams:
    return (FewStreams if x.shape[0] * x.shape[1] <= NARROW else Streams)(x)
