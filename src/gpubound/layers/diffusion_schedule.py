"""Gaussian noise on a clean x0, and steps back from it.

At time t, from 0 (clean) to 1 (noise), x = √ᾱ · x0 + √(1 - ᾱ) · ε with ε normal and ᾱ = alpha_bar(t). A model that sees x and t
predicts one of three targets, from each of which x0 and ε follow:

    eps   ε
    x0    x0
    v     √ᾱ · ε - √(1 - ᾱ) · x0

Times and ᾱ have one value for each row of x, and are fp32.
"""

import math

import torch
from torch import Tensor

TARGETS = ("eps", "v", "x0")
OFFSET = 0.008  # keeps the noise near t = 0 from being too small to matter (Nichol and Dhariwal 2021)
LEAST = 1e-5  # ᾱ at t = 1: x0 is found by a division by its root


def check_target(who: str, target: str) -> None:
    if target not in TARGETS:
        raise ValueError(f"{who}: target: got {target!r}, wanted one of {', '.join(TARGETS)}.")


def spread_times(rows: int, least: float, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """A time in (least, 1] for each row: evenly spaced, all turned by one random number. So each is uniform, whatever its row,
    and together they cover the range evenly, which makes the batch's mean steadier."""
    positions = torch.arange(rows, device=device, dtype=torch.float32) / rows
    return 1 - (1 - least) * ((positions + torch.rand(1, device=device, generator=generator, dtype=torch.float32)) % 1)


def alpha_bar(t: Tensor) -> Tensor:
    """The cosine schedule: cos²((t + s) / (1 + s) · π / 2), 1 at t = 0."""
    angle, first = (t.float() + OFFSET) / (1 + OFFSET), OFFSET / (1 + OFFSET)
    return ((angle * (math.pi / 2)).cos() / math.cos(first * math.pi / 2)).square().clamp(LEAST, 1.0)


def noise_share(t: Tensor) -> Tensor:
    """Return 1 - ᾱ at time t. Subtracting ᾱ from 1 in fp32 would leave few digits near t = 0.

    With a = (t + s) / (1 + s) · π / 2 and a0 its value at 0: 1 - cos²a / cos²a0 = sin(a - a0) · sin(a + a0) / cos²a0.
    """
    turn = t.float() / (1 + OFFSET) * (math.pi / 2)
    first = OFFSET / (1 + OFFSET) * math.pi / 2
    return (turn.sin() * (turn + 2 * first).sin() / math.cos(first) ** 2).clamp(0.0, 1.0 - LEAST)


def roots(alpha_bar_B: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(√ᾱ, √(1 - ᾱ)) of each row of `like`, in fp32 or wider, to be multiplied with it."""
    rows = alpha_bar_B.to(torch.promote_types(like.dtype, torch.float32)).view(-1, *[1] * (like.dim() - 1))
    return rows.sqrt(), (1 - rows).sqrt()


def noised(x0: Tensor, noise: Tensor, alpha_bar_B: Tensor) -> Tensor:
    signal, sigma = roots(alpha_bar_B, x0)
    return signal * x0 + sigma * noise


def target_of(target: str, x0: Tensor, noise: Tensor, alpha_bar_B: Tensor) -> Tensor:
    """Return the target of the model's prediction."""
    if target == "v":
        signal, sigma = roots(alpha_bar_B, x0)
        return signal * noise - sigma * x0
    return noise if target == "eps" else x0


def min_snr(target: str, alpha_bar_B: Tensor, most: float, noise_B: Tensor | None = None) -> Tensor:
    """Return the weight of each row's squared error: that of an error in x0, ᾱ / (1 - ᾱ), but no more than `most` (min-SNR,
    Hang et al. 2023), in units of the target. So the three targets have one loss.

    noise_B: 1 - ᾱ where it is known more exactly (noise_share), for a large `most`
    """
    signal, noise = alpha_bar_B, 1 - alpha_bar_B if noise_B is None else noise_B
    # an error of ε is the ratio's root times one of x0, one of v 1 / √(1 - ᾱ)
    capped = torch.minimum(signal, most * noise)
    return capped / {"eps": signal, "v": torch.ones_like(noise), "x0": noise.clamp_min(torch.finfo(noise.dtype).tiny)}[target]


def parts_of(target: str, x: Tensor, predicted: Tensor, alpha_bar_B: Tensor) -> tuple[Tensor, Tensor]:
    """(x0, ε) as a prediction for x has them."""
    signal, sigma = roots(alpha_bar_B, x)
    if target == "eps":
        return (x - sigma * predicted) / signal, predicted
    if target == "v":
        return signal * x - sigma * predicted, sigma * x + signal * predicted
    return predicted, (x - signal * predicted) / sigma.clamp_min(math.sqrt(LEAST))


def ddim_step(target: str, x: Tensor, predicted: Tensor, now_B: Tensor, next_B: Tensor) -> Tensor:
    """x at the ᾱ `next_B`, from x and its prediction at `now_B`: the same x0 and ε in other shares (DDIM, Song et al. 2020)."""
    x0, noise = parts_of(target, x, predicted, now_B)
    return noised(x0, noise, next_B)
