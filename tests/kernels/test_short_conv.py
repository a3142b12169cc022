"""Short convolutions of a decoding step: kernel and definition agree with a convolution of the whole text."""

import pytest
import torch
import torch.nn.functional as F

from gpubound import kernels
from gpubound.kernels import selftest

from .cases import DTYPES, TOLERANCE, agree, draw, pairwise, same


def convolved(x, weight, bias):
    """(B, T, C) of a text's products, in fp64."""
    gate, output_gate, value = x.double().chunk(3, -1)
    u = F.pad((gate * value).transpose(1, 2), (weight.shape[1] - 1, 0))
    y = F.conv1d(u, weight.double()[:, None], None if bias is None else bias.double(), groups=len(weight))
    return output_gate * y.transpose(1, 2)


@pairwise
@pytest.mark.parametrize("dtype", DTYPES[:2])  # of bf16 the interpreter truncates ring and results
@pytest.mark.parametrize("channels", [64, 300])
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_steps_give_the_convolution_of_the_text(device, dtype, channels, taps, tokens, bias):
    """Two rows, of which one begins later, from a ring full of NaN."""
    length = 2 * tokens
    x = draw(device, torch.float32, 2, length, 3 * channels)
    weight = draw(device, dtype, channels, taps, seed=1)
    shift = draw(device, dtype, channels, seed=2) if bias else None
    want = convolved(x, weight, shift)
    ring = torch.full((2, taps - 1 + tokens, channels), float("nan"), device=device, dtype=dtype)
    for start in range(0, length, tokens):
        position = torch.arange(start, start + tokens, device=device, dtype=torch.int32).repeat(2, 1)
        now = x[:, start : start + tokens].reshape(-1, 3 * channels).contiguous()
        out = torch.empty(2 * tokens, channels, device=device, dtype=dtype)
        _, _, ring, _, _, out, *_ = agree("short_conv", now, position, ring, weight, shift, out)
        same("rows", out.double().view(2, tokens, -1), want[:, start : start + tokens], max(1e-5, 2 * TOLERANCE[dtype]))


def test_a_position_that_does_not_exist_gives_nan_and_changes_nothing(device):
    x, weight, ring = draw(device, torch.float32, 2, 24), draw(device, torch.float32, 8, 3), torch.ones(2, 3, 8, device=device)
    position, out = torch.tensor([-1, 4], device=device, dtype=torch.int32), torch.zeros(2, 8, device=device)
    kernels.short_conv(x, position, ring, weight, None, out)
    assert out[0].isnan().all() and out[1].isfinite().all() and (ring[0] == 1).all() and (ring[1, 1] != 1).all()


def test_a_ring_that_is_too_short_is_refused(device):
    x, weight = torch.zeros(2, 24, device=device), torch.zeros(8, 4, device=device)
    position, out = torch.zeros(2, device=device, dtype=torch.int32), torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="3 places, wanted 4"):
        kernels.short_conv(x, position, torch.zeros(2, 3, 8, device=device), weight, None, out)


@pytest.mark.parametrize(
    ("op", "shape"),
    [("short_conv", (3, False, 2)), ("delta_step", (2, 4, 16, 8, True, 4)), ("mamba_step", (4, 8, 2, 16, 4, True))],
)
def test_a_product_in_the_weights_dtype_is_read_as_it_is(op, shape, device):
    assert selftest.check(op, device, torch.float16, (*shape, True)) is None
