"""Five models that are no transformers of text, each with a batch and a loss: what bench_steps trains.

Small enough that eager PyTorch waits for launches in most of them, as such models do on a large GPU.

Legend: B batch, T steps of a sequence, C channels, H hidden width, N nodes, E edges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]  # of a size
    size: int  # of a batch on a GPU
    loss: Callable[[Any, Batch], Tensor]  # the mean
    tiny: Callable[[], nn.Module] | None = None  # for a dry run, where `model` is too large

    def summed(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss as gb.TrainStep takes it: the sum over the batch, and the number of items."""
        rows = len(next(iter(batch.values())))
        return self.loss(model, batch) * rows, torch.full((), rows, device=next(model.parameters()).device)


class Residual(nn.Module):
    """Two convolutions with group norms, given the time of the noise."""

    def __init__(self, inputs: int, outputs: int, times: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.convolutions = nn.ModuleList([nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)])
        self.time = nn.Linear(times, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convolutions[0](F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.convolutions[1](F.silu(self.norms[1](y)))


class UNet(nn.Module):
    """The noise in an image, from three resolutions with skip connections."""

    def __init__(self, width: int = 64):
        super().__init__()
        widths, times = [width, 2 * width, 2 * width], 4 * width
        self.embed = nn.Sequential(nn.Linear(1, times), nn.SiLU(), nn.Linear(times, times))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        pairs = list(zip([width, *widths], widths))
        self.down = nn.ModuleList(Residual(a, b, times) for a, b in pairs)
        self.middle = Residual(widths[-1], widths[-1], times)
        self.up = nn.ModuleList(Residual(2 * b, a, times) for a, b in reversed(pairs))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded, x, kept = self.embed(time[:, None]), self.first(x), []
        for block in self.down:
            x = block(x, embedded)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, embedded)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1), embedded)
        return self.last(x)


class LSTM(nn.Module):
    def __init__(self, words: int = 8192, width: int = 512, layers: int = 2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class ViT(nn.Module):
    """A small vision transformer, of torch's own encoder layers."""

    def __init__(
        self, width: int = 384, layers: int = 12, heads: int = 6, patch: int = 16, image: int = 224, classes: int = 1000
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first, self.places = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width)),
        )
        layer = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, **layer) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class WorldModel(nn.Module):
    """A recurrent state-space model: what an agent sees is encoded, a state is carried over T steps, and heads predict."""

    def __init__(self, channels: int = 32, width: int = 256, actions: int = 6, state: int = 64):
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
            layers += [nn.Conv2d(a, b, 4, 2, 1), nn.ELU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels * 16, width))
        self.cell = nn.GRUCell(width, width)
        self.into = nn.Sequential(nn.Linear(state + actions, width), nn.ELU())
        self.prior = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 2 * state))
        self.posterior = nn.Sequential(nn.Linear(2 * width, width), nn.ELU(), nn.Linear(width, 2 * state))
        self.decoder = nn.Sequential(nn.Linear(width + state, width), nn.ELU(), nn.Linear(width, width))
        self.reward = nn.Sequential(nn.Linear(width + state, width), nn.ELU(), nn.Linear(width, 1))
        self.state = state

    def forward(self, images: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        """images (B, T, 3, 32, 32), actions (B, T, A), noise (B, T, state) -> rewards, what was seen and its prediction, KL"""
        B, T = images.shape[:2]
        seen = self.encoder(images.flatten(0, 1)).view(B, T, -1)
        hidden, state = torch.zeros_like(seen[:, 0]), torch.zeros_like(noise[:, 0])
        features, divergences = [], []
        for t in range(T):
            hidden = self.cell(self.into(torch.cat([state, actions[:, t]], -1)), hidden.to(seen.dtype))
            mean, spread = self.prior(hidden).float().chunk(2, -1)
            new_mean, new_spread = self.posterior(torch.cat([hidden, seen[:, t]], -1)).float().chunk(2, -1)
            wide, new_wide = F.softplus(spread) + 0.1, F.softplus(new_spread) + 0.1
            state = (new_mean + new_wide * noise[:, t]).to(noise.dtype)
            divergences.append((wide / new_wide).log() + (new_wide**2 + (new_mean - mean) ** 2) / (2 * wide**2) - 0.5)
            features.append(torch.cat([hidden, state.to(hidden.dtype)], -1))
        together = torch.stack(features, 1)
        return self.reward(together)[..., 0], seen, self.decoder(together), torch.stack(divergences, 1).sum(-1)


class GNN(nn.Module):
    """Messages along edges, summed at their target nodes."""

    def __init__(self, inputs: int = 64, width: int = 128, layers: int = 4, classes: int = 16):
        super().__init__()
        self.first, self.head = nn.Linear(inputs, width), nn.Linear(width, classes)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.first(nodes)
        for message, update in zip(self.messages, self.updates):
            sent = message(torch.cat([x[edges[0]], x[edges[1]]], -1))
            x = x + update(torch.cat([x, torch.zeros_like(x).index_add(0, edges[1], sent.to(x.dtype))], -1))
        return self.head(x)


def _unet_loss(model: UNet, batch: Batch) -> Tensor:
    shade = batch["time"].cos()[:, None, None, None]
    noised = shade * batch["image"] + (1 - shade**2).sqrt() * batch["noise"]
    return F.mse_loss(model(noised, batch["time"]).float(), batch["noise"].float())


def _words_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).float().flatten(0, 1), batch["labels"].flatten())


def _classes_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["image"]).float(), batch["label"])


def _world_loss(model: WorldModel, batch: Batch) -> Tensor:
    reward, seen, decoded, divergence = model(batch["images"], batch["actions"], batch["noise"])
    far = F.mse_loss(decoded.float(), seen.float().detach()) + F.mse_loss(reward.float(), batch["reward"].float())
    return far + divergence.clamp_min(1.0).mean()


def _nodes_loss(model: GNN, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["nodes"], batch["edges"].T).float(), batch["label"])


def _unet_batch(size: int) -> Batch:
    return {"image": torch.randn(size, 3, 32, 32), "noise": torch.randn(size, 3, 32, 32), "time": torch.rand(size)}


def _words_batch(size: int) -> Batch:
    return {"ids": torch.randint(8192, (size, 64)), "labels": torch.randint(8192, (size, 64))}


def _vit_batch(size: int) -> Batch:
    return {"image": torch.randn(size, 3, 224, 224), "label": torch.randint(1000, (size,))}


def _world_batch(size: int) -> Batch:
    return {
        "images": torch.rand(size, 16, 3, 32, 32), "actions": torch.randn(size, 16, 6), "noise": torch.randn(size, 16, 64),
        "reward": torch.randn(size, 16),
    }  # fmt: skip


def _graph_batch(size: int) -> Batch:
    return {"nodes": torch.randn(size, 64), "edges": torch.randint(size, (8 * size, 2)), "label": torch.randint(16, (size,))}


TASKS = {
    "unet": Task(UNet, _unet_batch, 16, _unet_loss),
    "lstm": Task(LSTM, _words_batch, 32, _words_loss),
    "vit": Task(ViT, _vit_batch, 32, _classes_loss, lambda: ViT(width=48, layers=1)),
    "world": Task(WorldModel, _world_batch, 16, _world_loss),
    "gnn": Task(GNN, _graph_batch, 4096, _nodes_loss),
}
