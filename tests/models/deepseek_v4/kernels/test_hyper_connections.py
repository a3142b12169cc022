"""Hyper-connections: the definitions are transformers' modules, and kernels agree with them, for few tokens and many."""

import pytest
import torch

from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels.hyper_connections import sinkhorn
from gpubound.models.deepseek_v4.kernels.triton import hyper_connections as fast
from tests.kernels.cases import TOLERANCE, agree, definitions, draw, same

from .theirs import config, filled, theirs

reference = definitions("hyper_connections")

FP32, FP64 = torch.float32, torch.float64
# Sums of up to 200 products, and numbers of one balanced matrix; in 16 bits u is rounded once, and X' too.
TOLERANCES = TOLERANCE | {FP32: 1e-5}
SHAPES = [((1,), 4, 40), ((2, 2), 2, 24), ((3, 7), 4, 17)]  # few tokens, few of two streams, many of an odd width
EACH = [(shape, FP32) for shape in SHAPES] + [(SHAPES[0], torch.float16), (SHAPES[2], torch.bfloat16)]


def before(device, dtype, leading, streams: int, width: int, outputs: int, scales: int) -> tuple:
    """Streams in the model's dtype; weights as they are kept, in fp32."""
    x = draw(device, dtype, *leading, streams, width)
    weight = draw(device, FP32, outputs, streams * width, seed=1) * (streams * width) ** -0.5
    return x, weight, draw(device, FP32, scales, seed=2), draw(device, FP32, outputs, seed=3)


@pytest.mark.parametrize("shape, dtype", EACH)
def test_pre_matches(shape, dtype, device):
    leading, streams, width = shape
    given = before(device, dtype, leading, streams, width, (2 + streams) * streams, 3)
    agree("hc_pre", *given, 1e-6, 1e-6, 4, limit=TOLERANCES[dtype])


@pytest.mark.parametrize("shape, dtype", EACH)
def test_head_matches(shape, dtype, device):
    leading, streams, width = shape
    agree("hc_head", *before(device, dtype, leading, streams, width, streams, 1), 1e-6, 1e-6, limit=TOLERANCES[dtype])


@pytest.mark.parametrize("shape, dtype", EACH)
def test_post_matches(shape, dtype, device):
    leading, streams, width = shape
    x, y = draw(device, dtype, *leading, streams, width), draw(device, dtype, *leading, width, seed=1)
    weights = draw(device, FP32, *leading, streams, seed=2), draw(device, FP32, *leading, streams, streams, seed=3)
    agree("hc_post", x, y, *weights, limit=TOLERANCES[dtype])


@pytest.mark.parametrize("tokens", [1, 40])
def test_sums_shared_by_programs(tokens, device):
    """1,200 numbers a token, by ten programs or more."""
    given = before(device, FP32, (tokens,), 4, 300, 24, 3)
    for name, got, want in zip(("u", "post", "comb"), fast.hc_pre(*given), reference.hc_pre(*given)):
        same(name, got, want, TOLERANCES[FP32])


def test_a_token_gives_the_same_bits_in_any_batch_of_few(device):
    given = before(device, FP32, (4,), 4, 300, 24, 3)
    together = fast.hc_pre(*given)
    for n in range(4):
        alone = fast.hc_pre(given[0][n : n + 1], *given[1:])
        assert all(a.equal(b[n : n + 1]) for a, b in zip(alone, together))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_a_nan_reaches_all_that_its_token_gives(device):
    x, *weights = before(device, FP32, (2,), 4, 40, 24, 3)
    x[1, 2, 7] = float("nan")
    for part in fast.hc_pre(x, *weights):
        assert part[0].isfinite().all() and part[1].isnan().all()


def test_transformers_modules_are_the_definitions():
    """The matrix is not symmetric: its transpose would show."""
    x, y = draw(torch.device("cpu"), FP32, 2, 3, 4, 24), draw(torch.device("cpu"), FP32, 2, 3, 24, seed=9)
    site, head = (filled(module(config())) for module in (theirs().DeepseekV4HyperConnection, theirs().DeepseekV4HyperHead))
    post, comb, u = site(x)
    got = reference.hc_pre(x, site.fn, site.scale, site.base, 0.01, 0.1, 5)
    for name, a, b in zip(("u", "post", "comb"), got, (u, post, comb)):
        same(name, a, b, 2e-6)
    # The line of DeepseekV4DecoderLayer.forward
    behind = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    same("X'", reference.hc_post(x, y, post, comb), behind, 2e-6)
    same("head", reference.hc_head(x, head.hc_fn, head.hc_scale, head.hc_base, 0.01, 0.1), head(x), 2e-6)


def test_the_rounds_are_those_of_the_formula_in_fp64():
    """A row's softmax plus eps; then columns, and 19 times rows and columns, each sum with its eps."""
    z = draw(torch.device("cpu"), FP64, 6, 4, 4)
    eps, wanted = 0.03, []  # large, so that it shows wherever it is missing
    for logits in z:
        m = logits.exp() / logits.exp().sum(1, keepdim=True) + eps
        for turn in range(39):
            m = m / ((m.sum(0) if turn % 2 == 0 else m.sum(1, keepdim=True)) + eps)
        wanted.append(m)
    same("matrices", sinkhorn(z, 20, eps), torch.stack(wanted), 1e-14)


WRONG = {
    r"hc_pre: x must be .* of streams \(..., S, D\), got torch.float32 \(6,\)": lambda x: kernels.hc_pre(x[0, 0], x, x, x),
    r"hc_pre: weight must be .* \(24, 24\) for streams \(2, 4, 6\), got torch.float32 \(4, 6\)": lambda x: kernels.hc_pre(
        x, x[0], torch.ones(3), torch.ones(24)
    ),
    r"hc_post: comb must be .* \(2, 4, 4\) .* got torch.int64 \(2, 4, 4\)": lambda x: kernels.hc_post(
        x, x[:, 0], x[..., 0], x[..., :4].long()
    ),
    "hc_pre: iterations must be at least 1, got 0": lambda x: kernels.hc_pre(
        x, torch.ones(24, 24), torch.ones(3), torch.ones(24), iterations=0
    ),
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments(named):
    with pytest.raises(ValueError, match=f"^{named}"):
        WRONG[named](torch.ones(2, 4, 6))
