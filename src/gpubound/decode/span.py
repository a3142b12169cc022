"""Some of a model's layers, in a row on one device: one by one through a step, or through a prompt.

Legend: B rows, T tokens of a prompt.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import entered
from ..kernels import add_rms_norm
from ..kernels.decode_product import Norm
from ..models.decoding import AttentionWeights, DenseWeights, ExpertWeights, Reader
from .kv_cache import Cache
from .layer import CachedAttention, DenseMLP, Workspace, normed
from .lora import adapter_names
from .moe import MoELayer
from .runner import RunnerConfig
from .stages.plan import LayerStage, described
from .weight_view import WeightView

# What runs the weights of a layer's part. Another MLP is one more line, its record in models/decoding.py.
PARTS: dict[type, Any] = {AttentionWeights: CachedAttention, DenseWeights: DenseMLP, ExpertWeights: MoELayer}
META = torch.device("meta")


class Layer(NamedTuple):
    attention: CachedAttention
    mlp: Any  # a part with the methods of layer.DenseMLP


class LayerGroup:
    """The layers of a stage, and all that they work on: cache, tables and buffers on their device."""

    def __init__(self, live: WeightView, build: RunnerConfig, stage: LayerStage) -> None:
        self.numbers, self.device = stage.layers, stage.device
        tables = [(cos.to(self.device), sin.to(self.device)) for cos, sin in live.tables(build.max_length)]
        self.cache = Cache(build, stage.layers, live.shape, live.dtype, self.device)
        self.bench = Workspace(live.shape, self.cache, tables, build.max_batch * build.tokens, build.tokens)
        self.layers: list[Layer] = []

    @staticmethod
    def bytes_kept(live: WeightView, build: RunnerConfig, layers: range) -> int:
        """Of cache and tables."""
        return Cache(build, layers, live.shape, live.dtype, META).nbytes + bytes_of_tables(live.reader, build)

    def report(self, number: int) -> tuple[str, str, str]:
        """(stage, where, what lies there) for the decoder's table."""
        weights = {t.data_ptr(): t.nbytes for layer in self.layers for part in layer for t in part.weights.tensors()}
        return f"stage {number}", str(self.device), described(self.numbers, sum(weights.values()), self.cache.nbytes)

    def take(self, live: WeightView, form: Any) -> None:
        """Take the weights as they are now. What was made of them before is dropped layer by layer."""
        adapting = self.bench.adapting
        adapting.begin(adapter_names(live.model))
        for place, number in enumerate(self.numbers):
            given = number, form, self.bench
            self.layers[place : place + 1] = [Layer(*(PARTS[type(part)](part, *given) for part in live.layers[number]))]
        adapting.close()

    def step(self, x: Tensor, position: Tensor, mode: int, narrow: bool) -> None:
        """The stream x (B, hidden) behind these layers, in place."""
        with entered(self.device):
            for attention, mlp in self.layers:
                if narrow:
                    attention.step(x, position, mode)
                    mlp.step(x, mode)
                else:
                    attention.wide_step(x, position, mode)
                    mlp.wide_step(x, mode)

    def prompt(self, x: Tensor, pending: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """The stream (B, T, hidden) of places start.., and what is still to be added to it."""
        # These copies lie in the devices' own streams, where one waits for the work of both and holds up what follows. Devices
        # that read one chunk each meanwhile have the next no later for it; rows in lanes do (stages/graphs.py).
        x, end = x.to(self.device), start + x.shape[1]
        pending = None if pending is None else pending.to(self.device)
        with entered(self.device):
            for attention, mlp in self.layers:
                h, x = added(x, pending, attention.weights.norm)
                h, x = added(x, attention.behind(attention.prompt(h, start, end)), mlp.weights.norm)
                pending = mlp.behind(mlp.prompt(h))
        assert pending is not None  # there is a layer
        return x, pending


def bytes_of_tables(reader: Reader, build: RunnerConfig) -> int:
    """cos and sin of each kind of angles, and those of layers that do not turn."""
    return (len(reader.angles()) + 1) * build.max_length * reader.shape().head_dim * 4


def added(x: Tensor, pending: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """(what the next part of a prompt reads, the stream with `pending` added)."""
    if norm is not None and pending is not None:
        return add_rms_norm(x, pending, norm.weight, norm.eps, norm.offset)
    x = x if pending is None else x + pending
    return normed(x, norm), x
