"""noise_prediction: the loss beside the formula, one loss for all targets, training, and what it refuses."""

import math

import pytest
import torch
from torch import nn

from gpubound.models.diffusion.objective import TARGETS, NoisePrediction
from gpubound.train import AdamW, TrainStep


class Guess(nn.Module):
    """Its own guess of x0, said as the target wants it."""

    def __init__(self, target: str = "x0"):
        super().__init__()
        torch.manual_seed(0)
        self.target, self.guess, self.told = target, nn.Linear(5, 5), []

    def forward(self, x, time, offset=0.0):
        self.told.append((x.detach(), time.detach()))
        x0, share = self.guess(x) + offset, alpha(time)[:, None].to(x.dtype)
        noise = (x - share.sqrt() * x0) / (1 - share).sqrt()
        return {"eps": noise, "x0": x0, "v": share.sqrt() * noise - (1 - share).sqrt() * x0}[self.target]


def alpha(time: torch.Tensor) -> torch.Tensor:
    first = math.cos(0.008 / 1.008 * math.pi / 2)
    return (((time.double() + 0.008) / 1.008 * (math.pi / 2)).cos() / first).square().clamp_min(1e-5)


def clean(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1)) * 0.3 + 1


def test_the_loss_is_the_formula_whatever_is_predicted():
    losses = []
    for target in TARGETS:
        model = Guess(target)
        torch.manual_seed(2)
        total, count = NoisePrediction(target)(model, {"x": clean(), "offset": 0.25})
        losses.append(total.item())
    ((x, time),) = model.told
    share = alpha(time)
    guess = model.guess(x).double() + 0.25
    want = ((share / (1 - share)).clamp(max=5.0) * (guess - clean().double()).square().sum(1)).sum()
    assert count == 16 * 5 and losses == pytest.approx([want.item()] * 3, rel=1e-3)
    assert torch.allclose(time.sort().values.diff(), torch.full((15,), 1 / 16, dtype=time.dtype), atol=1e-6)
    noise = (x.double() - share.sqrt()[:, None] * clean().double()) / (1 - share).sqrt()[:, None]
    assert abs(noise.mean().item()) < 0.4 and abs(noise.std().item() - 1) < 0.3, "80 normal numbers"


def test_training_lowers_it_and_validation_is_repeatable():
    model, objective = Guess(), NoisePrediction("x0", levels=4)
    before = objective.validate(model, [clean()])
    assert before == objective.validate(model, [clean()])
    torch.manual_seed(0)
    step = TrainStep(model, objective, AdamW(lr=2e-2), precision="fp32", graph="require")
    for _ in range(60):
        values = step(clean()).read()
    assert values.tokens == 80 and objective.validate(model, [clean()])["held_out"] < before["held_out"] / 3


def test_the_time_stays_fp32_beside_16_bit_weights():
    model = Guess()
    step = TrainStep(model, NoisePrediction("x0"), precision="bf16", graph="off")
    step(clean())
    x, time = model.told[-1]
    assert x.dtype == torch.bfloat16 and time.dtype == torch.float32
    assert (time != time.bfloat16().float()).any()


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: NoisePrediction("noise"), "target: got 'noise', wanted one of eps, v, x0"),
        (lambda: NoisePrediction(most_snr=0), "most_snr: got 0"),
        (lambda: NoisePrediction(levels=0), "levels: got 0"),
        (lambda: NoisePrediction()(Guess(), {"y": clean()}), "x must be a floating-point tensor .* got a NoneType"),
        (lambda: NoisePrediction()(lambda x, time: x[:, :2], clean()), r"function predicts \(16, 2\) for x \(16, 5\)"),
    ],
)
def test_refusals(call, named):
    with pytest.raises(ValueError, match=f"^noise_prediction: {named}"):
        call()
