"""Train a denoiser of continuous data, and draw from it: python examples/denoise.py"""

import math
from itertools import pairwise

import torch
from torch import nn

import gpubound as gb

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Denoiser(nn.Module):
    """Predicts the clean data of x at a time from 0 (clean) to 1 (noise)."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width + 1, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, width))

    def forward(self, x, time):
        return self.layers(torch.cat([x, time.to(x.dtype)], -1))


def signal(time):  # the share of the data, from 1 to nearly 0
    return (time * (0.99 * math.pi / 2)).cos().square()


def loss(model, clean):
    time, noise = torch.rand(len(clean), 1, device=clean.device), torch.randn_like(clean)
    x = signal(time).sqrt() * clean + (1 - signal(time)).sqrt() * noise
    return (model(x, time) - clean).square().sum(), torch.full((), clean.numel(), device=clean.device)


model = Denoiser(2).to(device)
step = gb.TrainStep(model, loss, gb.AdamW(lr=3e-3), precision="fp32")
for _ in range(1000):
    angle = 2 * math.pi * torch.rand(256, device=device)
    step(torch.stack([angle.cos(), angle.sin()], -1))
x, times = torch.randn(512, 2, device=device), torch.linspace(1, 0, 51, device=device)
with torch.no_grad():
    for now, after in pairwise(times):
        clean = model(x, now.expand(len(x), 1))
        noise = (x - signal(now).sqrt() * clean) / (1 - signal(now)).sqrt()
        x = signal(after).sqrt() * clean + (1 - signal(after)).sqrt() * noise
radius = x.norm(dim=-1)
print(f"radius {radius.mean():.2f} ± {radius.std():.2f} of points on a circle of 1")
