"""The cosine schedule, the three targets and DDIM's step, beside numbers and formulas of their own."""

import math

import pytest
import torch

from gpubound.models.diffusion.objective import TARGETS, alpha_bar, ddim_step, min_snr, noise_share, noised, parts_of, target_of

TIMES = torch.tensor([0.05, 0.3, 0.62, 0.9])
ROWS = alpha_bar(TIMES).double()


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_schedule_is_the_squared_cosine():
    def wanted(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2

    for t in (0.0, 0.1, 0.5, 0.77, 0.99):
        assert alpha_bar(torch.tensor(t)).item() == pytest.approx(wanted(t), rel=1e-5)
    assert alpha_bar(torch.tensor(0.5)).item() == pytest.approx(0.4939, abs=1e-4), "the unsquared cosine is 0.703 there"
    assert alpha_bar(torch.tensor(0.0)) == 1 and 0 < alpha_bar(torch.tensor(1.0)) < 2e-5
    assert (alpha_bar(torch.linspace(0, 1, 100)).diff() < 0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_holds_the_same_data_and_noise(target):
    x0, noise = drawn(0), drawn(1)
    x = noised(x0, noise, ROWS)
    for got, want in zip(parts_of(target, x, target_of(target, x0, noise, ROWS), ROWS), (x0, noise)):
        assert (got - want).abs().max() < 1e-10


def test_ddims_step_has_its_coefficients():
    x, noise, later = drawn(0), drawn(1), alpha_bar(TIMES - 0.04).double()
    now, then = ROWS.view(4, 1, 1), later.view(4, 1, 1)
    want = (then / now).sqrt() * x + ((1 - then).sqrt() - (then * (1 - now) / now).sqrt()) * noise
    assert (ddim_step("eps", x, noise, ROWS, later) - want).abs().max() < 1e-10


@pytest.mark.parametrize("target", TARGETS)
def test_weights_near_the_clean_end_with_a_large_cap(target):
    """1 - ᾱ is 3e-7 at the smallest of these times, a few units in the last place of ᾱ in fp32."""
    times = torch.tensor([1e-5, 1e-4, 1e-3, 0.01, 0.5, 0.9])
    angle, first = (times.double() + 0.008) / 1.008 * math.pi / 2, 0.008 / 1.008 * math.pi / 2
    signal = (angle.cos() / math.cos(first)).square()
    noise = (angle - first).sin() * (angle + first).sin() / math.cos(first) ** 2
    got = min_snr(target, alpha_bar(times), 1e6, noise_share(times)).double()
    assert (got / min_snr(target, signal, 1e6, noise) - 1).abs().max() < 2e-5
