"""Diffusion of continuous data, such as embeddings: the noise schedule, the training objective and the sampler.

At time t, from 0 (clean) to 1 (noise), x = √ᾱ · x0 + √(1 - ᾱ) · ε with ε normal and ᾱ = alpha_bar(t). A model, called as
`model(x, time=t)`, predicts one of three targets, from each of which x0 and ε follow:

    eps   ε
    x0    x0
    v     √ᾱ · ε - √(1 - ᾱ) · x0

In training each row gets a time, uniform in (0, 1]. The loss is the squared error, weighted by min-SNR: an error of x0 is
weighted by its row's ratio of signal to noise, but by at most `most_snr`. Times and ᾱ have one value per row of x, in fp32.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...decode.request import check_count
from ...graph import Captured, capture
from ...train.objectives import Objective
from ..registry import mode

MODES = ("auto", "require", "off")  # of `graph`
MOST = 8  # shapes whose buffers and graph are cached
TARGETS = ("eps", "v", "x0")
OFFSET = 0.008  # a lower bound of the noise near t = 0 (Nichol and Dhariwal 2021)
LEAST = 1e-5  # ᾱ at t = 1, whose root is a divisor in the formula of x0


def check_target(caller: str, target: str) -> None:
    if target not in TARGETS:
        raise ValueError(f"{caller}: target: got {target!r}, wanted one of {', '.join(TARGETS)}.")


def spread_times(rows: int, least: float, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Return a time in (least, 1] for each row: evenly spaced, and rotated by one random number.

    Each time is uniform, and together they cover the range evenly, which lowers the variance of the batch's mean.
    """
    positions = torch.arange(rows, device=device, dtype=torch.float32) / rows
    return 1 - (1 - least) * ((positions + torch.rand(1, device=device, generator=generator, dtype=torch.float32)) % 1)


def alpha_bar(t: Tensor) -> Tensor:
    """Return ᾱ of the cosine schedule: cos²((t + s) / (1 + s) · π / 2), 1 at t = 0."""
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
    """Return √ᾱ and √(1 - ᾱ) of each row, in at least fp32, in a shape that broadcasts over `like`."""
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

    noise_B: 1 - ᾱ with more digits (noise_share), for a large `most`
    """
    signal, noise = alpha_bar_B, 1 - alpha_bar_B if noise_B is None else noise_B
    # an error of ε is the ratio's root times one of x0, one of v 1 / √(1 - ᾱ)
    capped = torch.minimum(signal, most * noise)
    return capped / {"eps": signal, "v": torch.ones_like(noise), "x0": noise.clamp_min(torch.finfo(noise.dtype).tiny)}[target]


def parts_of(target: str, x: Tensor, predicted: Tensor, alpha_bar_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return x0 and ε that follow from a prediction for x."""
    signal, sigma = roots(alpha_bar_B, x)
    if target == "eps":
        return (x - sigma * predicted) / signal, predicted
    if target == "v":
        return signal * x - sigma * predicted, sigma * x + signal * predicted
    return predicted, (x - signal * predicted) / sigma.clamp_min(math.sqrt(LEAST))


def ddim_step(target: str, x: Tensor, predicted: Tensor, now_B: Tensor, next_B: Tensor) -> Tensor:
    """Return x at the ᾱ `next_B`, from x and its prediction at `now_B`: the same x0 and ε (DDIM, Song et al. 2020)."""
    x0, noise = parts_of(target, x, predicted, now_B)
    return noised(x0, noise, next_B)


SEED = 0x5EED  # of the times and the noise in validation


@dataclass(eq=False)
class NoisePrediction(Objective):
    """Objective of a denoiser. A batch is a clean tensor (B, ...), or a dict with it as x and the model's other arguments."""

    target: str = "eps"  # or v, or x0
    most_snr: float = 5.0  # the largest weight of an error in x0
    levels: int = 8  # times per row in validation

    of_corpus: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_target("noise_prediction", self.target)
        if not 0 < self.most_snr < float("inf"):
            raise ValueError(f"noise_prediction: most_snr: got {self.most_snr!r}, wanted a finite number above 0.")
        if not isinstance(self.levels, int) or self.levels < 1:
            raise ValueError(f"noise_prediction: levels: got {self.levels!r}, wanted a whole number of at least 1.")

    def __call__(self, model: Any, batch: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x0, others = _split(batch)
        total = self._error(model, x0, others, spread_times(len(x0), 0.0, x0.device), torch.randn_like(x0))
        return total if scale is None else total * scale, torch.full((), x0.numel(), device=x0.device)

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean weighted error, at times that cover the range evenly, with noise from a fixed seed."""
        totals, count, generator = [], 0, None
        for batch in batches:
            x0, others = _split(batch)
            generator = generator or torch.Generator(x0.device).manual_seed(SEED)
            for _ in range(self.levels):
                times = spread_times(len(x0), 0.0, x0.device, generator)
                noise = torch.randn(x0.shape, device=x0.device, dtype=x0.dtype, generator=generator)
                totals.append(self._error(model, x0, others, times, noise))
                count += x0.numel()
        return {"held_out": (torch.stack(totals).double().sum() / count).item()}

    def _error(self, model: Any, x0: Tensor, others: dict[str, Any], times: Tensor, noise: Tensor) -> Tensor:
        """Return Σ weight · (prediction - target)², in at least fp32."""
        share = alpha_bar(times)
        x = noised(x0, noise, share)
        predicted, target = model(x.to(x0.dtype), time=times, **others), target_of(self.target, x0, noise, share)
        if predicted.shape != target.shape:
            raise ValueError(
                f"noise_prediction: {type(model).__name__} predicts {tuple(predicted.shape)} for x {tuple(target.shape)}; it "
                f"must give one value for each of x's."
            )
        weights = min_snr(self.target, share, self.most_snr, noise_share(times))
        return (weights * (predicted.to(x.dtype) - target.to(x.dtype)).square().flatten(1).sum(1)).sum()


def _split(batch: Any) -> tuple[Tensor, dict[str, Any]]:
    arguments = batch if isinstance(batch, Mapping) else {"x": batch}
    x0 = arguments.get("x")
    if not isinstance(x0, Tensor) or not x0.is_floating_point() or x0.dim() < 2:
        got = f"{x0.dtype} {tuple(x0.shape)}" if isinstance(x0, Tensor) else f"a {type(x0).__name__}"
        raise ValueError(f"noise_prediction: x must be a floating-point tensor (B, ...) of clean rows, got {got}.")
    return x0, {key: value for key, value in arguments.items() if key != "x"}


class NoiseSampler:
    """Draw data from `model(x, time=t)` by DDIM, with the model's current weights.

    A step reads its number from the device, so that it is captured once per shape; the host reads nothing between steps.

    target   what the model predicts: eps, v or x0
    graph    "auto": the step is captured on a GPU. "require": captured, or GraphError. "off": called
    """

    def __init__(self, model: nn.Module, target: str = "eps", graph: str = "auto") -> None:
        check_target("NoiseSampler", target)
        if graph not in MODES:
            raise ValueError(f"NoiseSampler: graph: got {graph!r}, wanted one of {', '.join(MODES)}.")
        self.model, self.target, self.graph = model, target, graph
        self._loops: dict[tuple, DdimLoop] = {}

    @torch.no_grad()
    def generate(self, noise: Tensor, steps: int = 50, **others: Any) -> Tensor:
        """Return data from normal `noise` (B, ...) in `steps` steps, from t = 1 to 0. `others` are arguments of the model."""
        check_count("steps", steps)
        if not noise.is_floating_point() or noise.dim() < 2:
            raise ValueError(
                f"generate: noise: got {noise.dtype} {tuple(noise.shape)}, wanted a floating-point tensor (B, ...)."
            )
        with mode(self.model, training=False):
            if self.graph == "off" or (self.graph == "auto" and not noise.is_cuda):
                loop = DdimLoop(self, noise, steps, others)
                for _ in range(steps):
                    loop.step()
                return loop.x.to(noise.dtype)
            return self._captured(noise, steps, others)

    def _captured(self, noise: Tensor, steps: int, others: dict[str, Any]) -> Tensor:
        arguments = [(name, value.data_ptr() if isinstance(value, Tensor) else value) for name, value in others.items()]
        key = (tuple(noise.shape), noise.dtype, noise.device, steps, tuple(arguments))
        if key not in self._loops:
            if len(self._loops) == MOST:
                del self._loops[next(iter(self._loops))]
            self._loops[key] = DdimLoop(self, noise, steps, others)
        loop = self._loops[key]
        loop.begin(noise)
        loop.graph = loop.graph or capture(loop.step, state=[self.model, loop.x, loop.number, loop.times])
        for _ in range(steps):
            loop.graph()
        return loop.x.to(noise.dtype, copy=True)


class DdimLoop:
    """Data between noise and the result, and one step."""

    def __init__(self, sampler: NoiseSampler, noise: Tensor, steps: int, others: dict[str, Any]) -> None:
        self.sampler, self.steps, self.others, self.dtype = sampler, steps, others, noise.dtype
        self.times = torch.linspace(1, 0, steps + 1, device=noise.device, dtype=torch.float32)
        self.number = torch.zeros(1, device=noise.device, dtype=torch.int64)
        self.x = noise.to(torch.promote_types(noise.dtype, torch.float32), copy=True)
        self.graph: Captured | None = None

    def begin(self, noise: Tensor) -> None:
        self.x.copy_(noise)
        self.number.zero_()

    @torch.no_grad()
    def step(self) -> None:
        at = self.number.clamp(max=self.steps - 1)  # a capture's warm-up steps go beyond the last
        now, later = (self.times[index].expand(len(self.x)) for index in (at, at + 1))
        predicted = self.sampler.model(self.x.to(self.dtype), time=now, **self.others).to(self.x.dtype)
        self.x.copy_(ddim_step(self.sampler.target, self.x, predicted, alpha_bar(now), alpha_bar(later)))
        self.number.add_(1)
