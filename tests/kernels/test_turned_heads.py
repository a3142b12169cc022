"""Heads that are normed and turned: both mirrors beside the formula in fp64, sentences."""

import re

import pytest
import torch

from gpubound import kernels

from .cases import assert_inside, banded, draw
from .test_experts import SOURCES, run


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "pairs", "normed", "gained", "back"),
    [(40, 4, True, True, False), (32, 16, True, False, False), (48, 6, False, False, True)],
)
def test_heads_are_normed_and_turned(source, dtype, width, pairs, normed, gained, back, device):
    x, weight = draw(device, dtype, 3, 2, width), draw(device, torch.float32, width, seed=1) if gained else None
    position = torch.tensor([4, 0, 7], device=device, dtype=torch.int32)
    angle = draw(device, torch.float32, 8, pairs, seed=2)
    whole, out = banded((3, 2, width), device, dtype)
    run(source, "turn_heads", x, position, angle.cos(), angle.sin(), out, weight, 0.1 if normed else None, back)
    assert_inside(whole, out)
    y = x.double()
    if normed:
        y = y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt()
    if weight is not None:
        y = y * weight.double()
    still = width - 2 * pairs
    plane = torch.view_as_complex(y[..., still:].unflatten(-1, (pairs, 2)).contiguous())
    turns = angle.double()[position.long()][:, None] * (-1 if back else 1)
    turned = torch.view_as_real(plane * torch.polar(torch.ones_like(turns), turns)).flatten(-2)
    want = torch.cat([y[..., :still], turned], -1)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


WRONG = {
    "more pairs than channels": (
        lambda x, table: kernels.turn_heads(x, torch.zeros(3).int(), table, table, x.clone()),
        "turn_heads: cos must have at most 4 pairs for heads of 8, got 5.",
    ),
    "a gain without a norm": (
        lambda x, table: kernels.turn_heads(x, torch.zeros(3).int(), table, table, x.clone(), torch.ones(8)),
        "turn_heads: weight is of a norm, which eps=None leaves out; pass its eps.",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    call, sentence = WRONG[what]
    table = torch.ones(6, 5)
    if what == "a gain without a norm":
        table = torch.ones(6, 2).expand(6, 2).contiguous()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call(torch.ones(3, 2, 8), table)
