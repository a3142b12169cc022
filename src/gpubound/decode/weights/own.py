"""The model's own weights, read where they lie: no copy, and nothing to make again when they change."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...kernels import (
    Norm,
    add_product,
    add_routed,
    norm_gate_up,
    norm_product,
    routed_gate_up,
    send_product,
    tiled_add_product,
    tiled_norm_gate_up,
    tiled_norm_product,
)
from ...kernels.peer_exchange import Mail
from ...models.decoding import Linear
from ..lora import LoraDelta, given

Maxima = tuple[Tensor | None, Tensor | None]
"""where the partial maxima of a product go, and their rows"""
NO_MAXIMA = (None, None)


class DenseFormat:
    kind: str | None = None
    prefix = ""  # of its kernels' names
    reads = "the live weights"
    adds = True  # what adapters add to its products
    # Largest gate and up of a layer whose kernels let their successors in at once. H200, a whole step: 350m 398 us against 437
    # late, 1b (67 MB) 745 / 789, but 8b (235 MB) 4,250 / 4,018.
    early_bytes = 96 << 20

    def __init__(self, kind: None = None) -> None:
        pass

    def begin(self, model: nn.Module, kept: bool) -> None:
        """The weights of `model` are taken from here on; `kept`: on a CPU, whose step has no kernel for packed ones."""

    def changed(self) -> str | None:
        return None

    def stacked(self, *layers: Linear) -> "DenseLinear":
        return DenseLinear(*layers)

    def gate_up(self, gate: Linear, up: Linear) -> "DenseLinear":
        return DenseLinear(gate, up)

    def head(self, weight: Tensor) -> "DenseLinear":
        return DenseLinear(Linear(weight))

    def experts(self, gate_up: Tensor, down: Tensor) -> "DenseExperts":
        return DenseExperts(gate_up, down)

    def report(self, kernels: str, read: int, whole: int, wide: str) -> list[tuple[str, str, str]]:
        return []


class DenseLinear:
    """Up to three weights that read one x. More rows of it than `few` are multiplied together, on tensor cores."""

    added: LoraDelta | None = None  # what adapters add: the layer's part says it
    few: int | None = None
    copy: Tensor | None = None  # of the stream, which products of rows together read: what is added to it goes there, too

    def __init__(self, *layers: Linear) -> None:
        self.layers = layers
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        self.nbytes = sum(layer.weight.nbytes for layer in layers)
        self._given: Any = tuple(zip(*(layer[:2] for layer in layers), *[(None, None)] * (3 - len(layers))))  # weights, biases

    def norm_product(
        self, x: Tensor, norm: Norm | None, out: Tensor, mode: int, best: Maxima = NO_MAXIMA, cap: float = 0.0
    ) -> Tensor:
        (q, k, v), (q_bias, k_bias, v_bias) = self._given
        if self._many(x):
            return tiled_norm_product(x, norm, q, k, v, q_bias, k_bias, v_bias, out, mode)
        return norm_product(x, norm, q, k, v, q_bias, k_bias, v_bias, out, *best, mode, cap, given(self.added, len(x)))

    def norm_gate_up(self, x: Tensor, norm: Norm | None, activation: str, out: Tensor, mode: int) -> None:
        (gate, up, _), (gate_bias, up_bias, _) = self._given
        if self._many(x):
            tiled_norm_gate_up(x, norm, gate, up, gate_bias, up_bias, out, mode, activation)
            return
        norm_gate_up(x, norm, gate, up, gate_bias, up_bias, out, mode, activation, given(self.added, len(x)))

    def add_product(self, h: Tensor, x: Tensor, mode: int) -> None:
        if self._many(h):
            tiled_add_product(h, *self.layers[0][:2], x, mode, None if self.copy is None else self.copy[: len(h)])
        else:
            add_product(h, *self.layers[0][:2], x, mode, given(self.added, len(h)))

    def _many(self, x: Tensor) -> bool:
        return self.few is not None and len(x) > self.few

    def send_product(self, h: Tensor, mail: Mail, mode: int) -> None:
        send_product(h, *self.layers[0][:2], mail, mode)

    def matrices(self) -> list[Tensor]:
        return [layer.weight.detach() for layer in self.layers]  # without their records: `added` is added apart

    def exact(self) -> Sequence[Linear]:
        return self.layers

    def tensors(self) -> list[Tensor]:
        return [*self.matrices(), *self.biases, *(self.added.tensors() if self.added else ())]


class DenseExperts:
    """gate_up (E, 2 I, hidden) and down (E, hidden, I)."""

    wide_steps = True  # many rows at once are worth products grouped by expert

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up, self.down = gate_up, down
        self.gate_up_bytes = gate_up[0].nbytes  # of one expert
        self.nbytes = gate_up[0].nbytes + down[0].nbytes  # of one expert

    def routed_gate_up(self, x: Tensor, norm: Norm, ids: Tensor, out: Tensor, mode: int) -> None:
        routed_gate_up(x, norm, self.gate_up, ids, out, mode)

    def add_routed(self, h: Tensor, ids: Tensor, shares: Tensor, x: Tensor, mode: int) -> None:
        add_routed(h, self.down, ids, shares, x, mode)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    exact = matrices
