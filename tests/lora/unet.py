"""A small network as diffusion has them: convolutions, norms over groups of channels, attention over pixels."""

import torch
import torch.nn.functional as F
from torch import nn

import gpubound as gb


class GroupNorm(nn.GroupNorm):
    def forward(self, x):
        return gb.kernels.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class ResBlock(nn.Module):
    def __init__(self, channels, outputs, time):
        super().__init__()
        self.norm1, self.norm2 = GroupNorm(2, channels), GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(channels, outputs, 3, padding=1)
        self.time_proj = nn.Linear(time, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(channels, outputs, 1)

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time_proj(time)[..., None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, channels, heads=2):
        super().__init__()
        self.heads, self.norm = heads, GroupNorm(2, channels)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x):
        rows = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (p(rows).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in (self.to_q, self.to_k, self.to_v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.to_out(y).transpose(1, 2).view_as(x)


class UNet(nn.Module):
    def __init__(self, channels=8, time=6):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([ResBlock(channels, 2 * channels, time), Attention(2 * channels)])
        self.up = nn.Conv2d(2 * channels, channels, 3, padding="same")
        self.conv_out = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x, time):
        x = self.conv_in(x)
        block, attention = self.middle
        h = attention(block(self.down(x), time))
        h = self.up(F.interpolate(h, scale_factor=2.0))
        return self.conv_out(torch.cat([x, h], 1))


def unet():
    torch.manual_seed(0)
    return UNet()


def images(seed=0, samples=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 8, 8, generator=g), torch.randn(samples, 6, generator=g)


def denoising(model, batch):
    """The sum of squares and how many they are."""
    noisy, time, noise = batch
    return (model(noisy, time).to(noise.dtype) - noise).square().sum(), torch.tensor(noise.numel())


def noisy(seed=0, samples=4):
    x, time = images(seed, samples)
    return x, time, torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 99))
