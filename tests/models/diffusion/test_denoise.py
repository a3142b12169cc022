"""NoiseSampler: noise becomes the data of a model whose best prediction is known in closed form."""

import pytest
import torch
from torch import nn

from gpubound.decode import NoiseSampler
from gpubound.models.diffusion.objective import TARGETS
from gpubound.watch import no_stall, watch
from gpubound.watch.pretend import simgpu

MEAN, SPREAD = 1.5, 0.4


class Knows(nn.Module):
    """The best prediction where the data are normal numbers of this mean and spread: the mean of x0 or ε given x."""

    def __init__(self, target: str = "eps"):
        super().__init__()
        self.target, self.mean = target, nn.Parameter(torch.tensor(MEAN))

    def forward(self, x, time, shift=0.0):
        angle = (time + 0.008) / 1.008 * (torch.pi / 2)
        share = (angle.cos() / torch.cos(torch.full_like(time, 0.008 / 1.008 * torch.pi / 2))).square().clamp_min(1e-5)[:, None]
        gap, variance = x - share.sqrt() * (self.mean + shift), share * SPREAD**2 + 1 - share
        x0 = self.mean + shift + share.sqrt() * SPREAD**2 * gap / variance
        noise = (1 - share).sqrt() * gap / variance
        return {"eps": noise, "x0": x0, "v": share.sqrt() * noise - (1 - share).sqrt() * x0}[self.target]


def noise(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("target", TARGETS)
def test_noise_goes_to_where_the_exact_flow_takes_it(target):
    """In the limit of small steps a row keeps its distance from the mean, in units of the spread. The error falls with them."""
    far = []
    for steps in (100, 400):
        found = NoiseSampler(Knows(target), target).generate(noise(), steps)
        far.append((found - (MEAN + SPREAD * noise())).abs().max().item())
    assert far[1] < 0.02 and far[1] < far[0] / 2


def test_captured_is_called_and_follows_the_weights():
    model = Knows()
    called, captured = (NoiseSampler(model, graph=graph) for graph in ("off", "require"))
    for start in (noise(), noise().flip(0)):
        want = called.generate(start, 8)
        assert torch.equal(captured.generate(start, 8), want)
    with torch.no_grad():
        model.mean.add_(1)
    assert torch.equal(captured.generate(start, 8), called.generate(start, 8)) and not torch.equal(
        captured.generate(start, 8), want
    )
    moved = called.generate(start, 8, shift=-1.0)
    assert (moved - want).abs().max() < 1e-4, "what else is given goes to the model"


def test_steps_never_wait_for_the_device():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one")
    sampler, start = NoiseSampler(Knows().to(simgpu())), noise().to(simgpu())
    sampler.generate(start, 4)
    with no_stall(), watch() as ledger:
        sampler.generate(start, 4)
    ledger.assert_within(syncs=0, d2h_bytes=0)


def test_refusals():
    for make, named in (
        (lambda: NoiseSampler(Knows(), "noise"), "NoiseSampler: target: got 'noise', wanted one of eps, v, x0"),
        (lambda: NoiseSampler(Knows(), graph="on"), "NoiseSampler: graph: got 'on', wanted one of auto, require, off"),
        (lambda: NoiseSampler(Knows()).generate(torch.zeros(3)), r"generate: noise: got torch.float32 \(3,\)"),
        (lambda: NoiseSampler(Knows()).generate(noise(), 0), "generate: steps: got 0"),
    ):
        with pytest.raises(ValueError, match=named):
            make()
